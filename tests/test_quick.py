"""`make quick` runs tests of every room of the package, and `make test` cases of every thinned test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = "pytester"

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


def test_each_nth_case_is_left_to_make_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = every: of cases\n  full: left out\n  long: first")
    pytester.makepyfile(
        """
        import pytest

        class TestThem:
            @pytest.mark.every(3)
            @pytest.mark.parametrize("case", range(7))
            def test_thinned(self, case): ...

        @pytest.mark.every(2)
        def test_one(): ...

        @pytest.mark.parametrize("case", range(2))
        def test_whole(case): ...
        """
    )
    chosen = pytester.runpytest("--collect-only", "-q", "-m", "not full", "-p", "no:cacheprovider").outlines
    names = [line.rpartition("::")[2] for line in chosen if "::" in line]
    assert names == [
        "test_thinned[0]",
        "test_thinned[3]",
        "test_thinned[6]",
        "test_one",
        *(f"test_whole[{i}]" for i in (0, 1)),
    ]
    assert pytester.inline_run("--collect-only", "-q", "-p", "no:cacheprovider").ret == 0
