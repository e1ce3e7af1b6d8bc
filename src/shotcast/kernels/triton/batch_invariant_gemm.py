"""Matmuls with a weight matrix whose rows do not depend on how many there are: batch-invariant.

    out = x @ weight.T + bias

Each output is one float32 sum over the columns in ascending order, 16 at a time as tensor cores add them. If
:mod:`shotcast.kernels.triton.skinny_gemm` divides the columns of a weight into parts, sums of parts are added in order.
Up to 64 rows are served by that kernel, more by the kernel here, which adds the same numbers in the same order. The
weight is the left operand of both, so the number of rows of x decides only the width of an instruction.
:func:`differs` compares the bits on the GPU at hand.
"""

from __future__ import annotations

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
from shotcast.device.triton.words import round_float
from shotcast.kernels.triton import skinny_gemm
from shotcast.kernels.triton.gemv import DTYPES, UNIT


@dataclass(frozen=True, slots=True)
class InvariantTile:
    """The launch of :func:`batch_invariant_gemm_kernel`."""

    outputs: int  # of a program's tile, as are the rows
    rows: int
    warps: int  # warps per program
    stages: int  # column steps loaded ahead


@dataclass(frozen=True, slots=True)
class InvariantShape:
    """The SHAPE argument of :func:`batch_invariant_gemm_kernel`.

    DIVIDED: there are several parts. EVEN_K: the number of inputs is a multiple of COLUMNS.
    """

    M_TILE: int
    TILE: int
    COLUMNS: int
    STAGES: int
    DIVIDED: bool
    EVEN_K: bool
    PDL: bool


@triton.jit
def _add_columns(x, weight, tokens, rows, first, end, inputs, SHAPE: tl.constexpr):
    """Return the float32 sums [TILE, M_TILE] over the columns from ``first`` to ``end``."""
    M_TILE: tl.constexpr = SHAPE.M_TILE
    TILE: tl.constexpr = SHAPE.TILE
    COLUMNS: tl.constexpr = SHAPE.COLUMNS
    i = tl.arange(0, COLUMNS)
    sums = tl.zeros([TILE, M_TILE], tl.float32)
    for start in tl.range(first, end, COLUMNS, num_stages=SHAPE.STAGES):
        k = start + i
        if SHAPE.EVEN_K:
            weights = tl.load(weight + rows[:, None] * inputs + k[None, :])
            values = tl.load(x + tokens[None, :] * inputs + k[:, None])
        else:
            weights = tl.load(weight + rows[:, None] * inputs + k[None, :], mask=(k < inputs)[None, :], other=0.0)
            values = tl.load(x + tokens[None, :] * inputs + k[:, None], mask=(k < inputs)[:, None], other=0.0)
        sums = add_dot(sums, weights, values)
    return sums


@triton.jit(do_not_specialize=["outputs", "count", "split_k", "part_steps"])
def batch_invariant_gemm_kernel(x, weight, bias, out, outputs, inputs, count, split_k, part_steps, SHAPE: tl.constexpr):
    """Program i: compute a tile of M_TILE rows and TILE outputs; neighbors share the tile of the weight.

    ``bias`` may be None; all of the ``split_k`` parts but the last have ``part_steps`` steps of columns. SHAPE is an
    :class:`InvariantShape`.
    """
    M_TILE: tl.constexpr = SHAPE.M_TILE
    TILE: tl.constexpr = SHAPE.TILE
    row_tiles = tl.cdiv(count, M_TILE)
    n = tl.program_id(0) // row_tiles * TILE + tl.arange(0, TILE)
    m = tl.program_id(0) % row_tiles * M_TILE + tl.arange(0, M_TILE)
    rows = tl.minimum(n, outputs - 1).to(tl.int64)
    tokens = tl.minimum(m, count - 1).to(tl.int64)  # what they add is not stored
    release_next_kernel(SHAPE.PDL)
    await_prior_kernel(SHAPE.PDL)
    if SHAPE.DIVIDED:
        total = tl.zeros([TILE, M_TILE], tl.float32)
        for part in tl.range(0, split_k, num_stages=1):
            first = part * part_steps * SHAPE.COLUMNS
            end = tl.minimum(first + part_steps * SHAPE.COLUMNS, inputs)
            total = total + _add_columns(x, weight, tokens, rows, first, end, inputs, SHAPE)
    else:
        total = _add_columns(x, weight, tokens, rows, 0, inputs, inputs, SHAPE)
    if bias is not None:
        total = total + tl.load(bias + rows)[:, None].to(tl.float32)
    rounded = round_float(tl.trans(total), out.dtype.element_ty)
    tl.store(
        out + m.to(tl.int64)[:, None] * outputs + n[None, :],
        rounded,
        mask=(m < count)[:, None] & (n < outputs)[None, :],
    )


_STEP_COLUMNS = 64
_SIDES = ((64, 128, 4), (128, 128, 8), (128, 256, 8))
"""The outputs, rows and warps of tiles."""
_MOST_STAGES = 4
_EDGE = 32
"""Outputs of a tile that take as long as one row or column of its edge."""


def tiles(parts: int, itemsize: int, memory_bytes: int) -> list[InvariantTile]:
    """Return the tiles whose loads fit in an SM's shared memory, and whose sums of ``parts`` parts fit in registers."""
    found = []
    for outputs, rows, warps in _SIDES:
        stages = (memory_bytes - skinny_gemm.SPARE_BYTES) // ((outputs + rows) * _STEP_COLUMNS * itemsize)
        if stages >= 2 and (parts == 1 or rows < 256):
            found.append(InvariantTile(outputs, rows, warps, min(stages, _MOST_STAGES)))
    return found


def choose_tile(rows: int, outputs: int, num_sms: int, among: list[InvariantTile]) -> InvariantTile:
    """Choose the tile that takes the least time if each SM computes one at a time, and time grows with the area of a
    tile and with its edges."""

    def cost(tile: InvariantTile) -> int:
        programs = -(-rows // tile.rows) * -(-outputs // tile.outputs)
        return -(-programs // num_sms) * (tile.outputs * tile.rows + _EDGE * (tile.outputs + tile.rows))

    return min(among, key=cost)


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Check whether :func:`linear` takes these dtypes, devices and sides; the number of rows does not matter."""
    return (
        x.device.type == weight.device.type == "cuda"
        and x.dtype in DTYPES
        and weight.dtype == x.dtype
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and weight.shape[1] % UNIT == 0
        and weight.is_contiguous()
    )


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tile: InvariantTile | None = None
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` [rows, outputs]. A row has the same bits among any number of other rows.

    Nothing is checked: :func:`serves` must accept the operands.

    Args:
        x: contiguous [rows, inputs] of bfloat16 or float16.
        weight: contiguous [outputs, inputs] of the dtype of x; inputs are a multiple of 16.
        bias: [outputs].
        tile: the launch; None for that of :func:`choose_tile`, or of the other kernel for few rows.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if rows == 0:
        return x.new_empty(0, outputs)
    item, sms, memory = x.element_size(), num_sms(x.device), shared_memory_per_sm(x.device)
    config = skinny_gemm.choose_config(outputs, inputs, item, min(rows, skinny_gemm.MAX_ROWS), sms, memory)
    if tile is None and rows <= skinny_gemm.MAX_ROWS:
        divided = config.split_k > 1
        counters = skinny_gemm.new_counters(weight) if divided else x.new_empty(1, dtype=torch.int32)
        return skinny_gemm.linear(x, weight, counters, bias=bias, config=config)
    if tile is None:
        tile = choose_tile(rows, outputs, sms, tiles(config.split_k, item, memory))
    step = skinny_gemm.STEP_BYTES // item  # the parts of that kernel are whole steps of it
    part_steps = triton.cdiv(triton.cdiv(inputs, step), config.split_k) * (step // _STEP_COLUMNS)
    options = launch_options(x.device, tile.warps)
    shape = InvariantShape(
        tile.rows,
        tile.outputs,
        _STEP_COLUMNS,
        tile.stages,
        config.split_k > 1,
        inputs % _STEP_COLUMNS == 0,
        options["launch_pdl"],
    )
    out = x.new_empty(rows, outputs)
    grid = (-(-rows // tile.rows) * -(-outputs // tile.outputs),)
    sizes = outputs, inputs, rows, config.split_k, part_steps
    batch_invariant_gemm_kernel[grid](x, weight, bias, out, *sizes, shape, **options)
    return out


_LEAST_OUTPUTS = 1024
"""Outputs from which a hundred rows have enough results for an experiment: one in 5,000 sums of another order is
rounded to other bits."""


def differs(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether bits of :func:`linear` depend on the number of rows, by an experiment on the GPU.

    It compiles every kernel that may serve the layer. With few outputs, it takes another weight, whose columns cancel:
    then almost every sum of another order has other bits.
    """
    device, (outputs, inputs) = weight.device, weight.shape
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(300, inputs, generator=draw, device=device).to(weight.dtype)
    if outputs < _LEAST_OUTPUTS:
        half = inputs // 2
        weight = torch.randn(outputs, inputs, generator=draw, device=device).to(weight.dtype)
        weight[:, half:] = weight[:, :half]
        x[:, half:] = -x[:, :half]
        bias = None if bias is None else torch.zeros_like(bias)
    memory = shared_memory_per_sm(device)
    parts = skinny_gemm.choose_config(outputs, inputs, x.element_size(), 1, num_sms(device), memory).split_k
    launches: list[tuple[int, InvariantTile | None]] = [(rows, None) for rows in (1, 17, 40, 65)]
    launches += [(300, tile) for tile in tiles(parts, x.element_size(), memory)]
    found = [linear(x[:rows], weight, bias, tile) for rows, tile in launches]
    return not all(torch.equal(one, found[-1][: one.shape[0]]) for one in found)
