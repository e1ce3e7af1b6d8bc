"""Products with weights as checkpoints store them: kernels under Triton's interpreter against float64, and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grouped_targets as targets
import pytest
from grouped_targets import Case

import cross
from quick_interpreter import interpret
from shotcast.kernels.triton import grouped_gemm, grouped_gemv
from shotcast.kernels.triton.dequantize import dequantize_kernel
from shotcast.kernels.triton.grouped import step_columns
from shotcast.kernels.triton.grouped_gemm import GroupedGemmConfig, GroupedGemmShape, grouped_gemm_kernel
from shotcast.kernels.triton.grouped_gemv import GroupedGemvConfig, GroupedGemvShape, grouped_gemv_kernel

CASES = [
    Case(1, 256, 70, 128, True, "bfloat16", False),
    Case(1, 288, 70, 32, True, "float16", True, GroupedGemvConfig(2, 32, 4)),  # a part of a block
    Case(1, 1344, 70, 192, True, "bfloat16", True, GroupedGemvConfig(4, 64, 2), True),
    Case(1, 1344, 38, 64, False, "bfloat16", True, GroupedGemvConfig(2, 64, 2)),
    Case(1, 384, 38, 128, False, "float16", False, None, True),
    Case(1, 288, 70, 32, True, "float16", False, GroupedGemmConfig(32, 2, 2, 2)),
    Case(5, 448, 140, 64, True, "bfloat16", True, None, True),
    Case(3, 768, 38, 64, True, "float16", True, GroupedGemmConfig(64, 4, 2, 3)),
    Case(17, 384, 64, 192, True, "bfloat16", True, GroupedGemmConfig(32, 2, 2, 2)),  # steps of 64
    Case(64, 160, 130, 32, True, "bfloat16", False),
    Case(40, 512, 140, 128, True, "bfloat16", True, GroupedGemmConfig(64, 4, 2, 2), True),
    Case(40, 512, 140, 64, False, "float16", True, GroupedGemmConfig(128, 4, 2, 2), True),
    Case(2, 512, 66, 512, True, "bfloat16", False),
    Case(1, 256, 70, 128, False, "bfloat16", True, GroupedGemmConfig(32, 2, 2, 2)),
    Case(33, 256, 64, 64, False, "float16", False),
    Case(1, 1024, 64, 128, True, "bfloat16", False, None, False, True),
    Case(9, 1024, 64, 32, True, "float16", False, None, False, True),
]


def test_as_exact_as_float32_sums() -> None:
    (found,) = interpret(targets.excesses, 1, CASES)
    wrong = [(case, excess) for case, excess in zip(CASES, found, strict=True) if not max(excess) <= 1]
    assert not wrong


def test_layers_multiply_many_rows_by_the_library() -> None:
    cases = [Case(rows, 128, 48, 64, int4, "bfloat16", False) for rows in (1, 64, 65) for int4 in (True, False)]
    (found,) = interpret(targets.layers, 1, cases)
    assert [by_kernel for _, by_kernel in found] == [True] * 4 + [False] * 2
    assert max(off for off, _ in found) < 1e-2


@pytest.mark.parametrize(("group", "columns"), [(128, 128), (512, 128), (192, 64), (32, 32), (8, 8), (96, 32)])
def test_a_step_is_of_one_group(group: int, columns: int) -> None:
    assert step_columns(group) == columns


# -- compiled ---------------------------------------------------------------------------------------------------------

KINDS = {
    **dict.fromkeys(("outputs", "inputs", "count"), "i32"),
    **dict.fromkeys(("x", "out"), "*bf16"),
    "partial_sums": "*fp32",
    "counters": "*i32",
}


def kinds_of(int4: bool, capability: int) -> dict[str, str]:
    kinds = KINDS | {
        **dict.fromkeys(("weight", "values"), "*i32" if int4 else "*fp8e4nv" if capability >= 89 else "*u8"),
        "scales": "*fp16" if int4 else "*fp32",
    }
    return kinds | {"zeros": "*u8"} if int4 else kinds


@pytest.mark.every(6)
@pytest.mark.parametrize("int4", [True, False])
@pytest.mark.parametrize(("capability", "memory"), [(80, 164), (90, 228), (100, 228)])
def test_kernels_compile_without_spills(int4: bool, capability: int, memory: int, tmp_path: Path) -> None:
    kinds, native = kinds_of(int4, capability), capability >= 89 and not int4
    aligned = ("x", "weight", "inputs", "out", "partial_sums")
    pdl = capability >= 90
    for rows in (1, 16, 64):
        if rows == 1:
            one = grouped_gemv.choose_config(4096, 132)
            shape: Any = GroupedGemvShape(one.tile, one.words, 128, 128, False, native, pdl)
            kernel = cross.build_of_kinds(grouped_gemv_kernel, kinds, shape, one.warps, capability, {}, aligned)
        else:
            many = grouped_gemm.choose_config(4096, 4096, rows, 132)
            m_tile, halves = grouped_gemm.row_tiles(rows)
            shape = GroupedGemmShape(m_tile, halves, many.tile, many.stages, many.split_k, 128, 128, native, False, pdl)
            kernel = cross.build_of_kinds(grouped_gemm_kernel, kinds, shape, many.warps, capability, {}, aligned)
            assert "mma.sync" in kernel.asm["ptx"], "weights are multiplied from registers"
            assert kernel.asm["ptx"].count("st.shared.b16") < 8, "nor pass through shared memory"
        found = cross.resources(kernel, tmp_path)
        assert found["LOCAL"] == found["STACK"] == 0
        assert kernel.metadata.shared <= (memory - 1) << 10
    constants = {"GROUP": 128, "COLUMNS": 128, "NATIVE": native, "TILE": 16, **({} if int4 else {"zeros": None})}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in dequantize_kernel.arg_names}
    kernel = cross.build(dequantize_kernel, signature, constants, 4, capability, {}, ("values", "inputs", "out"))
    assert cross.resources(kernel, tmp_path)["LOCAL"] == 0
    if int4:
        assert "cvt.rn.f32.s32" not in kernel.asm["ptx"], "codes become floats by their bits"
