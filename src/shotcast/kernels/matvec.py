"""Products of few rows with a matrix of weights: each weight is read once, at the speed of memory.

    out = x @ weight.T * scale + bias;   GATED: the first half of the outputs are gates, the other half what they gate,
                                         out = silu(gates) * others

For decoding, where a weight serves few tokens. Both kernels give a program some outputs and all of their columns, so
sums need no other program, and their order is fixed. Weights depend on no kernel before: the first of them are loaded
before the wait for it, and more are asked into the L2 cache, which hides that kernel's end and this one's beginning.

- :func:`stream_kernel` multiplies in registers, where one or a few rows of x wait in the L1 cache.
- :func:`stream_dot_kernel` lets tensor cores multiply: each warp takes a part of the columns, and their sums meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.kernels.activations import silu
from shotcast.kernels.target import (
    await_prior_kernel,
    dot,
    launch_options,
    prefetch,
    processors,
    release_next_kernel,
)
from shotcast.kernels.words import round_float

LINE = tl.constexpr(128)
"""Bytes of a cache line."""
DTYPES = (torch.bfloat16, torch.float16)
"""Of x."""


@triton.jit
def weight_rows(outputs, TILE: tl.constexpr, GATED: tl.constexpr):
    """Rows of the weight that this program takes; GATED: a gate and what it gates are neighbours in the tile."""
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if GATED:
        n = n // 2 + n % 2 * (outputs // 2)
    return tl.minimum(n, outputs - 1).to(tl.int64)


@triton.jit
def ask_for(weight, rows, inputs, FIRST: tl.constexpr, AHEAD: tl.constexpr, TILE: tl.constexpr):
    """Bring columns FIRST to FIRST + AHEAD of ``rows`` into the L2 cache."""
    EACH: tl.constexpr = LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
    if AHEAD // EACH > 0:
        column = FIRST + tl.arange(0, AHEAD // EACH)[None, :] * EACH
        prefetch(weight + rows[:, None] * inputs + column, tl.broadcast_to(column < inputs, [TILE, AHEAD // EACH]))


@triton.jit
def write_outputs(
    sums,
    rows,
    scale,
    bias,
    out,
    outputs,
    count,
    M_TILE: tl.constexpr,
    TILE: tl.constexpr,
    GATED: tl.constexpr,
):
    """Scale, bias and gate of the float32 ``sums`` [M_TILE, TILE], and store ``count`` rows of them."""
    if scale is not None:
        sums = sums * tl.load(scale + rows)[None, :]
    if bias is not None:
        sums = sums + tl.load(bias + rows)[None, :].to(tl.float32)
    m = tl.arange(0, M_TILE)[:, None]
    if GATED:
        gate, other = tl.split(tl.reshape(sums, [M_TILE, TILE // 2, 2]))
        sums = silu(gate) * other
        width = outputs // 2
        n = tl.program_id(0) * (TILE // 2) + tl.arange(0, TILE // 2)
    else:
        width = outputs
        n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rounded = round_float(sums, out.dtype.element_ty)
    tl.store(out + m * width + n[None, :], rounded, mask=(m < count) & (n < width)[None, :])


@triton.jit
def products(
    x,
    tile,
    start,
    inputs,
    count,
    M_TILE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Sums over EACH neighbouring columns, which one thread holds: float32 [M_TILE, TILE, COLUMNS / EACH]."""
    k = start + tl.arange(0, COLUMNS)[None, None, :]
    m = tl.arange(0, M_TILE)[:, None, None]
    values = tl.load(x + m * inputs + k, mask=(m < count) & (k < inputs), other=0.0).to(tl.float32)
    return tl.sum(tl.reshape(values * tile.to(tl.float32), [M_TILE, TILE, COLUMNS // EACH, EACH]), axis=3)


@triton.jit(do_not_specialize=["outputs", "count"])
def stream_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    outputs,
    inputs,
    count,
    M_TILE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """COLUMNS columns of TILE rows are multiplied while as many are on their way."""
    EACH: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    last = (inputs - 1) // COLUMNS * COLUMNS
    rows = weight_rows(outputs, TILE, GATED)
    k = tl.arange(0, COLUMNS)[None, None, :]
    base = weight + rows[None, :, None] * inputs
    tile = tl.load(base + k, mask=k < inputs, other=0.0, eviction_policy="evict_first")
    ask_for(weight, rows, inputs, COLUMNS, AHEAD, TILE)
    release_next_kernel(PDL)
    await_prior_kernel(PDL)
    total = tl.zeros([M_TILE, TILE, COLUMNS // EACH], tl.float32)
    for start in range(0, last, COLUMNS):
        column = start + COLUMNS + k
        following = tl.load(base + column, mask=column < inputs, other=0.0, eviction_policy="evict_first")
        total += products(x, tile, start, inputs, count, M_TILE, TILE, COLUMNS, EACH)
        tile = following
    total += products(x, tile, last, inputs, count, M_TILE, TILE, COLUMNS, EACH)
    write_outputs(tl.sum(total, axis=2), rows, scale, bias, out, outputs, count, M_TILE, TILE, GATED)


@triton.jit(do_not_specialize=["outputs", "count"])
def stream_dot_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    outputs,
    inputs,
    count,
    M_TILE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each of WARPS parts of a step has COLUMNS columns of TILE rows; STAGES steps are on their way."""
    rows = weight_rows(outputs, TILE, GATED)
    ask_for(weight, rows, inputs, 0, AHEAD, TILE)
    release_next_kernel(PDL)
    await_prior_kernel(PDL)
    m = tl.arange(0, M_TILE)[None, None, :]
    part = tl.arange(0, WARPS)[:, None, None] * COLUMNS
    i = tl.arange(0, COLUMNS)
    total = tl.zeros([WARPS, TILE, M_TILE], tl.float32)
    for start in tl.range(0, inputs, WARPS * COLUMNS, num_stages=STAGES):
        k = start + part + i[None, None, :]
        base = weight + rows[None, :, None] * inputs
        tile = tl.load(base + k, mask=k < inputs, other=0.0, eviction_policy="evict_first")
        k = start + part + i[None, :, None]
        values = tl.load(x + m * inputs + k, mask=(m < count) & (k < inputs), other=0.0)
        total += dot(tile.to(values.dtype), values)
    sums = tl.trans(tl.sum(total, axis=0))
    write_outputs(sums, rows, scale, bias, out, outputs, count, M_TILE, TILE, GATED)


@dataclass(frozen=True, slots=True)
class Stream:
    """How a product is launched.

    Attributes:
        kind: ``fma`` is :func:`stream_kernel`, ``dot`` :func:`stream_dot_kernel`.
        tile: outputs of a program.
        columns: of the weight at a time; of each warp for ``dot``.
        warps: of a program.
        stages: steps on their way (``dot``).
        ahead_bytes: of each row, asked into L2 before the wait for the kernel before.
    """

    kind: Literal["fma", "dot"]
    tile: int
    columns: int
    warps: int
    stages: int = 1
    ahead_bytes: int = 4096

    def __str__(self) -> str:
        stages = f"/{self.stages}" if self.kind == "dot" else ""
        return f"{self.kind} {self.tile}x{self.columns} w{self.warps}{stages} +{self.ahead_bytes}"


MOST_ROWS = {torch.bfloat16: 16, torch.float16: 16, torch.float8_e4m3fn: 16}
"""By the weights' dtype: rows of x up to which this is faster than PyTorch. Not measured; benchmarks/linear.py does."""
_LIMIT = 64
"""Rows of x."""
_LEAST_TILE = {"fma": 1, "dot": 16}
_CHOICES: tuple[tuple[int, int, Stream], ...] = (
    (2, 2, Stream("fma", 4, 1024, 4)),
    (2, 4, Stream("fma", 4, 512, 2)),
    (2, _LIMIT, Stream("dot", 16, 64, 4, 5)),
    (1, 1, Stream("fma", 4, 2048, 4)),
    (1, _LIMIT, Stream("dot", 32, 64, 4, 4)),
)
"""(bytes of a weight, rows of x at most, launch). From bytes on their way alone; benchmarks/linear.py measures them."""


def choose(outputs: int, rows: int, itemsize: int, programs: int) -> Stream:
    """The launch for ``rows`` rows of x, of two programs for each of ``programs`` processors, if that can be."""
    stream = next(stream for item, most, stream in _CHOICES if item == itemsize and rows <= most)
    tile = stream.tile
    while tile > _LEAST_TILE[stream.kind] and -(-outputs // tile) < 2 * programs:
        tile //= 2
    return replace(stream, tile=tile)


def candidates(rows: int, itemsize: int) -> Iterator[Stream]:
    """Launches worth measuring for ``rows`` rows of x."""
    wide = 512 // itemsize  # columns that a warp loads with 16 bytes a lane
    if rows <= 4:
        for tile, warps, steps in ((2, 4, 1), (4, 4, 1), (8, 4, 1), (4, 2, 1), (4, 4, 2), (2, 8, 1), (4, 8, 1)):
            yield Stream("fma", tile, wide * warps * steps, warps)
        yield Stream("fma", 4, wide * 4, 4, ahead_bytes=0)
        if itemsize == 1:  # 8 bytes a lane, as x then has the same layout and is not exchanged between threads
            yield Stream("fma", 4, 1024, 4)
            yield Stream("fma", 8, 1024, 4)
    if rows <= 16:
        for tile, columns, warps, stages in (
            (16, 64, 4, 5),
            (16, 128, 4, 3),
            (32, 64, 4, 4),
            (32, 64, 4, 6),
            (16, 64, 8, 4),
            (32, 128, 4, 3),
            (32, 64, 8, 3),
        ):
            yield Stream("dot", tile, columns, warps, stages)
        yield Stream("dot", 16, 64, 4, 5, ahead_bytes=0)
    else:
        yield Stream("dot", 16, 64, 4, 3)
        yield Stream("dot", 32, 32, 4, 4)
        yield Stream("dot", 64, 32, 4, 4)


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`linear` is the faster way."""
    return (
        x.device.type == "cuda"
        and x.dtype in DTYPES
        and weight.dtype in (x.dtype, torch.float8_e4m3fn)
        and 0 < x.shape[0] <= MOST_ROWS[weight.dtype]
        and weight.shape[1] % 16 == 0
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    stream: Stream | None = None,
) -> torch.Tensor:
    """``x @ weight.T * scale + bias``, summed in float32 and rounded once.

    Args:
        x: contiguous [rows, inputs] of bfloat16 or float16, at most 64 rows.
        weight: contiguous [outputs, inputs] of the same dtype, or float8_e4m3fn with a scale.
        scale: float32 [outputs].
        bias: [outputs].
        gated: the result is ``silu(first half of the outputs) * second half``.
        stream: how to launch it; None for what is known to be fast.

    Returns:
        [rows, outputs], or half as many columns if gated, of the dtype of x.

    Raises:
        UnsupportedError: for other dtypes or more rows.
        ConfigError: for other shapes.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if x.dtype not in DTYPES or weight.dtype not in (x.dtype, torch.float8_e4m3fn) or not 0 < rows <= _LIMIT:
        raise UnsupportedError(
            f"1 to {_LIMIT} rows of bfloat16 or float16 are multiplied with weights of their dtype or "
            f"float8_e4m3fn, not {rows} of {x.dtype} with {weight.dtype}"
        )
    if x.shape[1] != inputs or not x.is_contiguous() or not weight.is_contiguous() or (gated and outputs % 2):
        raise ConfigError(
            f"x {list(x.shape)} and weight {list(weight.shape)} must be contiguous, of equally many columns"
            f"{', with an even number of outputs' if gated else ''}"
        )
    if stream is None:
        stream = choose(outputs, rows, weight.element_size(), processors(x.device))
    tile = max(2, stream.tile) if gated else stream.tile
    out = x.new_empty(rows, outputs // 2 if gated else outputs)
    options = launch_options(x.device, stream.warps)
    ahead = stream.ahead_bytes // weight.element_size()
    m_tile = triton.next_power_of_2(rows)
    common = x, weight, scale, bias, out, outputs, inputs, rows
    grid = (-(-outputs // tile),)
    pdl = options["launch_pdl"]
    if stream.kind == "fma":
        stream_kernel[grid](*common, m_tile, tile, stream.columns, ahead, gated, pdl, **options)
    else:
        shape = max(8, m_tile), tile, stream.columns, stream.warps, stream.stages
        stream_dot_kernel[grid](*common, *shape, ahead, gated, pdl, **options)
    return out
