"""Rows gated and quantised: the kernel under Triton's interpreter against float64, and compiled for GPUs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from activations_targets import both, edges

import cross
from quick_interpreter import interpret
from shotcast.kernels.triton.activations import rows_kernel

SHAPES = [(1, 1), (2, 48), (3, 100), (1, 2047), (2, 2048), (2, 3584), (1, 8193)]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("dtype", "size", "activation"),
    [
        ("bfloat16", 1.0, "silu"),
        ("float16", 20.0, "silu"),
        ("float32", 1e-3, "silu"),
        ("bfloat16", 20.0, "gelu_tanh"),
        ("float32", 1.0, "gelu_tanh"),
    ],
)
def test_within_rounding(dtype: str, size: float, activation: str) -> None:
    ((gated, quantized, together),) = interpret(both, 1, SHAPES, dtype, size, activation)
    assert gated <= 1
    assert quantized <= 1
    assert together <= 1


def test_edges() -> None:
    zeros, numbers, odd, steep = interpret(edges, 1)[0]
    assert zeros == [0.0, -0.0, 0.0, 0.0]
    assert numbers == [448.0, -448.0, 1.0, 2.0**-9]
    assert math.isnan(odd[0])
    assert odd[1:] == [448.0, 0.0, 7.0]
    assert steep == pytest.approx([0.0, 200.0], abs=1e-30)


@pytest.mark.parametrize(("gated", "quantize"), [(True, False), (False, True), (True, True)])
def test_moves_16_bytes_a_thread(gated: bool, quantize: bool, tmp_path: Path) -> None:
    block, warps = (16384, 16) if quantize else (2048, 4)
    constants = {"WIDTH": 13312, "BLOCK": block, "GATED": gated, "QUANTIZE": quantize, "GELU": False, "PDL": True}
    if not quantize:
        constants["scale"] = None
    kinds = {"x": "*bf16", "out": "*fp8e4nv" if quantize else "*bf16", "scale": "*fp32"}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in rows_kernel.arg_names}
    kernel = cross.build(rows_kernel, signature, constants, warps, 90, aligned=("x", "out"))
    early, _, late = kernel.asm["ptx"].partition("griddepcontrol.wait")
    assert not [name for name in cross.instructions(early) if ".global" in name]
    counts = cross.instructions(late)
    assert {name for name in counts if name.startswith("ld.global")} == {"ld.global.v4.b32"}
    stores = {name for name in counts if name.startswith("st.global")} - {"st.global.b32"}
    assert stores == {"st.global.v4.b32"}
    assert cross.resources(kernel, tmp_path)["LOCAL"] == 0
