"""Pages are found, link to what exists, and name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import MARKS, PAGES, ROOT, fences_of, without_fences

import test_imports

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]+))?\)")
RAW = ROOT / "benchmarks" / "data" / "h200"
NAMED_ELSEWHERE = {"config.json", "generation_config.json", "_x2.json"}
"""Files of every model, and the end of a name."""


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_fences(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        # a folder has no page on the site
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target, _ in LINK.findall(index.read_text())}
    assert {named(page) for page in PAGES if page != index and page not in linked} == set()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    text = without_fences(page)
    sources = re.findall(r"`([\w/]+/[\w.]+\.(?:py|sh))`", text)
    results = re.findall(r"`([\w/]+\.(?:json|txt|xml))`", text)
    roots = (ROOT, ROOT / "tests", ROOT / "src" / "shotcast", ROOT / "src" / "shotcast" / "collectives")
    absent = [name for name in sources if not any((root / name).exists() for root in roots)]
    known = {file.name for folder in ("src", "tests", "research") for file in (ROOT / folder).rglob("*.py")}
    absent += [name for name in re.findall(r"`(\w+\.py)`", text) if name not in known]
    kept = (ROOT, ROOT / "benchmarks", RAW, RAW / "exploration")
    absent += [
        name for name in results if name not in NAMED_ELSEWHERE and not any((root / name).exists() for root in kept)
    ]
    assert absent == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "design"], ids=named)
def test_names_of_modules_exist(page: Path) -> None:
    """A page that writes ``module.name`` means a name that the module has. Design notes may name what is gone."""
    modules: dict[str, list[Path]] = {}
    for file in (ROOT / "src" / "shotcast").rglob("*.py"):
        modules.setdefault(file.stem, []).append(file)
    pairs = re.findall(r"`(\w+)\.(\w+)(?:\(\))?`", without_fences(page))
    absent = [
        f"{module}.{name}"
        for module, name in pairs
        if module in modules
        and name not in ("py", "json", "sh")
        and not any(re.search(rf"\b{name}\b", file.read_text()) for file in modules[module])
    ]
    assert absent == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_say_what_they_are(page: Path) -> None:
    """The first word is the language; the second says why no test runs the block."""
    unknown = [f"{fence.where}: {fence.language} {fence.mark}" for fence in fences_of(page)
               if fence.mark not in MARKS.get(fence.language, {})]  # fmt: skip
    assert unknown == []


def test_the_readme_takes_half_a_minute() -> None:
    """It has at most 1,000 words in all."""
    assert len((ROOT / "README.md").read_text().split()) <= 1000


def test_no_package_index_is_named_but_that_of_pytorch() -> None:
    files = [*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / ".github").rglob("*.yml")]
    named = {host for file in files for host in re.findall(r"index-url[ =]\S*?//([\w.]+)", file.read_text())}
    assert named == {"download.pytorch.org"}


def test_the_documentation_does_not_grow() -> None:
    """A page that says more takes the place of one that says less: 46,000 words are four hours of reading."""
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md")) <= 46_000


def test_the_tutorial_shows_the_algorithm_of_the_example() -> None:
    example = (ROOT / "examples" / "06_own_algorithm.py").read_text()
    lines = {line.strip() for line in example.splitlines()}
    shown = [fence for fence in fences_of(ROOT / "docs" / "tutorials" / "algorithm.md") if fence.language == "python"]
    assert len(shown) == 2
    for fence in shown:
        assert {line.strip() for line in fence.body.splitlines()} <= lines


def test_the_house_is_that_of_the_imports() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    house = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert house is not None
    rooms = [line[:30].split() for line in house[1].splitlines()]
    assert rooms == [list(layer) for layer in reversed(test_imports.LAYERS)]
