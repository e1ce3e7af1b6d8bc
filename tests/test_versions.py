"""The versions that a page says were run are those that the metadata and the documents promise."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "reference" / "hardware.md").read_text()


def column(name: str) -> list[tuple[int, int]]:
    """Return the versions, without the last number, of a column of the table."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|")]
    (heads,) = [row for row in rows if row[0] == "Python"]
    below = rows[rows.index(heads) + 2 :]
    cells = [row[heads.index(name)] for row in below if len(row) == len(heads)]
    return [(int(major), int(minor)) for major, minor in (cell.split(".")[:2] for cell in cells)]


def text_of(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def test_pythons() -> None:
    ran = sorted(set(column("Python")))
    classified = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Language :: Python ::" in name]
    assert classified == [text_of(version) for version in ran]
    assert PROJECT["requires-python"] == f">={text_of(ran[0])}"
    promised = f"Python {classified[0]} to {classified[-1]}"
    assert [minor for _, minor in ran] == list(range(ran[0][1], ran[-1][1] + 1)), "none between them is left out"
    for file in ("README.md", "CONTRIBUTING.md", "docs/reference/hardware.md"):
        assert promised in (ROOT / file).read_text(), file


@pytest.mark.parametrize(
    ("name", "requirements"),
    [("PyTorch", PROJECT["dependencies"]), ("Triton", PROJECT["optional-dependencies"]["triton"])],
)
def test_libraries_are_wanted_from_the_earliest_that_ran(name: str, requirements: list[str]) -> None:
    package = {"PyTorch": "torch"}.get(name, name.lower())
    (bound,) = [found[1] for text in requirements if (found := re.match(rf"{package}>=([\d.]+)", text))]
    assert bound == text_of(min(column(name)))


def test_the_extra_brings_no_triton_later_than_those_that_ran() -> None:
    """A newcomer gets the latest that it allows, with which the tutorial then has to work."""
    major, minor = max(column("Triton"))
    (bound,) = (text for text in PROJECT["optional-dependencies"]["triton"] if text.startswith("triton"))
    assert bound.endswith(f",<{major}.{minor + 1}")


def test_the_backend_names_the_versions_that_ran() -> None:
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
    ran = column("PyTorch")
    assert f"PyTorch {text_of(min(ran))} to {text_of(max(ran))}." in page
