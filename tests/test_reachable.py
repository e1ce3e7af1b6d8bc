"""Every module of the package is reached from a public name, a command or an entry point; its definitions are used."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import shotcast
from shotcast import functional, overlap
from test_imports import ENTRY_POINTS, PROJECT, SOURCE, imported

REFERENCE = re.compile(r"shotcast(?:\.\w+)+(?=:\w+$|$)")
"""A module by name, and in descriptions of algorithms a name of it: ``shotcast.transport.cpu.ring:ALL_REDUCE``."""
SHOWN = ("shotcast.integrations.ray",)
"""Modules that no public name leads to, and that guides tell users to import."""
FOUND = {"shotcast.collectives.registry": "shotcast.collectives.algorithms"}
"""Modules that import every module of a package, whatever its name."""


USED_OUTSIDE = ("of_modules", "of_collectives")
"""Definitions that nothing in the package uses: research and tests write fingerprints of kernels into their results."""
FOUND_BY_PATH = ("ShotcastCudaPlatform", "ShotcastCudaCommunicator", "ShotcastWorker")
"""Classes whose paths the package tells vLLM."""
REGISTERING = re.compile(r"atexit\.register|app\.\w+\(")
"""Decorators that hand a function to those who call it."""


def roots() -> set[str]:
    """Return the modules of all public names, of the commands and of the entry points."""
    public = {shotcast._LAZY.get(name, "shotcast") for name in shotcast.__all__}
    packages = {f"shotcast.{name}" for name in shotcast._PACKAGES}
    lazy = {f"shotcast.overlap.{overlap._MODULES[name]}" for name in overlap.__all__}
    return public | packages | lazy | {"shotcast", "shotcast.__main__", *ENTRY_POINTS, *SHOWN}


def modules_of(root: Path) -> dict[str, Path]:
    """Return the files of a package by the names of their modules."""
    found = {}
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(("shotcast", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = file
    return found


class _WhatRuns(ast.NodeTransformer):
    """Leaves out what only a type checker reads, and docstrings."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else node


def named(file: Path, module: str) -> Iterator[str]:
    """Yield every name that the code of a module imports, or has in a string."""
    tree = _WhatRuns().visit(ast.parse(file.read_text()))
    for _, name in imported(tree, f"{module}.__init__" if file.name == "__init__.py" else module):
        yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (found := REFERENCE.match(node.value)):
            yield found[0]


def unreachable(root: Path, begin: set[str], found: dict[str, str]) -> set[str]:
    """Return the modules below ``root`` that the modules of ``begin`` lead to by no import, early or late.

    Args:
        root: the package.
        begin: names of modules.
        found: for a module the package whose modules it finds by itself.
    """
    modules = modules_of(root)
    seen: set[str] = set()
    left = list(begin)
    while left:
        name = left.pop()
        while name and name not in modules:  # a name that a module has
            name = name.rpartition(".")[0]
        if not name or name in seen:
            continue
        seen.add(name)
        left += [name.rpartition(".")[0], *named(modules[name], name)]
        if name in found:
            left += [each for each in modules if each.startswith(f"{found[name]}.")]
    return set(modules) - seen


@pytest.mark.full
def test_every_module_is_reached() -> None:
    assert unreachable(SOURCE, roots(), FOUND) == set()


def unused(root: Path, public: set[str]) -> set[str]:
    """Return the functions and classes of modules whose names no other code of the package has, and ``public`` neither.

    Names are compared alone: what shares its name with something used counts as used.
    """
    names: Counter[str] = Counter(public)
    definitions: list[tuple[str, Counter[str]]] = []
    for file in root.rglob("*.py"):
        tree = _WhatRuns().visit(ast.parse(file.read_text()))
        names += _names(tree)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not (
                node.name.startswith("__") or any(REGISTERING.match(ast.unparse(one)) for one in node.decorator_list)
            ):
                definitions.append((node.name, _names(node)))
    return {name for name, own in definitions if names[name] == own[name]}


def _names(tree: ast.AST) -> Counter[str]:
    """Count the names that code reads, by themselves or of something, and those in descriptions of algorithms."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found[name] += 1
            case ast.Constant(value=str(text)) if REFERENCE.match(text):
                found[text.rpartition(":")[2]] += 1
    return found


def test_every_definition_is_used() -> None:
    points = {point.split(":")[1] for points in PROJECT["entry-points"].values() for point in points.values()}
    assert unused(SOURCE, {*shotcast.__all__, *functional.__all__, *overlap.__all__, *FOUND_BY_PATH, *points}) == set(
        USED_OUTSIDE
    )


@pytest.mark.parametrize(
    ("near", "far"),
    [
        ("def f():\n    return f()", ""),
        ("class f:\n    pass", "from shotcast.near import f"),
        ("def f():\n    pass", "text = 'f'"),
        ("@cache\ndef f():\n    pass", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    x: f"),
    ],
)
def test_what_nobody_uses_is_found(tmp_path: Path, near: str, far: str) -> None:
    (tmp_path / "near.py").write_text(near)
    (tmp_path / "far.py").write_text(far)
    assert unused(tmp_path, set()) == {"f"}


@pytest.mark.parametrize(
    ("near", "far"),
    [
        ("def f():\n    pass", "from shotcast.near import f\nf()"),
        ("class f:\n    pass", "def __getattr__(x: near.f):\n    pass"),
        ("def f():\n    pass\nf()", ""),
        ("def f():\n    pass", "FORM = 'shotcast.near:f'"),
        ("@app.command('f')\ndef f():\n    pass", ""),
        ("def public():\n    pass", ""),
    ],
)
def test_what_somebody_uses_is_not_found(tmp_path: Path, near: str, far: str) -> None:
    (tmp_path / "near.py").write_text(near)
    (tmp_path / "far.py").write_text(far)
    assert unused(tmp_path, {"public"}) == set()


def test_guides_show_what_they_tell_users_to_import() -> None:
    guides = "".join(page.read_text() for page in (SOURCE.parents[1] / "docs" / "guides").glob("*.md"))
    assert all(f"from {module} import" in guides for module in SHOWN)


@pytest.mark.parametrize(
    "code",
    [
        "from shotcast.bench import far",
        "from shotcast.bench.far import x",
        "import shotcast.bench.far",
        "from .bench import far",
        "def f():\n    from shotcast.bench.far import x",
        "import importlib\nimportlib.import_module('shotcast.bench.far')",
        "FORM = dict(cpu='shotcast.bench.far:ALL_REDUCE')",
    ],
)
def test_what_is_imported_or_named_is_reached(tmp_path: Path, code: str) -> None:
    plant(tmp_path, code)
    assert unreachable(tmp_path, {"shotcast.near"}, {}) == {"shotcast.lone"}


@pytest.mark.parametrize(
    "code",
    [
        "import shotcast.bench",
        "'shotcast.bench.far'",
        "X = 'by shotcast.bench.far'",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shotcast.bench.far import x",
    ],
)
def test_what_is_not_imported_is_not_reached(tmp_path: Path, code: str) -> None:
    plant(tmp_path, code)
    assert "shotcast.bench.far" in unreachable(tmp_path, {"shotcast.near"}, {})


def test_packages_whose_modules_are_found_are_reached(tmp_path: Path) -> None:
    plant(tmp_path, "")
    assert unreachable(tmp_path, {"shotcast.near"}, {"shotcast.near": "shotcast.bench"}) == {"shotcast.lone"}


def plant(folder: Path, code: str) -> None:
    """Write a package: ``near`` with some code, ``bench.far``, and ``lone``, which imports all and nobody imports."""
    (folder / "bench").mkdir()
    for name, text in {
        "__init__": "",
        "near": code,
        "bench/__init__": "",
        "bench/far": "x = 1",
        "lone": "from shotcast import near\nfrom shotcast.bench import far",
    }.items():
        (folder / f"{name}.py").write_text(text)
