"""Fingerprints of kernels: a renamed function changes none, and every change of the code those that it concerns."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shotcast
from shotcast.collectives import fingerprints
from shotcast.collectives.algorithm import Algorithms, Form
from shotcast.collectives.registry import registered
from shotcast.device import fingerprint
from shotcast.device.fingerprint import Tree, of_host_call, of_launch, of_module
from shotcast.transport.cpu import COMPILED
from shotcast.transport.network import HOSTS
from shotcast.transport.triton import GPUS
from shotcast.wire import Op

SOURCE = Path(shotcast.__file__).parent

KERNEL = '''
"""A kernel."""
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from shotcast.device.helpers import SCALE, twice as double
from shotcast.device import helpers

LIMIT = tl.constexpr(7)


class Pair(NamedTuple):
    first: tl.tensor
    second: tl.tensor


class Numbers(NamedTuple):
    left: tl.tensor
    right: tl.tensor


@dataclass(frozen=True)
class Shape:
    WIDTH: int
    HEIGHT: int = 3


@kernel(shape=Shape)
def whole(numbers: Numbers, SHAPE: tl.constexpr):
    product(numbers.left, numbers.right, SHAPE.WIDTH)


@triton.jit
def product(x, factor, BLOCK: tl.constexpr):
    """Multiply."""
    pair = Pair(first=x, second=factor)
    # a comment
    total: tl.tensor = pair.first * pair.second
    return double(total, times=SCALE) + helpers.offset(BLOCK) + LIMIT


def bind(plan, context):
    settings = {"maxnreg": 64}
    return context.launch(whole, plan, programs=3, options=settings)
'''
HELPERS = """
import triton
import triton.language as tl

SCALE = tl.constexpr(2)
UNUSED = tl.constexpr(3)
INTERPRETED = False

if INTERPRETED:

    def offset(BLOCK):
        return 1000

else:

    @triton.jit
    def offset(BLOCK: tl.constexpr):
        return BLOCK % 5


@triton.jit
def twice(value, extra=0, times=1):
    return value * times + extra


@triton.jit
def unused(value):
    return value
"""


def small_tree(folder: Path, kernel: str = KERNEL, helpers: str = HELPERS) -> Tree:
    (folder / "device").mkdir(parents=True, exist_ok=True)
    (folder / "device" / "__init__.py").write_text("")
    (folder / "device" / "kernel.py").write_text(kernel)
    (folder / "device" / "helpers.py").write_text(helpers)
    return Tree(folder)


def small_fingerprint(folder: Path, kernel: str = KERNEL, helpers: str = HELPERS) -> str:
    return of_launch(small_tree(folder, kernel, helpers), "shotcast.device.kernel:bind")


@functools.cache
def unchanged() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return small_fingerprint(Path(folder))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("total", "sum_of_all"),
        (r"\bx\b", "values"),
        ("product", "multiplied"),
        ("BLOCK", "SIZE"),
        ("Numbers", "Values"),
        (r"\bSHAPE\b", "FACTS"),
        (r"\bShape\b", "Facts"),
        ("LIMIT", "MOST"),
        ("Pair", "Two"),
        ('"""Multiply."""', '"""Return the product, and more."""'),
        ("# a comment", ""),
        (": tl.tensor =", " ="),
        (r"as double", "as times_two"),
        ("settings", "chosen"),
        (r"plan, context", "call, rank"),
        ("programs=3", "programs=5"),
        (r"\btl\b", "language"),
        ("from shotcast.device.helpers import SCALE, twice as double", "from .helpers import SCALE, twice as double"),
    ],
)
def test_what_is_not_code_changes_nothing(tmp_path: Path, old: str, new: str) -> None:
    text = KERNEL
    if old == "as double":
        text = text.replace("double(", "times_two(")
    if old == r"\btl\b":
        text = text.replace("import triton.language as tl", "import triton.language as language")
    if old == "plan, context":
        text = text.replace("context.launch(whole, plan", "rank.launch(whole, call")
    text = re.sub(old, new, text)
    assert text != KERNEL
    assert small_fingerprint(tmp_path, text) == unchanged()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("twice", "scaled"),
        ("SCALE", "FACTOR"),
        ("1000", "2000"),
        (r"constexpr\(3\)", "constexpr(4)"),
    ],
)
def test_what_is_not_code_elsewhere_changes_nothing(tmp_path: Path, old: str, new: str) -> None:
    helpers, kernel = re.sub(old, new, HELPERS), KERNEL
    assert helpers != HELPERS
    if new in ("scaled", "FACTOR"):
        kernel = re.sub(rf"\b{old}\b", new, KERNEL)
    assert small_fingerprint(tmp_path, kernel, helpers) == unchanged()


def test_a_function_may_move_to_another_file(tmp_path: Path) -> None:
    moved = HELPERS[HELPERS.index("@triton.jit\ndef twice") : HELPERS.index("@triton.jit\ndef unused")]
    kernel = KERNEL.replace("SCALE, twice as double", "SCALE").replace("double(", "twice(")
    kernel = kernel.replace("@triton.jit\ndef product", f"{moved}@triton.jit\ndef product")
    assert small_fingerprint(tmp_path, kernel, HELPERS.replace(moved, "")) == unchanged()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pair.first \\*", "pair.first -"),
        ("pair.first \\* pair.second", "pair.second * pair.first"),
        ("first=x, second=factor", "second=x, first=factor"),
        ("constexpr\\(7\\)", "constexpr(8)"),
        ("BLOCK: tl.constexpr", "BLOCK"),
        (r"\+ LIMIT", ""),
        ("helpers.offset", "helpers.unused"),
        ("times=SCALE", "extra=SCALE"),
        ('"maxnreg": 64', '"maxnreg": 80'),
        (", options=settings", ""),
        ("@triton.jit", "@triton.jit(noinline=True)"),
        ("total: tl.tensor =", "total: tl.constexpr ="),
        ("    left: tl.tensor\n    right: tl.tensor\n", "    right: tl.tensor\n    left: tl.tensor\n"),
        ("    right: tl.tensor\n", "    right: tl.tensor\n    more: tl.tensor\n"),
        ("numbers.left, numbers.right", "numbers.right, numbers.left"),
        ("SHAPE.WIDTH", "SHAPE.HEIGHT"),
        ("HEIGHT: int = 3", "HEIGHT: int = 4"),
        ("SHAPE: tl.constexpr", "SHAPE"),
    ],
)
def test_a_change_of_the_code_is_seen(tmp_path: Path, old: str, new: str) -> None:
    text = re.sub(old, new, KERNEL)
    assert text != KERNEL
    assert small_fingerprint(tmp_path, text) != unchanged()


@pytest.mark.parametrize(
    ("old", "new"),
    [("constexpr\\(2\\)", "constexpr(3)"), ("% 5", "% 6"), ("times=1", "times=2"), ("\\+ extra", "- extra")],
)
def test_a_change_of_what_it_calls_is_seen(tmp_path: Path, old: str, new: str) -> None:
    helpers = re.sub(old, new, HELPERS)
    assert helpers != HELPERS
    assert small_fingerprint(tmp_path, KERNEL, helpers) != unchanged()


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    tree = small_tree(tmp_path)
    with pytest.raises(ValueError, match=r"no source of shotcast\.device\.kernel:none"):
        of_launch(tree, "shotcast.device.kernel:none")
    with pytest.raises(ValueError, match="not a function bind"):
        of_launch(tree, "shotcast.device.kernel:LIMIT")
    with pytest.raises(ValueError, match="no kernel"):
        of_launch(tree, "shotcast.device.helpers:twice")
    with pytest.raises(ValueError, match="not a call of HostCall"):
        of_host_call(tree, "shotcast.device.kernel:product")
    with pytest.raises(ValueError, match=r"no source of shotcast\.device\.none"):
        of_module(tree, "shotcast.device.none")


# --- the kernels of this package --------------------------------------------------------------------------------------


KERNELS = {one.field: one for one in (GPUS, COMPILED, HOSTS)}
"""The fields of forms that have kernels, and the transports that run them."""


def forms() -> list[tuple[Op, str, str, str]]:
    """Return every kernel of the built-in algorithms: operation, algorithm, kind and reference."""
    return [
        (op, algorithm.name, kind, str(getattr(form, kind)))
        for algorithm in registered().values()
        for op, form in algorithm.forms.items()
        for kind in KERNELS
        if getattr(form, kind)
    ]


@pytest.mark.parametrize("kind", KERNELS)
def test_every_built_in_kernel_has_a_fingerprint(kind: str) -> None:
    kernels = KERNELS[kind]
    for op in Op:
        expected = {name for one, name, which, _ in forms() if one is op and which == kind}
        found = fingerprints.of_operation(registered(), op, kernels)
        assert found.keys() == expected
        assert all(re.fullmatch("[0-9a-f]{12}", digest) for digest in found.values())


def test_kernels_differ() -> None:
    """Each kernel has its own; forms share one only where they share the kernel: headers of messages and messages."""
    by_digest: dict[str, set[str]] = {}
    for op, name, kind, reference in forms():
        by_digest.setdefault(fingerprints.of_operation(registered(), op, KERNELS[kind])[name], set()).add(
            re.sub("(?i)_header$", "", reference)
        )
    shared = {frozenset(references) for references in by_digest.values() if len(references) > 1}
    assert shared == set()


def reached(reference: str, kind: str) -> set[tuple[str, str]]:
    """Return the modules and names of all definitions that a fingerprint covers."""
    found: set[tuple[str, str]] = set()

    class Recorder(fingerprint._Writer):
        def digest(self) -> str:
            digest = super().digest()
            found.update(self._numbers)
            return digest

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fingerprint, "_Writer", Recorder)
        (of_launch if kind == "triton" else of_host_call)(fingerprint.installed(), reference)
    return found


def gpu_kernels() -> list[str]:
    return sorted({reference for _, _, kind, reference in forms() if kind == "triton"})


@pytest.mark.parametrize("reference", gpu_kernels())
def test_covers_what_triton_finds(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton looks for what a kernel depends on, to know when its compiled code is out of date."""
    from triton.runtime import jit

    called: list[jit.JITFunction] = []
    update = jit.DependenciesFinder._update_hash

    def record(self: jit.DependenciesFinder, function: jit.JITFunction) -> None:
        called.append(function)
        update(self, function)

    monkeypatch.setattr(jit.DependenciesFinder, "_update_hash", record)
    covered, tree = reached(reference, "triton"), fingerprint.installed()
    module = importlib.import_module(reference.partition(":")[0])
    code = ast.parse(inspect.getsource(module))
    launches = [
        one for one in ast.walk(code) if isinstance(one, ast.Call) and ast.unparse(one.func) == "context.launch"
    ]
    called += [getattr(module, ast.unparse(launch.args[0])) for launch in launches]
    assert called
    functions: set[tuple[str, str]] = set()
    while called:
        function = called.pop()
        name = function.fn.__module__, function.fn.__name__
        if name in functions or not name[0].startswith("shotcast"):
            continue
        functions.add(name)
        function.hash = None
        assert function.cache_key  # Triton looks for it now
        for (constant, _), (_, values) in function.used_global_vals.items():
            meaning = tree.meaning(values["__name__"], constant)
            if tree.definitions(meaning):
                assert meaning in covered, (name, constant)
    assert len(functions) > 10
    assert functions <= covered, functions - covered


@pytest.mark.full
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_other_number_in_a_kernel_is_seen(data: st.DataObject) -> None:
    """Each number in anything that a kernel calls or reads counts: with another one, the fingerprint is another."""
    reference, kind = data.draw(st.sampled_from([(reference, kind) for _, _, kind, reference in forms()]))
    make = of_launch if kind == "triton" else of_host_call
    tree = Tree(SOURCE)
    before = make(tree, reference)
    covered = sorted(reached(reference, kind))
    numbers = []
    for module, name in covered:
        source = tree.source(module)
        assert source is not None
        for statement in source.definitions[name]:
            if isinstance(statement, ast.FunctionDef):
                numbers += [node for part in statement.body for node in ast.walk(part) if is_number(node)]
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                numbers += [node for node in ast.walk(statement.value) if is_number(node)]
    number = data.draw(st.sampled_from(numbers))
    assert isinstance(number, ast.Constant)
    assert isinstance(number.value, int)
    number.value += 1
    assert make(tree, reference) != before
    number.value -= 1
    assert make(tree, reference) == before


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


RENAMED = (
    "exchange_headers",
    "await_words",
    "first_shot",
    "SENTINEL",
    "slice_quads",
    "publish",
    "wrap_rank",
)


@pytest.mark.full
def test_renaming_in_the_whole_package_changes_nothing(tmp_path: Path) -> None:
    """Functions, local variables and constants with other names, and no docstrings or comments."""
    folder = tmp_path / "shotcast"
    for part in ("transport", "device"):
        shutil.copytree(SOURCE / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("wire.py", "units.py", "__init__.py"):
        shutil.copy(SOURCE / name, folder)
    shutil.copytree(SOURCE / "kernels", folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.rglob("*.py"):
        text = ast.unparse(without_docstrings(ast.parse(file.read_text())))
        for name in RENAMED:
            text = re.sub(rf"\b{name}\b", f"{name}_renamed", text)
        file.write_text(text)
    tree, installed = Tree(folder), fingerprint.installed()
    for _, _, kind, reference in forms():
        make = of_launch if kind == "triton" else of_host_call
        assert make(tree, reference) == make(installed, reference), reference
    module = "shotcast.kernels.triton.paged_attention"
    assert of_module(tree, module) == of_module(installed, module)


def without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:
            node.body = [one for one in body if not fingerprint._is_text(one)]  # type: ignore[attr-defined]
            node.body = node.body or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def test_an_algorithm_of_the_user_has_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel outside the package counts, with what it calls in the package."""
    kernel = "from shotcast.transport.triton.sync import enter\nA = 3\ndef star(x):\n    return enter(x) + A\n"
    bind = "def bind(plan, context):\n    return context.launch(star, plan)\n"
    digests = []
    for number, text in enumerate((kernel, kernel.replace("A", "B"), kernel.replace("3", "4"))):
        file = tmp_path / f"users_{number}.py"
        file.write_text(text + bind)
        monkeypatch.syspath_prepend(tmp_path)
        module = importlib.import_module(file.stem)
        form = Form(work=lambda nbytes, world_size, itemsize: None, triton=module.bind)  # type: ignore[arg-type, return-value]
        digests.append(fingerprints.of_form(form, GPUS))
        monkeypatch.delitem(sys.modules, file.stem)
    assert digests[0] == digests[1] != digests[2]
    assert "" not in digests
    assert fingerprints.of_form(Form(work=lambda *_: None), GPUS) == ""  # type: ignore[arg-type, return-value]
    assert fingerprints.of_operation(Algorithms(()), Op.ALL_REDUCE, GPUS) == {}


def test_needs_no_triton_and_no_torch() -> None:
    code = """
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("triton", "torch", "numba", "llvmlite", "numpy"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Blocked())
        from shotcast.collectives import fingerprints, registry
        from shotcast.transport.cpu import COMPILED
        from shotcast.transport.triton import GPUS
        from shotcast.wire import Op
        for transport in (GPUS, COMPILED):
            print(sorted(fingerprints.of_operation(registry.registered(), Op.ALL_REDUCE, transport).items()))
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    expected = [
        str(sorted(fingerprints.of_operation(registered(), Op.ALL_REDUCE, transport).items()))
        for transport in (GPUS, COMPILED)
    ]
    assert result.stdout.split("\n")[:2] == expected
