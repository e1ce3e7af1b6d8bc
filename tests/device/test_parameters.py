"""Every function for Triton, whether it is launched or called by others, has at most a dozen parameters."""

from __future__ import annotations

import ast
from pathlib import Path

import shotcast

MOST = 12
DECORATORS = ("triton.jit", "kernel")


def parameters(source: str) -> dict[str, int]:
    """Return how many parameters the functions for Triton have."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            named = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
            if any(ast.unparse(each) in DECORATORS for each in named):
                found[node.name] = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
    return found


def test_functions_for_triton_have_few_parameters() -> None:
    folder = Path(shotcast.__file__).parent
    found = {str(file.relative_to(folder)): parameters(file.read_text()) for file in folder.rglob("*.py")}
    assert {"multiply_words", "gemv_kernel"} <= set(found["kernels/triton/gemv.py"])
    many = {f"{file}: {name}": n for file, names in found.items() for name, n in names.items() if n > MOST}
    assert many == {}


def test_both_decorators_count() -> None:
    source = "@triton.jit\ndef a(x, Y: tl.constexpr): ...\n@kernel(shape=S)\ndef b(x, *, y, z): ...\ndef c(x): ..."
    assert parameters(source) == {"a": 2, "b": 3}
