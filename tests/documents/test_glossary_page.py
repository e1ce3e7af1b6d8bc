"""The glossary has every public class and every algorithm, in one line each."""

from __future__ import annotations

import inspect
import re

from pages import ROOT

import shotcast
from shotcast import errors, overlap
from shotcast.collectives.registry import BUILT_IN

TEXT = (ROOT / "docs" / "reference" / "glossary.md").read_text()
API = (ROOT / "docs" / "reference" / "api.md").read_text()


def terms(text: str) -> list[str]:
    """Return the first cells of the tables."""
    return [term.strip("`") for term in re.findall(r"^\| (?!term \|)([^|]+?) \| [^|]+ \|$", text, re.MULTILINE)]


def classes_of_the_api_page() -> set[str]:
    """Return the names in code on the API page that are classes of the package."""
    code = " ".join(re.findall(r"`[^`]+`|^### \w+$", API, re.MULTILINE))
    sources = (file.read_text() for file in (ROOT / "src" / "shotcast").rglob("*.py"))
    defined = {name for source in sources for name in re.findall(r"^class (\w+)", source, re.MULTILINE)}
    return set(re.findall(r"\b[A-Z]\w+\b", code)) & defined


def public_nouns() -> set[str]:
    """Return the public classes of the package, and the names of its algorithms."""
    names = {name for name in shotcast.__all__ if inspect.isclass(getattr(shotcast, name))}
    names |= {name for name in overlap.__all__ if inspect.isclass(getattr(overlap, name))}
    names |= {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    return names | classes_of_the_api_page() | {algorithm.name for algorithm in BUILT_IN}


def lacking(text: str) -> set[str]:
    """Return the public nouns that a glossary does not have."""
    return public_nouns() - set(terms(text))


def test_every_public_noun_is_there() -> None:
    assert lacking(TEXT) == set()


def test_an_absent_noun_is_found() -> None:
    """A class of the package, one that only the API page has, and an algorithm."""
    for name in ("Communicator", "ShotcastProcessGroup", "EngineStats", "two_shot"):
        without = re.sub(rf"^\| `{name}` \|.*\n", "", TEXT, flags=re.MULTILINE)
        assert lacking(without) == {name}


def test_every_term_has_one_line() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and line != "| term | |"]
    assert len(rows) == len(terms(TEXT)), "a row without a meaning"
    assert len(set(terms(TEXT))) == len(terms(TEXT))


def test_terms_are_in_order() -> None:
    for section in TEXT.split("\n## ")[1:]:
        names = [term.lower() for term in terms(section)]
        assert names == sorted(names), section.splitlines()[0]


def test_no_term_of_a_class_is_gone() -> None:
    """Terms in the table of classes are names that the package defines."""
    classes = set(terms(TEXT.partition("\n## Classes\n")[2]))
    assert classes <= public_nouns()
