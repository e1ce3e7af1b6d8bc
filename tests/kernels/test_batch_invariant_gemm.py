"""Products whose rows have the same bits in every batch: interpreted against float64, and compiled for GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from gemv_targets import batch_invariant_results
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import cross
from quick_interpreter import interpret
from shotcast.kernels.triton import batch_invariant_gemm, skinny_gemm
from shotcast.kernels.triton.batch_invariant_gemm import InvariantShape, InvariantTile

BF16 = torch.bfloat16
MEMORY = {80: 164, 89: 100, 90: 228, 100: 228}
"""KiB of shared memory of an SM, by compute capability (CUDA C++ Programming Guide, technical specifications)."""


def test_as_exact_as_float32_sums() -> None:
    """Few rows and many, columns of part of a step and of several parts (two of them empty), odd outputs, a bias."""
    given = [
        (3, 48, 6, "bfloat16", True, 1),
        (65, 48, 6, "float16", False, 1),
        (70, 528, 130, "bfloat16", True, 1),
        (129, 1040, 70, "bfloat16", False, 1),
        (260, 256, 200, "float16", True, 1),
        (20, 2064, 64, "bfloat16", True, 132),
        (66, 2064, 64, "bfloat16", True, 132),
        (65, 4112, 6, "float16", False, 132),
        (65, 1000 // 16 * 16, 640, "bfloat16", False, 132),
    ]
    (found,) = interpret(batch_invariant_results, 1, given)
    wrong = [(case, excess) for case, (excess, _) in zip(given, found, strict=True) if not excess <= 1]
    assert not wrong
    assert [parts for _, parts in found] == [1, 1, 1, 1, 1, 8, 8, 16, 4]


def test_parts_are_those_of_the_kernel_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int, InvariantShape]] = []
    monkeypatch.setattr(batch_invariant_gemm, "num_sms", lambda device: 132)
    monkeypatch.setattr(batch_invariant_gemm, "shared_memory_per_sm", lambda device: 228 << 10)
    monkeypatch.setattr(batch_invariant_gemm, "launch_options", lambda device, warps: {"launch_pdl": True})

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: taken.append(arguments[-3:])

    monkeypatch.setattr(batch_invariant_gemm, "batch_invariant_gemm_kernel", Kernel())
    for outputs, inputs in ((64, 4096), (640, 4000), (1536, 4096), (6144, 4096), (128, 144)):
        config = skinny_gemm.choose_config(outputs, inputs, 2, 64, 132, 228 << 10)
        x, weight = torch.zeros(65, inputs, dtype=BF16), torch.zeros(outputs, inputs, dtype=BF16)
        batch_invariant_gemm.linear(x, weight)
        columns = skinny_gemm.STEP_BYTES // 2
        width = triton.cdiv(triton.cdiv(inputs, columns), config.split_k) * columns  # as the other kernel computes it
        parts, steps, shape = taken[-1]
        assert (parts, steps * shape.COLUMNS, shape.DIVIDED) == (config.split_k, width, config.split_k > 1)
    assert {parts for parts, _, _ in taken} > {1}


@given(
    st.integers(1, 100_000),
    st.integers(1, 300_000),
    st.integers(1, 200),
    st.sampled_from([1, 3, 8]),
    st.sampled_from(list(MEMORY.values())),
)
def test_tiles_fit_and_cover_the_result(rows: int, outputs: int, num_sms: int, parts: int, kib: int) -> None:
    known = batch_invariant_gemm.tiles(parts, 2, kib << 10)
    tile = batch_invariant_gemm.choose_tile(rows, outputs, num_sms, known)
    assert tile.stages >= 2
    assert tile.stages * (tile.outputs + tile.rows) * 128 < kib << 10
    assert tile.outputs * tile.rows / (32 * tile.warps) * (1 if parts == 1 else 2) <= 128  # sums that a thread holds


@pytest.mark.parametrize("outputs", [6, 1200])
def test_a_batch_that_changes_bits_is_seen(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that differ only in their order are told apart, also where outputs are few."""

    def in_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
        """Add columns one by one, in parts that are added then, all in float32."""
        products = x.float()[:, None, :] * weight.float()[None]
        total = torch.zeros(products.shape[:2])
        for part in products.chunk(parts, -1):
            sums = torch.zeros_like(total)
            for column in part.unbind(-1):
                sums += column
            total += sums
        return total.to(x.dtype)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any, tile: InvariantTile | None = None) -> torch.Tensor:
        tiled.append(tile)
        return in_parts(x, weight, 4 if tile is None and x.shape[0] in changed else 1)

    monkeypatch.setattr(batch_invariant_gemm, "num_sms", lambda device: 132)
    monkeypatch.setattr(batch_invariant_gemm, "shared_memory_per_sm", lambda device: 228 << 10)
    monkeypatch.setattr(batch_invariant_gemm, "linear", linear)
    weight, tiled = torch.randn(outputs, 512, generator=torch.Generator().manual_seed(1)).to(BF16), []
    changed: tuple[int, ...] = ()
    assert not batch_invariant_gemm.differs(weight)
    parts = skinny_gemm.choose_config(outputs, 512, 2, 1, 132, 228 << 10).split_k
    assert set(tiled) == {None, *batch_invariant_gemm.tiles(parts, 2, 228 << 10)}
    changed = 1, 17, 40
    assert batch_invariant_gemm.differs(weight)


def test_what_is_served() -> None:
    with FakeTensorMode():
        weight = torch.empty(6, 32, dtype=BF16, device="cuda")
        x = torch.empty(3, 32, dtype=BF16, device="cuda")
        assert batch_invariant_gemm.serves(x, weight)
        assert batch_invariant_gemm.serves(torch.empty(0, 32, dtype=BF16, device="cuda"), weight)
        for dtype, device in ((torch.float32, "cuda"), (torch.float16, "cuda"), (BF16, "cpu")):
            assert not batch_invariant_gemm.serves(torch.empty(3, 32, dtype=dtype, device=device), weight)
        odd = torch.empty(6, 24, dtype=BF16, device="cuda")
        assert not batch_invariant_gemm.serves(odd, odd)
        assert not batch_invariant_gemm.serves(odd, weight)
    cpu = torch.zeros(3, 32, dtype=BF16)
    assert batch_invariant_gemm.linear(cpu[:0], cpu).shape == (0, 3)


# -- compiled ---------------------------------------------------------------------------------------------------------


def compiled(tile: InvariantTile, divided: bool, capability: int, whole: bool, bias: bool) -> Any:
    shape = InvariantShape(tile.rows, tile.outputs, 64, tile.stages, divided, whole, capability >= 90)
    kinds = dict.fromkeys(("outputs", "inputs", "count", "split_k", "part_steps"), "i32")
    kinds |= dict.fromkeys(("x", "weight", "out"), "*bf16")
    kinds |= {"bias": "*bf16"} if bias else {}
    kernel, aligned = batch_invariant_gemm.batch_invariant_gemm_kernel, ("x", "weight", "inputs", "out")
    return cross.build_of_kinds(kernel, kinds, shape, tile.warps, capability, {}, aligned)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("capability", [80, 90, pytest.param(100, marks=pytest.mark.full)])
def test_tensor_cores_add_sixteen_columns_at_a_time(divided: bool, capability: int, tmp_path: Path) -> None:
    for tile in batch_invariant_gemm.tiles(1 + divided, 2, MEMORY[capability] << 10):
        kernel = compiled(tile, divided, capability, whole=not divided, bias=divided)
        found = cross.instructions(kernel.asm["ptx"])
        used = cross.resources(kernel, tmp_path)
        assert used["LOCAL"] == 0
        assert used["STACK"] <= (64 if capability == 80 else 0), tile
        assert kernel.metadata.shared <= (MEMORY[capability] - 1) << 10
        assert found["cp.async.cg.shared.global"] > 0
        if capability == 90:
            name = f"wgmma.mma_async.sync.aligned.m64n{tile.rows}k16.f32.bf16.bf16"
            assert found[name] == 4, tile  # of 64 columns
            early, _, late = kernel.asm["ptx"].partition("griddepcontrol.wait")
            assert cross.touched(early, kernel.src.signature) == []
            assert "griddepcontrol.wait" not in late
