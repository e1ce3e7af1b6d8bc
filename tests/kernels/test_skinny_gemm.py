"""Products of a batch of rows: the kernel under Triton's interpreter against float64, and compiled for GPUs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from gemv_targets import SkinnyGemmCase, skinny_gemm_results
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import cross
from quick_interpreter import interpret
from shotcast.kernels.triton import skinny_gemm
from shotcast.kernels.triton.skinny_gemm import SkinnyGemmConfig, SkinnyShape, skinny_gemm_kernel

DTYPES = ("bfloat16", "float16", "float8")
MEMORY = {80: 164, 89: 100, 90: 228, 100: 228, 120: 100}
"""KiB of shared memory of an SM, by compute capability (CUDA C++ Programming Guide, technical specifications)."""


def cases() -> list[SkinnyGemmCase]:
    """Cover columns of part of a step, of whole steps and of both; odd outputs; uneven parts, and an empty one."""
    made: list[SkinnyGemmCase] = []
    launches = itertools.cycle((None, SkinnyGemmConfig(2, 3), SkinnyGemmConfig(3, 2), SkinnyGemmConfig(2, 1)))
    shapes = itertools.cycle(((48, 6), (512, 130), (528, 70), (2064, 38), (1024, 64)))
    for rows, dtype in itertools.product((1, 3, 8, 16, 17, 33, 64), DTYPES):
        inputs, outputs = next(shapes)
        made.append((rows, inputs, outputs, dtype, rows % 2 == 0, outputs in (38, 70, 130), next(launches)))
    made.append((5, 640, 66, "bfloat16", True, False, SkinnyGemmConfig(2, 4)))
    return made


@pytest.mark.full
def test_as_exact_as_float32_sums_and_counts_end_at_zero() -> None:
    given = cases()
    (found,) = interpret(skinny_gemm_results, 1, given)
    wrong = [(case, excess) for case, excess in zip(given, found, strict=True) if not excess <= 1]
    assert not wrong


@given(
    st.integers(1, 300_000),
    st.integers(1, 2000).map(lambda units: 16 * units),
    st.sampled_from([1, 2]),
    st.integers(1, skinny_gemm.MAX_ROWS),
    st.integers(1, 200),
    st.sampled_from(list(MEMORY.values())),
)
def test_launches_fit_and_no_processor_is_promised_more_than_its_share(
    outputs: int, inputs: int, item: int, rows: int, num_sms: int, kib: int
) -> None:
    config = skinny_gemm.choose_config(outputs, inputs, item, rows, num_sms, kib << 10)
    assert (
        config.stages == 2
        or config.stages * (skinny_gemm.TILE + skinny_gemm.row_tile(rows)) * skinny_gemm.STEP_BYTES < kib << 10
    )
    if config.split_k > 1:
        assert config.split_k * -(-outputs // skinny_gemm.TILE) <= 2 * num_sms
        assert config.split_k * 2 * skinny_gemm.STEP_BYTES <= inputs * item + skinny_gemm.STEP_BYTES


BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("rows", "inputs", "x", "weight", "device", "ours"),
    [
        (3, 4096, BF16, BF16, "cuda", True),
        (skinny_gemm.MAX_ROWS, 4096, FP16, FP16, "cuda", True),
        (skinny_gemm.MAX_ROWS, 4096, FP8, FP8, "cuda", True),
        (skinny_gemm.MAX_ROWS + 1, 4096, FP8, FP8, "cuda", False),
        (0, 4096, BF16, BF16, "cuda", False),
        (3, 4104, BF16, BF16, "cuda", False),
        (3, 4096, torch.float32, torch.float32, "cuda", False),
        (3, 4096, BF16, FP8, "cuda", False),
        (3, 4096, BF16, BF16, "cpu", False),
    ],
)
def test_which_products_are_ours(
    rows: int, inputs: int, x: torch.dtype, weight: torch.dtype, device: str, ours: bool
) -> None:
    with FakeTensorMode():
        left = torch.empty(rows, inputs, dtype=x, device=device)
        right = torch.empty(1536, inputs, dtype=weight, device=device)
        assert skinny_gemm.serves(left, right) == ours
        assert not skinny_gemm.serves(torch.empty(rows, 16, dtype=x, device=device), right)
        if rows:
            assert not skinny_gemm.serves(torch.empty(inputs, rows, dtype=x, device=device).t(), right)


# -- compiled ---------------------------------------------------------------------------------------------------------


def compiled(
    outputs: int, inputs: int, rows: int, fp8: bool, gated: bool = False, capability: int = 90, whole: bool = True
) -> Any:
    item = 1 if fp8 else 2
    config = skinny_gemm.choose_config(outputs, inputs, item, rows, 132, MEMORY[capability] << 10)
    shape = SkinnyShape(
        M_TILE=skinny_gemm.row_tile(rows),
        TILE=skinny_gemm.TILE,
        COLUMNS=skinny_gemm.STEP_BYTES // item,
        STAGES=config.stages,
        SPLIT_K=config.split_k,
        EVEN_K=whole,
        GATED=gated,
        PDL=capability >= 90,
    )
    kinds = {
        **dict.fromkeys(("outputs", "inputs", "count"), "i32"),
        **dict.fromkeys(("x", "weight"), "*fp8e4nv" if fp8 else "*bf16"),
        **(dict.fromkeys(("scale", "x_scale"), "*fp32") if fp8 else {}),
        "partial_sums": "*fp32",
        "counters": "*i32",
        "out": "*bf16",
    }
    aligned = ("x", "weight", "inputs", "out", "partial_sums")
    return cross.build_of_kinds(skinny_gemm_kernel, kinds, shape, skinny_gemm.WARPS, capability, {}, aligned)


SHAPES = [(1536, 4096, False), (14336, 8192, False), (4608, 16384, True), (26624, 16384, True)]


PAIRS = [(SHAPES[0], 3), (SHAPES[0], 64), (SHAPES[1], 32), (SHAPES[2], 64), (SHAPES[2], 32), (SHAPES[3], 3)]
OTHERS = [pair for pair in itertools.product(SHAPES, (3, 32, 64)) if pair not in PAIRS]


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("outputs", "inputs", "fp8", "rows"),
    [(*shape, rows) for shape, rows in PAIRS]
    + [pytest.param(*shape, rows, marks=pytest.mark.full) for shape, rows in OTHERS],
)
def test_tensor_cores_take_tiles_of_shared_memory(
    outputs: int, inputs: int, fp8: bool, rows: int, tmp_path: Path
) -> None:
    """Check for wgmma instructions and 16-byte copies, without spills."""
    kernel = compiled(outputs, inputs, rows, fp8)
    early, _, late = kernel.asm["ptx"].partition("griddepcontrol.wait")
    assert cross.touched(early, kernel.src.signature) == []
    assert "griddepcontrol.wait" not in late
    found = cross.instructions(kernel.asm["ptx"])
    kind = "f32.e4m3.e4m3" if fp8 else "f32.bf16.bf16"
    assert [name for name in found if name.startswith("wgmma.mma_async") and name.endswith(kind)]
    assert found["cp.async.cg.shared.global"] > 0
    assert not [name for name in found if name.startswith("cp.async.ca")]
    assert found["griddepcontrol.launch_dependents"] == 1
    used = cross.resources(kernel, tmp_path)
    assert used["LOCAL"] == used["STACK"] == 0
    assert kernel.metadata.shared <= 227 << 10


@pytest.mark.full
@pytest.mark.parametrize(
    ("capability", "fp8"),
    [
        (80, False),
        (89, True),
        (90, True),
        (100, False),
        (120, True),
        pytest.param(90, False, marks=pytest.mark.full),
        pytest.param(100, True, marks=pytest.mark.full),
    ],
)
def test_compiles_for(capability: int, fp8: bool, tmp_path: Path) -> None:
    for rows, gated, whole in ((3, True, False), (64, True, True), (32, False, True)):
        kernel = compiled(1536, 4096, rows, fp8, gated, capability, whole)
        assert cross.resources(kernel, tmp_path)["LOCAL"] == 0
        assert ("ex2" in kernel.asm["ptx"]) == gated
        assert kernel.metadata.shared <= (MEMORY[capability] - 1) << 10
