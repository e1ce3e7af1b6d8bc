"""Matmuls of 2 to 64 rows with a weight in groups of inputs that share a scale: each weight is read once.

A program computes one tile of outputs, or several programs divide its columns, as in
:mod:`shotcast.kernels.triton.skinny_gemm`. Tiles of x have at most 32 rows. At that size, tensor cores multiply weights
from registers without waiting for each other (``mma.sync``), so codes need not pass through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import (
    add_dot,
    await_prior_kernel,
    dot,
    has_float8_conversions,
    launch_options,
    num_sms,
    release_next_kernel,
)
from shotcast.kernels.triton.gemv import weight_rows, write_outputs
from shotcast.kernels.triton.grouped import BLOCK, SLICE, codes_as_float32, load_float8, load_scales, step_columns


@dataclass(frozen=True, slots=True)
class GroupedGemmShape:
    """The SHAPE argument of :func:`grouped_gemm_kernel`.

    HALVES: 2 if there are two tiles of M_TILE rows. GROUP: the columns that share a scale; STEP: the columns of a block
    that share one. NATIVE: as in ``device/triton/float8.py``.
    """

    M_TILE: int
    HALVES: int
    TILE: int
    STAGES: int
    SPLIT_K: int
    GROUP: int
    STEP: int
    NATIVE: bool
    GATED: bool
    PDL: bool


@triton.jit
def _load_x(x, half, k, inputs, count, M_TILE: tl.constexpr):
    """Load columns ``k`` of a tile of rows; the last row replaces rows past it."""
    m = tl.minimum(half * M_TILE + tl.arange(0, M_TILE), count - 1)
    return tl.load(x + m[:, None] * inputs + k[None, :], mask=(k < inputs)[None, :], other=0.0)


@triton.jit(do_not_specialize=["outputs", "count"])
def grouped_gemm_kernel(
    x, weight, scales, zeros, bias, out, partial_sums, counters, outputs, inputs, count, SHAPE: tl.constexpr
):
    """Program (tile, part): multiply one of SPLIT_K parts of the columns of TILE outputs. SHAPE is a
    :class:`GroupedGemmShape`.

    ``zeros`` is None for FP8. ``partial_sums`` is float32 [tiles, SPLIT_K, HALVES, M_TILE, TILE]; ``counters`` is int32
    [tiles], zero before and after.
    """
    M_TILE: tl.constexpr = SHAPE.M_TILE
    HALVES: tl.constexpr = SHAPE.HALVES
    TILE: tl.constexpr = SHAPE.TILE
    SPLIT_K: tl.constexpr = SHAPE.SPLIT_K
    GROUP: tl.constexpr = SHAPE.GROUP
    STEP: tl.constexpr = SHAPE.STEP
    NATIVE: tl.constexpr = SHAPE.NATIVE
    COLUMNS: tl.constexpr = STEP if zeros is None else BLOCK
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = weight_rows(outputs, TILE, SHAPE.GATED)
    width = tl.cdiv(tl.cdiv(inputs, COLUMNS), SPLIT_K) * COLUMNS
    first = part * width
    end = tl.minimum(first + width, inputs)
    DTYPE: tl.constexpr = x.dtype.element_ty
    release_next_kernel(SHAPE.PDL)
    await_prior_kernel(SHAPE.PDL)
    sums = tl.zeros([M_TILE, TILE], tl.float32)
    others = tl.zeros([M_TILE, TILE], tl.float32)
    ones = tl.full([SLICE, TILE], 1.0, tl.float32).to(DTYPE)
    for start in tl.range(first, end, COLUMNS, num_stages=SHAPE.STAGES):
        if zeros is None:
            scale, _ = load_scales(scales, None, rows, start // GROUP, outputs, inputs, GROUP)
            k = start + tl.arange(0, COLUMNS)
            weights = tl.trans(load_float8(weight, rows, start, inputs, COLUMNS, NATIVE)).to(DTYPE)  # exact
            sums += dot(_load_x(x, 0, k, inputs, count, M_TILE), weights) * scale[None, :]
            if HALVES == 2:
                others += dot(_load_x(x, 1, k, inputs, count, M_TILE), weights) * scale[None, :]
        else:
            i = start // 8 + tl.arange(0, SLICE)
            address = weight + rows[None, :] * (tl.cdiv(inputs, BLOCK) * SLICE) + i[:, None]
            words = tl.load(address, eviction_policy="evict_first")
            for piece in tl.static_range(BLOCK // STEP):
                group = (start + piece * STEP) // GROUP
                scale, zero = load_scales(scales, zeros, rows, group, outputs, inputs, GROUP)
                total = tl.zeros([M_TILE, TILE], tl.float32)
                total_x = tl.zeros([M_TILE, TILE], tl.float32)
                if HALVES == 2:
                    other = tl.zeros([M_TILE, TILE], tl.float32)
                    other_x = tl.zeros([M_TILE, TILE], tl.float32)
                for place in tl.static_range(piece * (STEP // SLICE), (piece + 1) * (STEP // SLICE)):
                    k = start + place * SLICE + tl.arange(0, SLICE)
                    codes = codes_as_float32(words, place).to(DTYPE)
                    values = _load_x(x, 0, k, inputs, count, M_TILE)
                    total = add_dot(total, values, codes)
                    total_x = add_dot(total_x, values, ones)
                    if HALVES == 2:
                        values = _load_x(x, 1, k, inputs, count, M_TILE)
                        other = add_dot(other, values, codes)
                        other_x = add_dot(other_x, values, ones)
                sums += scale[None, :] * (total - zero[None, :] * total_x)
                if HALVES == 2:
                    others += scale[None, :] * (other - zero[None, :] * other_x)
    is_last = True
    if SPLIT_K > 1:
        m = tl.arange(0, M_TILE)[:, None]
        PART: tl.constexpr = HALVES * M_TILE * TILE
        tile_sums = partial_sums + tile.to(tl.int64) * (SPLIT_K * PART) + m * TILE + tl.arange(0, TILE)[None, :]
        tl.store(tile_sums + part * PART, sums, cache_modifier=".cg")
        if HALVES == 2:
            tl.store(tile_sums + part * PART + M_TILE * TILE, others, cache_modifier=".cg")
        tl.debug_barrier()  # all stores of the program precede its arrival
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
        tl.debug_barrier()
        if is_last:
            sums = tl.load(tile_sums, cache_modifier=".cg")
            for one in tl.static_range(1, SPLIT_K):
                sums += tl.load(tile_sums + one * PART, cache_modifier=".cg")
            if HALVES == 2:
                others = tl.load(tile_sums + M_TILE * TILE, cache_modifier=".cg")
                for one in tl.static_range(1, SPLIT_K):
                    others += tl.load(tile_sums + one * PART + M_TILE * TILE, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if is_last:
        write_outputs(sums, rows, None, None, bias, out, outputs, count, M_TILE, TILE, SHAPE.GATED)
        if HALVES == 2:
            out_width = outputs // 2 if SHAPE.GATED else outputs
            rest = out + M_TILE * out_width
            write_outputs(others, rows, None, None, bias, rest, outputs, count - M_TILE, M_TILE, TILE, SHAPE.GATED)


@dataclass(frozen=True, slots=True)
class GroupedGemmConfig:
    """The launch configuration of :func:`grouped_gemm_kernel`."""

    tile: int  # outputs per program
    warps: int  # warps per program
    stages: int  # column steps loaded ahead
    split_k: int  # programs that divide the columns of a tile


MAX_ROWS = 64
_LEAST_TILE = 32
_FEW_STEPS = 4
"""The largest number of steps per program for which loading more than one ahead is slower."""


def choose_config(outputs: int, inputs: int, rows: int, num_sms: int) -> GroupedGemmConfig:
    """Choose the launch configuration for a GPU with ``num_sms`` SMs.

    The choice is close to the fastest for the shapes of an 8B model
    (benchmarks/data/h200/exploration/quantized_x1.txt).
    """
    tile, warps, per_sm = (64, 2, 8) if rows <= 16 else (64, 4, 4)
    if rows > 32:
        tile, warps, per_sm = 128, 8, 2
    steps = -(-inputs // BLOCK.value)
    split_k = max(1, min(per_sm * num_sms // -(-outputs // tile), steps // 2))
    return GroupedGemmConfig(tile, warps, 2 if -(-steps // split_k) <= _FEW_STEPS else 4, split_k)


def row_tiles(rows: int) -> tuple[int, int]:
    """Compute the rows per tile of x, and the number of tiles."""
    return 16 if rows <= 16 else 32, 2 if rows > 32 else 1


def new_counters(weight: torch.Tensor) -> torch.Tensor:
    """Allocate the counters of :func:`linear`, for matmuls with ``weight`` that run in sequence."""
    return torch.zeros(-(-weight.shape[0] // _LEAST_TILE), dtype=torch.int32, device=weight.device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    counters: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    config: GroupedGemmConfig | None = None,
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` with a weight in groups, for at most MAX_ROWS rows of x.

    Args:
        weight, scales, zeros, group: as in :class:`~shotcast.layers.quantized.GroupedRows`. x is bfloat16 or float16.
            The other arguments and the result are those of :func:`shotcast.kernels.triton.gemv.linear`.
        counters: from :func:`new_counters`.
    """
    rows, outputs, inputs = x.shape[0], weight.shape[0], x.shape[1]
    if config is None:
        config = choose_config(outputs, inputs, rows, num_sms(x.device))
    out = x.new_empty(rows, outputs // 2 if gated else outputs)
    m_tile, halves = row_tiles(rows)
    grid = (-(-outputs // config.tile), config.split_k)
    split = config.split_k > 1
    partial_sums = x.new_empty(*grid, halves, m_tile, config.tile, dtype=torch.float32) if split else counters
    options = launch_options(x.device, config.warps)
    shape = GroupedGemmShape(
        M_TILE=m_tile,
        HALVES=halves,
        TILE=config.tile,
        STAGES=config.stages,
        SPLIT_K=config.split_k,
        GROUP=group,
        STEP=step_columns(group),
        NATIVE=zeros is None and has_float8_conversions(x.device),
        GATED=gated,
        PDL=options["launch_pdl"],
    )
    grouped_gemm_kernel[grid](
        x, weight, scales, zeros, bias, out, partial_sums, counters, outputs, inputs, rows, shape, **options
    )
    return out
