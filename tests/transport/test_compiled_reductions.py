"""Reductions compiled for GPUs that are not here: how they poll, round, divide and hold their tiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cross
from shotcast.wire import REDUCED, REDUCIBLE

FORMS = [
    ("one_shot", "int32", "sum", 2, 1),
    ("one_shot_scatter", "bool", "sum", 4, 1),
    ("one_shot", "int8", "max", 8, 4),
    ("one_shot", "float16", "prod", 4, 1),
    ("two_shot", "float64", "avg", 4, 4),
    ("two_shot", "uint64", "min", 8, 1),
    ("two_shot", "bfloat16", "avg", 2, 1),
]
OTHERS = [
    ("one_shot", "float32", "avg", 3, 1),
    ("two_shot", "bfloat16", "max", 4, 1),
    ("two_shot", "complex64", "sum", 2, 4),
]
KERNELS = ("one_shot", "two_shot")
ALL = [(kernel, dtype, name, 2, 1) for dtype, names in REDUCED.items() for name in names for kernel in KERNELS]
MAX_REGISTERS = {2: 128, 3: 128, 4: 168, 8: 255}


def check(form: tuple[str, str, str, int, int], folder: Path) -> None:
    name, dtype, reduction, world_size, warps = form
    kernel = cross.compiled(name, dtype, 16, world_size, 128 * warps, warps, 90, reduction)
    ptx = str(kernel.asm["ptx"])
    counts = cross.instructions(ptx)
    assert counts["griddepcontrol.wait"] == 1
    wide = "v4.b32" if dtype in REDUCIBLE else "v2.b64"
    polled = {key.removeprefix("ld.volatile.global.") for key in counts if key.startswith("ld.volatile.global.")}
    assert polled == {wide, "b64", "v2.b64"}, "words, headers, and the epoch with the generation"
    assert not [key for key in counts if key.startswith(("fma", "mad.rn")) or ".ftz" in key]
    if warps == 1:
        assert not [key for key in counts if ".shared.v" in key], "pairs of words are joined in registers"
    divisions = {key for key in counts if re.match(r"div\.[\w.]*f(32|64)", key)}
    width = 64 if dtype in ("float64", "complex128") else 32
    assert divisions == ({f"div.rn.f{width}"} if reduction == "avg" else set())
    used = cross.resources(kernel, folder)
    assert used["LOCAL"] == 0
    assert used["REG"] <= MAX_REGISTERS[world_size]


@pytest.mark.every(7)
@pytest.mark.parametrize("form", [*FORMS, *(pytest.param(form, marks=pytest.mark.full) for form in OTHERS)])
def test_machine_code(form: tuple[str, str, str, int, int], tmp_path: Path) -> None:
    check(form, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("form", ALL)
def test_machine_code_of_every_reduction(form: tuple[str, str, str, int, int], tmp_path: Path) -> None:
    check(form, tmp_path)
