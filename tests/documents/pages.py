"""The documents of the repository, and what is shown in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("benchmarks/*.md")),
    ROOT / "research" / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("research/reports/*.md")),
    ROOT / "tests" / "protocols" / "README.md",
]

_FENCE = re.compile(r"^( *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^\1```$", re.MULTILINE | re.DOTALL)

MARKS = {
    "sh": {
        "": "a test runs it",
        "install": "it installs packages",
        "make": "it is a target of the Makefile, which installs and takes minutes",
        "long": "it takes minutes",
        "stays": "it goes on until it is ended",
        "gpu": "it needs GPUs",
        "hosts": "it needs several hosts",
    },
    "python": {
        "": "a test runs it as a script",
        "ranks": "a test runs it on two CPU ranks, where comm is their communicator",
        "fragment": "it is a part of something else",
        "server": "it needs a running server",
        "gpu": "it needs GPUs",
    },
    "yaml": {"": "a test reads it as the description of a cluster"},
    "text": {"": "it is no command"},
    "": {"": "it is no command"},
}
"""The info strings of fences: language, then a mark, with what the mark says."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    mark: str
    body: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The commands of a block of shell, as words; comments and continued lines are taken care of."""
        lines = self.body.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def fences(language: str) -> list[Fence]:
    """All blocks of a language."""
    return [fence for page in PAGES for fence in fences_of(page) if fence.language == language]


def fences_of(page: Path) -> list[Fence]:
    """All blocks of a page."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        language, _, mark = match["info"].strip().partition(" ")
        found.append(Fence(page, text.count("\n", 0, match.start()) + 1, language, mark, match["body"]))
    return found


def without_fences(page: Path) -> str:
    """The text of a page without its blocks."""
    return _FENCE.sub("", page.read_text())
