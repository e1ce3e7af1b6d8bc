"""SECURITY.md names every module that unpickles."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

UNPICKLES = re.compile(
    r"pickle\.loads?\(|Unpickler|(?<!def )\brecv\(\)|torch\.load\(|allow_pickle"
    r"|(gather|broadcast|scatter|send|recv)_object(_list)?\(|\bmarshal\b|\bshelve\b"
)
"""Calls that unpickle: ``recv`` is that of multiprocessing's connections."""


def test_every_module_that_unpickles_is_named() -> None:
    section = (ROOT / "SECURITY.md").read_text().split("## What is unpickled")[1].split("## ")[0]
    package = ROOT / "src" / "shotcast"
    modules = {str(file.relative_to(package)) for file in package.rglob("*.py") if UNPICKLES.search(file.read_text())}
    assert modules == set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", section))
