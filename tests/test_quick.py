"""`make quick` runs tests of every room of the package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "src" / "shotcast", ROOT / "tests"


def quick() -> set[str]:
    """The files that the Makefile names."""
    named = re.search(r"^QUICK := (.*?[^\\])\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert named is not None
    return set(named[1].replace("\\\n", " ").split())


def test_every_room_has_quick_tests() -> None:
    files = quick()
    assert {file for file in files if not (ROOT / file).is_file()} == set()
    rooms = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    rooms &= {folder.name for folder in TESTS.iterdir()}
    assert len(rooms) > 15
    assert {room for room in rooms if not any(file.startswith(f"tests/{room}/") for file in files)} == set()
