"""Imports point down and form no circle, heavy libraries are imported late, and importing has no side effects."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import shotcast

SOURCE = Path(__file__).parent.parent / "src" / "shotcast"
PROJECT = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]

LAYERS = (
    ("errors",),
    ("units",),
    ("extras",),
    ("env",),
    ("wire",),
    ("hardware", "cost"),
    ("memory",),
    ("device",),
    ("kernels",),
    ("transport",),
    ("launcher",),
    ("collectives",),
    ("overlap",),
    ("functional", "layers"),
    ("models",),
    ("planner",),
    ("engine",),
    ("simulator",),
    ("bench", "process_group", "server"),
    ("integrations",),
    ("cli",),
)
"""The layers from low to high. Parts of one layer do not import each other."""

ROOT_MODULES = ("__init__", "__main__")
"""Modules above all layers; other modules may import only the version from `shotcast`."""


def level(part: str) -> int:
    for number, parts in enumerate(LAYERS):
        if part in parts:
            return number
    raise AssertionError(f"shotcast.{part} has no place in LAYERS")


def imported(tree: ast.AST, module: str) -> list[tuple[int, str]]:
    """Return the line and the full name of everything that a module imports, at any level of the code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = module.split(".")[: -node.level]
                origin = ".".join([*base, *([node.module] if node.module else [])])
            else:
                origin = node.module or ""
            found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.append((node.lineno, str(node.args[0].value)))
    return found


def violations(root: Path) -> list[str]:
    wrong = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[0] in ROOT_MODULES:
            continue
        module = ".".join(("shotcast", *parts))
        for line, name in imported(ast.parse(file.read_text()), module):
            pieces = name.split(".")
            if pieces[0] != "shotcast" or (len(pieces) > 1 and pieces[1] == parts[0]):
                continue
            where = f"{'/'.join(parts)}.py:{line} imports {name}"
            if len(pieces) == 1 or pieces[1] in shotcast._LAZY:
                wrong.append(f"{where}: the package root is above everything")
            elif pieces[1] != "__version__" and level(pieces[1]) >= level(parts[0]):
                wrong.append(where)
    return wrong


def circles(root: Path) -> list[str]:
    """Return each circle of modules that import each other.

    Every import counts: at the top of a module, under ``TYPE_CHECKING`` and inside a function. The import of a name
    counts as an import of the module of that name or, if there is none, of the module that defines it. The package root
    is left out, as it is above everything.
    """
    modules = {}
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[0] not in ROOT_MODULES:
            modules[".".join(("shotcast", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = file
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, file in modules.items():
        path = f"{module}.__init__" if file.name == "__init__.py" else module
        for _, name in imported(ast.parse(file.read_text()), path):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != module:
                graph[module].add(name)
    found = []
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            importers = list(reversed(error.args[1]))
            found.append(" -> ".join(importers))
            graph = {module: names - set(importers) for module, names in graph.items() if module not in importers}
        else:
            return sorted(found)


def test_imports_point_down() -> None:
    assert violations(SOURCE) == []


def test_every_part_has_a_place() -> None:
    names = {file.stem for file in SOURCE.glob("*.py")} | {file.parent.name for file in SOURCE.glob("*/__init__.py")}
    assert names - set(ROOT_MODULES) == {part for parts in LAYERS for part in parts}


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("memory/a.py", "from shotcast.collectives.communicator import Communicator"),
        ("memory/a.py", "def f():\n    import shotcast.kernels.triton.norm"),
        (
            "memory/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shotcast.device.cpu import atomics",
        ),
        ("kernels/a.py", "from shotcast import transport"),
        ("kernels/a.py", "from ..transport.cpu import waiting"),
        ("kernels/deep/a.py", "from ...transport.triton import sync"),
        ("hardware/a.py", "import shotcast.cost"),
        ("env.py", "from shotcast.wire import Op"),
        ("collectives/a.py", "import importlib\nimportlib.import_module('shotcast.bench.harness')"),
        ("device/a.py", "from shotcast import Communicator"),
        ("device/a.py", "from shotcast import LLM"),
        ("device/a.py", "import shotcast"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, code: str) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(code)
    assert len(violations(tmp_path)) == 1


def test_downward_imports_are_not_violations(tmp_path: Path) -> None:
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "a.py").write_text(
        "from shotcast import env, __version__\nfrom shotcast.memory.shm import x\nfrom . import b\nimport torch\n"
    )
    assert violations(tmp_path) == []


def test_there_is_no_circle() -> None:
    assert circles(SOURCE) == []


A_IMPORTS_B = "from shotcast.bench.b import x"


@pytest.mark.parametrize(
    "files",
    [
        {"bench/a.py": A_IMPORTS_B, "bench/b.py": "from shotcast.bench import a"},
        {"bench/a.py": A_IMPORTS_B, "bench/b.py": "import shotcast.bench.a as a"},
        {"bench/a.py": A_IMPORTS_B, "bench/b.py": "from . import a"},
        {"bench/a.py": A_IMPORTS_B, "bench/b.py": "def f():\n    from shotcast.bench.a import y"},
        {
            "bench/a.py": A_IMPORTS_B,
            "bench/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shotcast.bench.a import y",
        },
        {"bench/a.py": A_IMPORTS_B, "bench/b.py": "import importlib\nimportlib.import_module('shotcast.bench.a')"},
        {"bench/a.py": A_IMPORTS_B, "bench/b.py": "from shotcast.cli import c", "cli/c.py": "import shotcast.bench.a"},
        {"cli/__init__.py": "from shotcast.cli.c import x", "cli/c.py": "from shotcast.cli import y"},
        {"cli/__init__.py": "from .c import x", "cli/c.py": "import shotcast.cli"},
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "units.py").write_text("import re")
    files |= {"bench/before.py": "from shotcast.bench import a", "bench/after.py": "import os"}
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"from shotcast import units\nfrom shotcast.bench import after\n{code}\n")
    (tmp_path / "bench" / "after.py").write_text("from shotcast import units\n")
    found = circles(tmp_path)
    assert len(found) == 1
    assert not any(name in found[0] for name in ("before", "after", "units"))


def test_two_circles_are_both_found(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")):
        (tmp_path / f"{name}.py").write_text(f"from shotcast import {other}\n")
    assert [set(circle.split(" -> ")) for circle in circles(tmp_path)] == [
        {"shotcast.a", "shotcast.b"},
        {"shotcast.c", "shotcast.d"},
    ]


def test_what_imports_one_module_by_two_ways_is_no_circle(tmp_path: Path) -> None:
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "__init__.py").write_text("from shotcast.cli import a, b\n")
    (tmp_path / "cli" / "a.py").write_text("from shotcast import __version__\nfrom shotcast.cli import b\n")
    (tmp_path / "cli" / "b.py").write_text("from shotcast.cli.c import x\n")
    (tmp_path / "cli" / "c.py").write_text("import os\n")
    assert circles(tmp_path) == []


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, cwd=SOURCE.parent
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


ENTRY_POINTS = [point.split(":")[0] for points in PROJECT["entry-points"].values() for point in points.values()]
"""Modules that other programs import when they start, whether or not they are to use this package."""


@pytest.mark.parametrize(
    "module",
    [
        *("shotcast", "shotcast.cli", "shotcast.hardware.detect", "shotcast.wire", "shotcast.integrations.status"),
        *ENTRY_POINTS,
        "shotcast.integrations.ray",
    ],
)
def test_heavy_libraries_are_not_imported(module: str) -> None:
    heavy = ("torch", "numpy", "triton", "numba", "matplotlib", "ray", "vllm", "sglang", "transformers")
    heavy += () if module == "shotcast.cli" else ("rich", "typer")
    assert run(f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])") == "[]"


def test_an_engine_imports_no_planner() -> None:
    """Only an engine that is to plan its layout does."""
    code = "import sys, shotcast; shotcast.LLM; print([name for name in sys.modules if 'shotcast.planner' in name])"
    assert run(code) == "[]"


def test_communicator_needs_no_triton_and_no_gpu() -> None:
    """CPU ranks work where Triton is not installed."""
    code = """
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "triton":
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Blocked())
        import shotcast
        shotcast.Communicator, shotcast.spawn
        print("imported")
    """
    assert run(code) == "imported"


def test_package_imports_without_any_heavy_library() -> None:
    code = """
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("torch", "triton", "numba", "numpy"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Blocked())
        import shotcast, shotcast.cli
        print(shotcast.ConfigError("works"), shotcast.__version__)
    """
    assert run(code).startswith("works ")


def test_importing_has_no_side_effects() -> None:
    code = """
        import os, threading, signal, logging
        def state():
            return (dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGINT),
                    logging.getLogger().handlers[:], len(os.listdir("/proc/self/fd")))
        before = state()
        import shotcast, shotcast.cli, shotcast.hardware.detect, shotcast.hardware.catalog
        print(state() == before)
    """
    assert run(code) == "True"


@pytest.mark.full
def test_importing_every_module_starts_nothing() -> None:
    """Importing starts no thread, no process group and no CUDA, and leaves the environment as torch sets it."""
    code = """
        import importlib, os, pkgutil, sys, threading
        import torch, torch.distributed
        try:
            import numba, triton
        except ImportError:
            pass
        before = dict(os.environ), threading.active_count()
        import shotcast
        for module in pkgutil.walk_packages(shotcast.__path__, "shotcast."):
            extends_another_program = ".vllm_" in module.name or module.name.endswith(".ray_group")
            if module.name != "shotcast.__main__" and not extends_another_program:
                importlib.import_module(module.name)
        print(before == (dict(os.environ), threading.active_count()),
              torch.cuda.is_initialized(), torch.distributed.is_initialized())
    """
    assert run(code) == "True False False"


def test_all_tests_can_be_collected_together() -> None:
    """pytest imports test files and their helpers by name, so one run cannot have two of the same name."""
    folders = (Path(__file__).parent, Path(__file__).parents[1] / "research")
    names = [path.name for folder in folders for path in folder.rglob("*.py")]
    names = [name for name in names if name not in ("conftest.py", "__init__.py")]
    assert sorted(names) == sorted(set(names))
