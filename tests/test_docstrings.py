"""Docstrings begin with what the thing is or does, and every module and public class of the package has one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "research", "examples")
FORBIDDEN = ("Of", "What", "Whether", "Who", "Whose", "That", "Where", "For", "To", "As", "In", "When", "How")
"""First words of a docstring that has no subject or verb in front."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those below assignments included."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
                continue
            if (before is None and isinstance(node, Documented)) or isinstance(before, ast.Assign | ast.AnnAssign):
                yield statement.lineno, value.value


def faults(text: str) -> list[str]:
    found = []
    for line, docstring in docstrings(text):
        word = re.match(r"\s*([A-Za-z]+)", docstring)
        if word and word[1] in FORBIDDEN:
            found.append(f"{line}: begins with {word[1]!r}")
    return found


def files() -> list[Path]:
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    wrong = [f"{file.relative_to(ROOT)}:{fault}" for file in files() for fault in faults(file.read_text())]
    assert wrong == []


@pytest.mark.full
def test_modules_and_public_classes_have_docstrings() -> None:
    """Empty modules are left out."""
    lacking = []
    for file in sorted((ROOT / "src" / "shotcast").rglob("*.py")):
        tree = ast.parse(file.read_text())
        lacking += [] if ast.get_docstring(tree) or not tree.body else [str(file.relative_to(ROOT))]
        for node in tree.body:
            public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                lacking.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert lacking == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Of a call, its header."""', 1),
        ('def f():\n    """What ranks compare."""', 1),
        ('X = 1\n"""Whether it is."""', 1),
        ('class A:\n    x: int\n    """To be read."""', 1),
        ('"""The header of a call."""\nX = "Of"\n"Offers"', 0),
        ('def f():\n    """Return whether it is."""\n    return "What"', 0),
        ('"""Inputs, forwarded."""', 0),
    ],
)
def test_a_planted_fault_is_found(text: str, count: int) -> None:
    assert len(faults(text)) == count
