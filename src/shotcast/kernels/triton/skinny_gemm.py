"""Products of 3 to 64 rows with a matrix of weights: each weight is read once, and tensor cores multiply.

    out = (x * x_scale) @ weight.T * scale + bias;   GATED: the first half of the outputs are gates, the other half what
                                                     they gate, out = silu(gates) * others

For decoding a batch. The weight is the left operand, of which tensor cores take 64 rows at a time, and rows of x are
columns of the right one. A program has one tile of outputs; where there are fewer tiles than SMs, several
programs divide its columns: each stores its sums, and the one that arrives last adds all of them, in the order of the
columns, so that the result does not depend on who that is. As much of the weight is on its way as a processor has
shared memory for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
from shotcast.kernels.triton.gemv import DTYPES, UNIT, check, weight_rows, write_outputs

FLOAT8 = torch.float8_e4m3fn


@triton.jit(do_not_specialize=["outputs", "count"])
def skinny_gemm_kernel(
    x,
    x_scale,
    weight,
    scale,
    bias,
    out,
    partial,
    arrivals,
    outputs,
    inputs,
    count,
    M_TILE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, part): one of PARTS parts of the columns of TILE outputs.

    ``partial`` is float32 [tiles, PARTS, TILE, M_TILE]; ``arrivals`` int32 [tiles], zero before and after. WHOLE:
    inputs are a multiple of COLUMNS.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = weight_rows(outputs, TILE, GATED)
    m = tl.arange(0, M_TILE)
    i = tl.arange(0, COLUMNS)
    width = tl.cdiv(tl.cdiv(inputs, COLUMNS), PARTS) * COLUMNS
    first = part * width
    end = tl.minimum(first + width, inputs)
    release_next_kernel(PDL)
    await_prior_kernel(PDL)
    sums = tl.zeros([TILE, M_TILE], tl.float32)
    for start in tl.range(first, end, COLUMNS, num_stages=STAGES):
        k = start + i
        if WHOLE:
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
    complete = True
    if PARTS > 1:
        place = tl.arange(0, TILE)[:, None] * M_TILE + m[None, :]
        of_tile = partial + tile.to(tl.int64) * (PARTS * TILE * M_TILE) + place
        tl.store(of_tile + part * (TILE * M_TILE), sums, cache_modifier=".cg")
        tl.debug_barrier()  # all of the program's stores are before its arrival
        complete = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == PARTS - 1
        tl.debug_barrier()
        if complete:
            sums = tl.load(of_tile, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                sums += tl.load(of_tile + other * (TILE * M_TILE), cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if complete:
        write_outputs(tl.trans(sums), rows, x_scale, scale, bias, out, outputs, count, M_TILE, TILE, GATED)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How :func:`skinny_gemm_kernel` is launched.

    Attributes:
        stages: steps of columns on their way.
        parts: programs that divide the columns of a tile.
    """

    stages: int
    parts: int

    def __str__(self) -> str:
        return f"{self.stages} stages, {self.parts} parts"


TILE = 64
"""Outputs of a program: rows of the left operand of a warp group."""
STEP_BYTES = 256
"""Of a row, at a time."""
WARPS = 4
MOST_ROWS = 64
"""Rows of x at most, up to where this is mostly faster than a library (benchmarks/data/h200/linear.json)."""
_LEAST_ROWS = 16
"""Columns of the right operand at least; with 8 it is no faster."""
_MOST_STAGES = 10
_LEAST_PARTS = 3
"""What two parts save, meeting costs."""
_SPARE_BYTES = 12 << 10
"""Shared memory of a processor that is left for other things than steps on their way."""


def row_tile(rows: int) -> int:
    """Columns of the right operand for so many rows of x."""
    return max(_LEAST_ROWS, triton.next_power_of_2(rows))


def _stages(rows: int, together: int, memory: int) -> int:
    """For which there is room if a processor has so many programs together; at least 2."""
    step = (TILE + row_tile(rows)) * STEP_BYTES
    return max(2, min(_MOST_STAGES, (memory - _SPARE_BYTES) // together // step))


def _parts(outputs: int, inputs: int, itemsize: int, num_sms: int) -> int:
    """Into how many the columns of tiles can be divided among so many programs."""
    steps = -(-inputs * itemsize // STEP_BYTES)
    return max(1, min(num_sms // -(-outputs // TILE), steps // 2))


def choose(outputs: int, inputs: int, itemsize: int, rows: int, num_sms: int, memory: int) -> Tiles:
    """The launch on a GPU of ``num_sms`` SMs, each with ``memory`` bytes of shared memory.

    The fastest, nearly, over the shapes of benchmarks/data/h200/linear.json.
    """
    together = 2 if itemsize == 1 or outputs > 2 * TILE * num_sms else 1
    parts = _parts(outputs, inputs, itemsize, together * num_sms)
    return Tiles(_stages(rows, together, memory), parts if parts >= _LEAST_PARTS else 1)


def candidates(outputs: int, inputs: int, itemsize: int, rows: int, num_sms: int, memory: int) -> Iterator[Tiles]:
    """Launches worth measuring: for one to three programs on a processor."""
    made = set()
    for together in (1, 2, 3):
        most = _parts(outputs, inputs, itemsize, together * num_sms)
        made |= {Tiles(_stages(rows, together, memory), parts) for parts in (1, max(1, most - 1), most)}
    yield from sorted(made, key=str)


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`linear` is the fastest way."""
    return (
        x.device.type == "cuda"
        and x.dtype in (*DTYPES, FLOAT8)
        and weight.dtype == x.dtype
        and 0 < x.shape[0] <= MOST_ROWS
        and weight.shape[1] % UNIT == 0
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def arrivals(weight: torch.Tensor) -> torch.Tensor:
    """What :func:`linear` counts by: for products with ``weight`` of which none begins before the one before ended."""
    return torch.zeros(-(-weight.shape[0] // TILE), dtype=torch.int32, device=weight.device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """``(x * x_scale) @ weight.T * scale + bias``, summed in float32 and rounded once.

    Args:
        x: contiguous [rows, inputs] of bfloat16, float16 or float8_e4m3fn; at most MOST_ROWS rows.
        weight: contiguous [outputs, inputs, a multiple of 16] of the same dtype.
        counts: of :func:`arrivals`.
        x_scale: float32 [rows, 1], with float8_e4m3fn.
        scale: float32 [outputs].
        bias: [outputs].
        gated: the result is ``silu(first half of the outputs) * second half``.
        tiles: how to launch it; None for what is known to be fast.

    Returns:
        [rows, outputs], or half as many columns if gated, of the dtype of x; bfloat16 for float8_e4m3fn.

    Raises:
        UnsupportedError: for other dtypes or more rows.
        ConfigError: for other shapes.
    """
    fit = x.dtype in (*DTYPES, FLOAT8) and weight.dtype == x.dtype
    check(x, weight, gated, MOST_ROWS, fit, "bfloat16, float16 or float8_e4m3fn with weights of their dtype")
    rows, (outputs, inputs) = x.shape[0], weight.shape
    itemsize = weight.element_size()
    if tiles is None:
        tiles = choose(outputs, inputs, itemsize, rows, num_sms(x.device), shared_memory_per_sm(x.device))
    dtype = torch.bfloat16 if x.dtype == FLOAT8 else x.dtype
    out = x.new_empty(rows, outputs // 2 if gated else outputs, dtype=dtype)
    grid = (-(-outputs // TILE), tiles.parts)
    m_tile, columns = row_tile(rows), STEP_BYTES // itemsize
    partial = x.new_empty(*grid, TILE, m_tile, dtype=torch.float32) if tiles.parts > 1 else counts
    options = launch_options(x.device, WARPS)
    skinny_gemm_kernel[grid](
        x,
        x_scale,
        weight,
        scale,
        bias,
        out,
        partial,
        counts,
        outputs,
        inputs,
        rows,
        m_tile,
        TILE,
        columns,
        tiles.stages,
        tiles.parts,
        inputs % columns == 0,
        gated,
        options["launch_pdl"],
        **options,
    )
    return out
