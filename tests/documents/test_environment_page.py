"""The page of environment variables has all that are read, and no other."""

from __future__ import annotations

import re

from pages import ROOT

TEXT = (ROOT / "docs" / "reference" / "environment.md").read_text()
SOURCES = [file.read_text() for file in (ROOT / "src" / "shotcast").rglob("*.py")]


def test_own_variables() -> None:
    read = {name for source in SOURCES for name in re.findall(r"\bSHOTCAST_[A-Z0-9_]+\b", source)}
    listed = re.findall(r"^\| `(SHOTCAST_\w+)` \|", TEXT, re.MULTILINE)
    assert sorted(listed) == sorted(read)


def test_variables_of_the_job() -> None:
    names = r"\b(?:(?:LOCAL_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT))\b"
    read = {name for source in SOURCES for name in re.findall(names, source)}
    assert {name for name in read if f"`{name}`" not in TEXT} == set()


def test_variables_of_others_are_read_somewhere() -> None:
    for name in ("TMPDIR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TRITON_INTERPRET"):
        assert f"`{name}`" in TEXT
        assert any(name in source for source in SOURCES), name
