"""The kernels of copy engines, compiled for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

import cross
from shotcast.transport.triton.barrier import GATE_REGISTERS
from shotcast.transport.triton.copy_engines import BESIDE_PRODUCTS, meeting, nan_if_stopped, sum_of_copies
from shotcast.wire import REDUCIBLE

FORMS = [
    ("bfloat16", 16, 2, "avg"),
    ("bfloat16", 16, 8, "sum"),
    ("float32", 4, 4, "sum"),
    ("float16", 2, 3, "avg"),
    ("float64", 16, 2, "sum"),
    ("uint8", 1, 8, "max"),
]
"""Dtype, unit, ranks and reduction."""


@pytest.mark.parametrize("form", [pytest.param(form, marks=pytest.mark.every(3)) for form in FORMS], ids=str)
@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.full)])
def test_sums_wait_for_nothing_and_spill_nothing(
    form: tuple[str, int, int, str], capability: int, tmp_path: Path
) -> None:
    dtype, unit, world_size, reduction = form
    block = 2048 if unit == 16 and dtype != "float64" else 512
    made = cross.compiled_of_copies(sum_of_copies, dtype, unit, world_size, block, 8, capability, reduction)
    counts = cross.instructions(made.asm["ptx"])
    assert not [key for key in counts if key.startswith(("fence", "membar", "griddepcontrol", "fma"))]
    assert not [key for key in counts if "volatile" in key or "acquire" in key]
    width = min(4, block // 256)  # words of a thread; those of numbers of several words are loaded in more than one
    if dtype in REDUCIBLE:
        assert counts[f"ld.global.cg.v{width}.b32"] == (world_size - 1) * block // (256 * width)
    used = cross.resources(made, tmp_path)
    assert used["LOCAL"] == 0
    assert used["REG"] * 32 * 8 <= 65536


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "uint8"])
@pytest.mark.parametrize("unit", [16, 1])
def test_the_last_kernel_has_the_registers_of_a_gate(dtype: str, unit: int, tmp_path: Path) -> None:
    """So it begins beside the blocks of a product of cuBLAS, which leave one warp of 32 registers on an SM."""
    made = cross.compiled_of_copies(nan_if_stopped, dtype, unit, 2, 128, 1, 90, options=BESIDE_PRODUCTS)
    used = cross.resources(made, tmp_path)
    assert used["REG"] <= GATE_REGISTERS
    assert used["LOCAL"] == 0


def test_a_meeting_has_the_registers_of_a_gate(tmp_path: Path) -> None:
    values = {"WORLD": 8, "WARPS": 1, "PDL": False}
    made = cross.build_shape(meeting, values, 1, 90, BESIDE_PRODUCTS)
    used = cross.resources(made, tmp_path)
    assert used["REG"] <= GATE_REGISTERS
    assert used["LOCAL"] == 0
    counts = cross.instructions(made.asm["ptx"])
    assert not [key for key in counts if key.startswith("griddepcontrol")], "it waits for copies too"


def test_the_last_kernel_reads_the_abort_word_and_no_tensor_before() -> None:
    """The threads of the warp take the branch alike: one access past the caches serves all."""
    made = cross.compiled_of_copies(nan_if_stopped, "bfloat16", 4, 2, 128, 1, 90)
    before = made.asm["ptx"].partition("bra")[0]
    assert [key for key in cross.instructions(before) if ".global" in key] == ["ld.volatile.global.b64"]
