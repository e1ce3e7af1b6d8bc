"""Matmuls of 3 to 64 rows with a weight matrix (skinny GEMM): each weight is read once, and tensor cores multiply.

    out = (x * x_scale) @ weight.T * scale + bias;   GATED: the first half of the outputs are gates of the second half,
                                                     out = silu(gates) * others

They serve decoding of a batch. The weight is the left operand, which tensor cores take 64 rows at a time; rows of x are
columns of the right operand. A program computes one tile of outputs. If there are fewer tiles than SMs, several
programs divide the columns of a tile (split-K): each stores its sums, and the last one to arrive adds all of them in
column order, so the result does not depend on which program is last. The kernel loads as much of the weight ahead as an
SM's shared memory can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import (
    add_dot,
    await_prior_kernel,
    launch_options,
    num_sms,
    release_next_kernel,
    shared_memory_per_sm,
)
from shotcast.kernels.triton.gemv import DTYPES, match, weight_rows, write_outputs

FLOAT8 = torch.float8_e4m3fn


class Matrix(NamedTuple):
    """A weight, its scale, and the bias of its outputs; all but the weight may be None."""

    weight: Any
    scale: Any
    bias: Any


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """The SHAPE argument of :func:`skinny_gemm_kernel`. EVEN_K: the number of inputs is a multiple of COLUMNS."""

    M_TILE: int
    TILE: int
    COLUMNS: int
    STAGES: int
    SPLIT_K: int
    EVEN_K: bool
    GATED: bool
    PDL: bool


@triton.jit(do_not_specialize=["outputs", "count"])
def skinny_gemm_kernel(x, x_scale, matrix, out, partial_sums, counters, outputs, inputs, count, SHAPE: tl.constexpr):
    """Program (tile, part): multiply one of SPLIT_K parts of the columns of TILE outputs.

    ``matrix`` is a :class:`Matrix` and SHAPE a :class:`SkinnyShape`. ``partial_sums`` is float32 [tiles, SPLIT_K, TILE,
    M_TILE]; ``counters`` is int32 [tiles], zero before and after.
    """
    M_TILE: tl.constexpr = SHAPE.M_TILE
    TILE: tl.constexpr = SHAPE.TILE
    COLUMNS: tl.constexpr = SHAPE.COLUMNS
    SPLIT_K: tl.constexpr = SHAPE.SPLIT_K
    weight, scale, bias = matrix
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = weight_rows(outputs, TILE, SHAPE.GATED)
    m = tl.arange(0, M_TILE)
    i = tl.arange(0, COLUMNS)
    width = tl.cdiv(tl.cdiv(inputs, COLUMNS), SPLIT_K) * COLUMNS
    first = part * width
    end = tl.minimum(first + width, inputs)
    release_next_kernel(SHAPE.PDL)
    await_prior_kernel(SHAPE.PDL)
    sums = tl.zeros([TILE, M_TILE], tl.float32)
    for start in tl.range(first, end, COLUMNS, num_stages=SHAPE.STAGES):
        k = start + i
        if SHAPE.EVEN_K:
            weights = tl.load(weight + rows[:, None] * inputs + k[None, :], eviction_policy="evict_first")
            values = tl.load(x + m[None, :] * inputs + k[:, None], mask=m[None, :] < count, other=0.0)
        else:
            inside = k < inputs
            weights = tl.load(
                weight + rows[:, None] * inputs + k[None, :],
                mask=inside[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            values = tl.load(
                x + m[None, :] * inputs + k[:, None], mask=(m[None, :] < count) & inside[:, None], other=0.0
            )
        sums = add_dot(sums, weights, values)
    is_last = True
    if SPLIT_K > 1:
        offset = tl.arange(0, TILE)[:, None] * M_TILE + m[None, :]
        tile_sums = partial_sums + tile.to(tl.int64) * (SPLIT_K * TILE * M_TILE) + offset
        tl.store(tile_sums + part * (TILE * M_TILE), sums, cache_modifier=".cg")
        tl.debug_barrier()  # all stores of the program precede its arrival
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
        tl.debug_barrier()
        if is_last:
            sums = tl.load(tile_sums, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT_K):
                sums += tl.load(tile_sums + other * (TILE * M_TILE), cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if is_last:
        write_outputs(tl.trans(sums), rows, x_scale, scale, bias, out, outputs, count, M_TILE, TILE, SHAPE.GATED)


@dataclass(frozen=True, slots=True)
class SkinnyGemmConfig:
    """The launch configuration of :func:`skinny_gemm_kernel`."""

    stages: int  # column steps loaded ahead
    split_k: int  # programs that divide the columns of a tile


TILE = 64
"""Outputs per program: the rows of a warp group's left operand."""
STEP_BYTES = 256
"""Bytes of a row loaded in one step."""
WARPS = 4
MAX_ROWS = 64
"""The largest number of rows of x for which this is usually faster than a library
(benchmarks/data/h200/linear.json)."""
_LEAST_ROWS = 16
"""The smallest number of columns of the right operand; 8 would be no faster."""
_MOST_STAGES = 10
_LEAST_SPLIT_K = 3
"""The smallest number of parts; dividing in two saves no more than combining the parts costs."""
SPARE_BYTES = 12 << 10
"""Shared memory per SM reserved for purposes other than loading ahead."""


def row_tile(rows: int) -> int:
    """Choose the number of columns of the right operand for ``rows`` rows of x."""
    return max(_LEAST_ROWS, triton.next_power_of_2(rows))


def max_stages(rows: int, programs_per_sm: int, memory_bytes: int) -> int:
    """Compute the number of stages, at least 2, that fit in memory with ``programs_per_sm`` programs on an SM."""
    step_bytes = (TILE + row_tile(rows)) * STEP_BYTES
    return max(2, min(_MOST_STAGES, (memory_bytes - SPARE_BYTES) // programs_per_sm // step_bytes))


def max_split_k(outputs: int, inputs: int, itemsize: int, num_sms: int) -> int:
    """Compute the number of parts into which the columns can be divided among all SMs."""
    steps = -(-inputs * itemsize // STEP_BYTES)
    return max(1, min(num_sms // -(-outputs // TILE), steps // 2))


def choose_config(
    outputs: int, inputs: int, itemsize: int, rows: int, num_sms: int, memory_bytes: int
) -> SkinnyGemmConfig:
    """Choose the launch configuration for a GPU with ``num_sms`` SMs, each with ``memory_bytes`` bytes of shared
    memory.

    The choice is close to the fastest over the shapes of benchmarks/data/h200/linear.json.
    """
    programs_per_sm = 2 if itemsize == 1 or outputs > 2 * TILE * num_sms else 1
    split_k = max_split_k(outputs, inputs, itemsize, programs_per_sm * num_sms)
    return SkinnyGemmConfig(
        max_stages(rows, programs_per_sm, memory_bytes), split_k if split_k >= _LEAST_SPLIT_K else 1
    )


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Check whether :func:`linear` supports the operands, and is the fastest option."""
    return x.dtype in (*DTYPES, FLOAT8) and weight.dtype == x.dtype and match(x, weight, MAX_ROWS)


def new_counters(weight: torch.Tensor) -> torch.Tensor:
    """Allocate the counters of :func:`linear`, for matmuls with ``weight`` that run in sequence."""
    return torch.zeros(-(-weight.shape[0] // TILE), dtype=torch.int32, device=weight.device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    counters: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    config: SkinnyGemmConfig | None = None,
) -> torch.Tensor:
    """Compute ``(x * x_scale) @ weight.T * scale + bias``, with other arguments as in :func:`gemv.linear`.

    Args:
        x: contiguous [rows, inputs] of bfloat16, float16 or float8_e4m3fn, with a result in bfloat16; at most MAX_ROWS
            rows.
        weight: of the dtype of x.
        counters: from :func:`new_counters`.
        x_scale: float32 [rows, 1], with float8_e4m3fn.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    itemsize = weight.element_size()
    if config is None:
        config = choose_config(outputs, inputs, itemsize, rows, num_sms(x.device), shared_memory_per_sm(x.device))
    columns = STEP_BYTES // itemsize
    dtype = torch.bfloat16 if x.dtype == FLOAT8 else x.dtype
    out = x.new_empty(rows, outputs // 2 if gated else outputs, dtype=dtype)
    grid = (-(-outputs // TILE), config.split_k)
    m_tile = row_tile(rows)
    partial_sums = x.new_empty(*grid, TILE, m_tile, dtype=torch.float32) if config.split_k > 1 else counters
    options = launch_options(x.device, WARPS)
    shape = SkinnyShape(
        m_tile, TILE, columns, config.stages, config.split_k, inputs % columns == 0, gated, options["launch_pdl"]
    )
    matrix = Matrix(weight, scale, bias)
    skinny_gemm_kernel[grid](x, x_scale, matrix, out, partial_sums, counters, outputs, inputs, rows, shape, **options)
    return out
