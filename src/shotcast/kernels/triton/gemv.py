"""Matmuls of one or two rows with a weight matrix (GEMV): each weight is read once, at memory bandwidth.

    out = x @ weight.T * scale + bias;   GATED: the first half of the outputs are gates of the second half,
                                         out = silu(gates) * others

They serve decoding, in which each weight is used for few tokens; :mod:`shotcast.kernels.triton.skinny_gemm` handles
more rows. A program computes some outputs from all of their columns, so no sum involves another program, and the order
of each sum is fixed. Weights do not depend on the previous kernel, so the first of them are loaded before waiting for
it; this hides the end of that kernel and the start of this one. (Prefetching more of them into the L2 cache made a step
slower: docs/design/decode_step.md.)

Weights being loaded occupy the L1 cache, which shares its memory with shared memory. Kernels that run at the same time
therefore use little shared memory (:mod:`shotcast.kernels.triton.paged_attention`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shotcast.device.triton.float8 import from_words
from shotcast.device.triton.intrinsics import (
    await_prior_kernel,
    has_float8_conversions,
    launch_options,
    num_sms,
    release_next_kernel,
)
from shotcast.device.triton.words import round_float, unpack
from shotcast.kernels.triton.activations import silu

DTYPES = (torch.bfloat16, torch.float16)
"""Accepted dtypes of x."""
UNIT = 16
"""The number of columns must be a multiple of this."""


@triton.jit
def weight_rows(outputs, TILE: tl.constexpr, GATED: tl.constexpr):
    """Select the weight rows of this program; with GATED, a gate and its other half are neighbors in the tile."""
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if GATED:
        n = n // 2 + n % 2 * (outputs // 2)
    return tl.minimum(n, outputs - 1).to(tl.int64)


@triton.jit
def write_outputs(
    sums, rows, x_scale, scale, bias, out, outputs, count, M_TILE: tl.constexpr, TILE: tl.constexpr, GATED: tl.constexpr
):
    """Apply scales, bias and gate to the float32 ``sums`` [M_TILE, TILE], and store ``count`` rows of the result."""
    m = tl.arange(0, M_TILE)[:, None]
    if scale is not None:
        sums = sums * tl.load(scale + rows)[None, :]
    if x_scale is not None:
        sums = sums * tl.load(x_scale + m, mask=m < count, other=0.0)
    if bias is not None:
        sums = sums + tl.load(bias + rows)[None, :].to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(sums, [M_TILE, TILE // 2, 2]))
        sums = silu(gate) * up
        width = outputs // 2
        n = tl.program_id(0) * (TILE // 2) + tl.arange(0, TILE // 2)
    else:
        width = outputs
        n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rounded = round_float(sums, out.dtype.element_ty)
    tl.store(out + m * width + n[None, :], rounded, mask=(m < count) & (n < width)[None, :])


@triton.jit
def multiply_words(
    x,
    words,
    start,
    inputs,
    M_TILE: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Compute sums over neighboring columns, which one thread holds: float32 [M_TILE, TILE, WORDS / 4].

    ``words`` hold the weight, starting at its word ``start``. A thread has four consecutive words, so it also loads the
    four matching words of x. An FP8 word has twice as many columns, so it matches two sets of four words of x,
    ``lower`` and ``upper``, and two neighbors of these belong to one word of the weight.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    i = tl.arange(0, WORDS)[None, None, :]
    m = tl.arange(0, M_TILE)[:, None, None]
    row = x.to(tl.pointer_type(tl.int32)) + m * (inputs // 2)
    if FP8:
        inside = start + i < inputs // 4
        source = row + start * 2 + i // 4 * 8 + i % 4
        lower = tl.load(source, mask=inside, other=0)
        upper = tl.load(source + 4, mask=inside, other=0)
        QUADS: tl.constexpr = WORDS // 4
        pairs = tl.permute(tl.reshape(words, [1, TILE, QUADS, 2, 2]), (0, 1, 2, 4, 3))
        first, second = tl.split(pairs)
        total = tl.zeros([M_TILE, TILE, QUADS, 2], tl.float32)
        for half in tl.static_range(2):
            x_words = tl.reshape(lower if half == 0 else upper, [M_TILE, 1, QUADS, 2, 2])
            left, right = tl.split(x_words)
            a, b, c, d = from_words(first if half == 0 else second, NATIVE)
            low, high = unpack(left, DTYPE)
            total += low * a
            total += high * b
            low, high = unpack(right, DTYPE)
            total += low * c
            total += high * d
        sums = tl.sum(total, axis=3)
    else:
        x_words = tl.load(row + start + i, mask=start + i < inputs // 2, other=0)
        low, high = unpack(x_words, DTYPE)
        weight_low, weight_high = unpack(words, DTYPE)
        total = low * weight_low + high * weight_high
        sums = tl.sum(tl.reshape(total, [M_TILE, TILE, WORDS // 4, 4]), axis=3)
    return sums


@dataclass(frozen=True, slots=True)
class GemvShape:
    """The SHAPE argument of :func:`gemv_kernel`. NATIVE: as in ``device/triton/float8.py``."""

    M_TILE: int
    TILE: int
    COLUMNS: int
    GATED: bool
    NATIVE: bool
    PDL: bool


@triton.jit(do_not_specialize=["outputs", "count"])
def gemv_kernel(x, weight, scale, bias, out, outputs, inputs, count, SHAPE: tl.constexpr):
    """Program (tile): multiply COLUMNS columns of TILE rows at a time, as 32-bit words. SHAPE is a :class:`GemvShape`.

    As floats, each weight would take a register while it is being loaded. When compiled, the words are multiplied from
    the registers that the next words are loaded into; the other programs of the SM hide latency, and up to ten fit
    because they take few registers. ``inputs`` is a multiple of 16.
    """
    M_TILE: tl.constexpr = SHAPE.M_TILE
    TILE: tl.constexpr = SHAPE.TILE
    PER_WORD: tl.constexpr = 32 // weight.dtype.element_ty.primitive_bitwidth
    WORDS: tl.constexpr = SHAPE.COLUMNS // PER_WORD
    width = inputs // PER_WORD
    rows = weight_rows(outputs, TILE, SHAPE.GATED)
    i = tl.arange(0, WORDS)[None, None, :]
    base = weight.to(tl.pointer_type(tl.int32)) + rows[None, :, None] * width
    words = tl.load(base + i, mask=i < width, other=0, eviction_policy="evict_first")
    release_next_kernel(SHAPE.PDL)
    await_prior_kernel(SHAPE.PDL)
    total = tl.zeros([M_TILE, TILE, WORDS // 4], tl.float32)
    last = (width - 1) // WORDS * WORDS
    for start in range(0, last, WORDS):
        column = start + WORDS + i
        next_words = tl.load(base + column, mask=column < width, other=0, eviction_policy="evict_first")
        total += multiply_words(x, words, start, inputs, M_TILE, TILE, WORDS, PER_WORD == 4, SHAPE.NATIVE)
        words = next_words
    total += multiply_words(x, words, last, inputs, M_TILE, TILE, WORDS, PER_WORD == 4, SHAPE.NATIVE)
    write_outputs(tl.sum(total, axis=2), rows, None, scale, bias, out, outputs, count, M_TILE, TILE, SHAPE.GATED)


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """The launch configuration of :func:`gemv_kernel`."""

    tile: int  # outputs per program
    columns: int  # weight columns loaded at a time, at least 16 bytes per thread
    warps: int  # warps per program


MAX_ROWS = 2
"""The largest number of rows of x for which this is faster than tensor cores (benchmarks/data/h200/linear.json)."""
_FEW_OUTPUTS, _MANY_INPUTS = 24, 4096
"""The number of outputs per SM below which few programs run at a time, so that each loads more columns at once; and the
smallest number of columns for which that is possible."""


def choose_config(outputs: int, inputs: int, itemsize: int, num_sms: int) -> GemvConfig:
    """Choose the launch configuration for a GPU with ``num_sms`` SMs; each SM gets two programs if possible.

    The choice is close to the fastest: for 16-bit weights among the other kernels of a step
    (benchmarks/data/h200/exploration/shared_memory.txt), for FP8 by itself (benchmarks/data/h200/linear.json).
    """
    few = outputs < _FEW_OUTPUTS * num_sms and inputs >= _MANY_INPUTS
    return GemvConfig(row_tile(outputs, num_sms), 2048 if few or itemsize == 1 else 1024, 4)


def row_tile(outputs: int, num_sms: int) -> int:
    """Choose the outputs per program, at most 4, so that each SM gets two programs if possible."""
    tile = 4
    while tile > 1 and -(-outputs // tile) < 2 * num_sms:
        tile //= 2
    return tile


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Check whether :func:`linear` supports the operands, and is the fastest option."""
    supported = x.dtype in DTYPES and weight.dtype in (x.dtype, torch.float8_e4m3fn)
    return supported and match(x, weight, MAX_ROWS)


def match(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> bool:
    """Check whether the devices and shapes of operands suit the kernels of 1 to ``max_rows`` rows."""
    return (
        x.device.type == "cuda"
        and 0 < x.shape[0] <= max_rows
        and x.shape[1] == weight.shape[1]
        and weight.shape[1] % UNIT == 0
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """Compute ``x @ weight.T * scale + bias``, summed in float32 and rounded once.

    The weight is read early, so it must be complete before any kernel that may still be running when this one starts.

    Returns [rows, outputs], or half as many columns if gated, in the dtype of x. Nothing is checked: :func:`serves`
    must accept the operands.

    Args:
        x: contiguous [rows, inputs] of bfloat16 or float16; 1 or 2 rows.
        weight: contiguous [outputs, inputs] of the same dtype, or float8_e4m3fn with a scale; inputs are a multiple of
            16.
        scale: float32 [outputs].
        bias: [outputs].
        gated: the result is ``silu(first half of the outputs) * second half``; the outputs are an even number.
        config: the launch configuration; None for one that is known to be fast.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if config is None:
        config = choose_config(outputs, inputs, weight.element_size(), num_sms(x.device))
    tile = max(2, config.tile) if gated else config.tile
    out = x.new_empty(rows, outputs // 2 if gated else outputs)
    options = launch_options(x.device, config.warps)
    gemv_kernel[(-(-outputs // tile),)](
        x,
        weight,
        scale,
        bias,
        out,
        outputs,
        inputs,
        rows,
        GemvShape(rows, tile, config.columns, gated, has_float8_conversions(x.device), options["launch_pdl"]),
        **options,
    )
    return out
