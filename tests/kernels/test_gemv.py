"""Products of few rows: the kernels under Triton's interpreter against float64, and compiled for GPUs."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gemv_targets import Case, products
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import cross
from quick_interpreter import interpret
from shotcast.kernels.triton import gemv
from shotcast.kernels.triton.gemv import GemvConfig, GemvShape, gemv_kernel

KINDS = (("bfloat16", False), ("float16", False), ("bfloat16", True), ("float16", True))


def cases() -> list[Case]:
    """Cover columns of part of a step, of whole steps and of both; odd outputs."""
    made: list[Case] = []
    shapes = ((48, 6), (512, 10), (528, 2), (2064, 38), (4096, 4))
    for (dtype, fp8), (inputs, outputs), rows in itertools.product(KINDS, shapes, (1, 2)):
        made.append((rows, inputs, outputs, dtype, fp8, inputs == 528, outputs != 6, None))
        made.append((rows, inputs, outputs, dtype, fp8, inputs != 528, outputs == 6, None))
    fma = GemvConfig(8, 256, 1)
    for rows, gated in itertools.product((1, 2), (False, True)):
        made.append((rows, 528, 70, "bfloat16", False, True, gated, fma))
    made.append((1, 48, 7, "bfloat16", False, False, False, GemvConfig(1, 256, 1)))
    return made


@pytest.mark.full
def test_as_exact_as_float32_sums() -> None:
    given = cases()
    (found,) = interpret(products, 1, given)
    wrong = [(case, excess) for case, excess in zip(given, found, strict=True) if not excess <= 1]
    assert not wrong


@given(st.integers(1, 40_000), st.sampled_from([16, 1024, 4096, 8192]), st.sampled_from([1, 2]), st.integers(1, 200))
def test_small_matrices_fill_the_gpu_as_far_as_they_can(outputs: int, inputs: int, item: int, num_sms: int) -> None:
    config = gemv.choose_config(outputs, inputs, item, num_sms)
    assert config.tile == 1 or -(-outputs // config.tile) >= 2 * num_sms
    assert config.tile == 4 or -(-outputs // (2 * config.tile)) < 2 * num_sms


@pytest.mark.parametrize(
    ("outputs", "inputs", "item", "columns"),
    [(1536, 4096, 2, 2048), (1536, 1024, 2, 1024), (7168, 4096, 2, 1024), (1536, 1024, 1, 2048)],
)
def test_products_of_few_outputs_have_more_on_their_way(outputs: int, inputs: int, item: int, columns: int) -> None:
    """Check that more is loaded ahead, except where half of it would be beyond the row."""
    assert gemv.choose_config(outputs, inputs, item, 132).columns == columns


BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "x", "weight", "device", "ours"),
    [
        (1, 28672, 8192, BF16, BF16, "cuda", True),
        (2, 1536, 4096, FP16, FP16, "cuda", True),
        (3, 1536, 4096, FP16, FP16, "cuda", False),
        (2, 26624, 16384, BF16, FP8, "cuda", True),  # an FP8 product would have to quantise x first
        (3, 26624, 16384, BF16, FP8, "cuda", False),
        (0, 1536, 4096, BF16, BF16, "cuda", False),
        (1, 1536, 4104, BF16, BF16, "cuda", False),
        (1, 1536, 4096, torch.float32, torch.float32, "cuda", False),
        (1, 1536, 4096, BF16, FP16, "cuda", False),
        (1, 1536, 4096, BF16, BF16, "cpu", False),
    ],
)
def test_which_products_are_ours(
    rows: int, outputs: int, inputs: int, x: torch.dtype, weight: torch.dtype, device: str, ours: bool
) -> None:
    with FakeTensorMode():
        left = torch.empty(rows, inputs, dtype=x, device=device)
        right = torch.empty(outputs, inputs, dtype=weight, device=device)
        assert gemv.serves(left, right) == ours
        assert not gemv.serves(torch.empty(rows, 16, dtype=x, device=device), right)
        if rows > 1:
            assert not gemv.serves(torch.empty(inputs, rows, dtype=x, device=device).t(), right)


# -- compiled ---------------------------------------------------------------------------------------------------------


def compiled(config: GemvConfig, rows: int, fp8: bool, gated: bool = False, capability: int = 90) -> Any:
    shape = GemvShape(rows, config.tile, config.columns, gated, NATIVE=capability >= 89, PDL=capability >= 90)
    kinds = {
        **dict.fromkeys(("outputs", "inputs", "count"), "i32"),
        **dict.fromkeys(("x", "out"), "*bf16"),
        **({"weight": "*fp8e4nv", "scale": "*fp32"} if fp8 else {"weight": "*bf16"}),
    }
    options = {"enable_fp_fusion": True}
    return cross.build_of_kinds(gemv_kernel, kinds, shape, config.warps, capability, options, ("x", "weight", "inputs"))


def chosen() -> list[tuple[GemvConfig, int, bool]]:
    return [
        (gemv.choose_config(outputs, 4096, 2 - fp8, 132), rows, fp8)
        for rows, fp8, outputs in itertools.product((1, 2), (False, True), (1536, 28672))
    ]


@pytest.mark.every(7)
@pytest.mark.parametrize(("config", "rows", "fp8"), chosen(), ids=str)
def test_weights_come_in_16_bytes_and_before_the_wait(config: GemvConfig, rows: int, fp8: bool, tmp_path: Path) -> None:
    kernel = compiled(config, rows, fp8)
    before = cross.instructions(kernel.asm["ptx"].partition("griddepcontrol.wait")[0])
    assert before["griddepcontrol.launch_dependents"] == 1
    used = cross.resources(kernel, tmp_path)
    assert used["LOCAL"] == used["STACK"] == 0
    machine = cross.machine_instructions(cross.sass(kernel, tmp_path))
    assert not [name for name in machine if re.match(r"LDG\.E\.(U|S)?(8|16)\b", name)]
    loads = [name for name in before if name.startswith("ld.global")]
    assert loads
    assert all(name.endswith("v4.b32") for name in loads)
    order = [line.split()[0] for line in re.findall(r"(?:LDG\.E\S*128|ACQBULK)[^\n]*", cross.sass(kernel, tmp_path))]
    assert order[0].startswith("LDG"), "the assembler left the first loads before the wait"
    assert used["REG"] <= 128


@pytest.mark.every(5)
@pytest.mark.parametrize(("capability", "fp8"), [(80, False), (90, False), (90, True), (100, False), (100, True)])
def test_gated_compiles(capability: int, fp8: bool, tmp_path: Path) -> None:
    for rows in (1, 2):
        config = gemv.choose_config(28672, 8192, 2 - fp8, 132)
        kernel = compiled(config, rows, fp8, gated=True, capability=capability)
        assert cross.resources(kernel, tmp_path)["LOCAL"] == 0
        assert "ex2" in kernel.asm["ptx"]
