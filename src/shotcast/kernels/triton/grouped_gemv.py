"""Matmuls of one row with a weight in groups of inputs that share a scale: each weight is read once.

It is :mod:`shotcast.kernels.triton.gemv` for 4-bit codes or FP8 with one scale per group. A thread holds four words of
a row, which lie in one group or slices of it, and multiplies their sum by the scale of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import (
    await_prior_kernel,
    has_float8_conversions,
    launch_options,
    num_sms,
    release_next_kernel,
)
from shotcast.kernels.triton.gemv import multiply_words, row_tile, weight_rows, write_outputs
from shotcast.kernels.triton.grouped import BLOCK, SLICE, load_scales, multiply_codes, step_columns


@dataclass(frozen=True, slots=True)
class GroupedGemvShape:
    """The SHAPE argument of :func:`grouped_gemv_kernel`.

    WORDS: the words of a row loaded at a time. GROUP: the columns that share a scale; STEP: the columns of a block that
    share one. NATIVE: as in ``device/triton/float8.py``.
    """

    TILE: int
    WORDS: int
    GROUP: int
    STEP: int
    GATED: bool
    NATIVE: bool
    PDL: bool


@triton.jit
def _multiply(x, words, scales, zeros, rows, start, outputs, inputs, SHAPE: tl.constexpr):
    """Compute sums over four words: float32 [1, TILE, WORDS / 4]."""
    TILE: tl.constexpr = SHAPE.TILE
    WORDS: tl.constexpr = SHAPE.WORDS
    GROUP: tl.constexpr = SHAPE.GROUP
    STEP: tl.constexpr = SHAPE.STEP
    NATIVE: tl.constexpr = SHAPE.NATIVE
    if zeros is not None:
        sums = multiply_codes(x, words, scales, zeros, rows, start, outputs, inputs, TILE, WORDS, GROUP, STEP)
    else:
        group = (start * 4 + 16 * tl.arange(0, WORDS // 4)) // GROUP
        scale, _ = load_scales(scales, None, rows[:, None], group[None, :], outputs, inputs, GROUP)
        sums = multiply_words(x, words, start, inputs, 1, TILE, WORDS, True, NATIVE) * scale[None, :, :]
    return sums


@triton.jit(do_not_specialize=["outputs"])
def grouped_gemv_kernel(x, weight, scales, zeros, bias, out, outputs, inputs, SHAPE: tl.constexpr):
    """Program (tile): multiply WORDS words of TILE rows at a time. SHAPE is a :class:`GroupedGemvShape`.

    ``zeros`` is None for FP8. The next words are loaded while the current ones are multiplied, as in ``gemv.py``.
    """
    TILE: tl.constexpr = SHAPE.TILE
    WORDS: tl.constexpr = SHAPE.WORDS
    width = tl.cdiv(inputs, BLOCK) * SLICE if zeros is not None else inputs // 4
    rows = weight_rows(outputs, TILE, SHAPE.GATED)
    i = tl.arange(0, WORDS)[None, None, :]
    base = weight.to(tl.pointer_type(tl.int32)) + rows[None, :, None] * width
    words = tl.load(base + i, mask=i < width, other=0, eviction_policy="evict_first")
    release_next_kernel(SHAPE.PDL)
    await_prior_kernel(SHAPE.PDL)
    total = tl.zeros([1, TILE, WORDS // 4], tl.float32)
    last = (width - 1) // WORDS * WORDS
    for start in range(0, last, WORDS):
        column = start + WORDS + i
        next_words = tl.load(base + column, mask=column < width, other=0, eviction_policy="evict_first")
        total += _multiply(x, words, scales, zeros, rows, start, outputs, inputs, SHAPE)
        words = next_words
    total += _multiply(x, words, scales, zeros, rows, last, outputs, inputs, SHAPE)
    write_outputs(tl.sum(total, axis=2), rows, None, None, bias, out, outputs, 1, 1, TILE, SHAPE.GATED)


@dataclass(frozen=True, slots=True)
class GroupedGemvConfig:
    """The launch configuration of :func:`grouped_gemv_kernel`."""

    tile: int  # outputs per program
    words: int  # words of a row loaded at a time, at least 16 bytes per thread
    warps: int  # warps per program


def choose_config(outputs: int, num_sms: int) -> GroupedGemvConfig:
    """Choose the launch configuration for a GPU with ``num_sms`` SMs; each SM gets two programs if possible."""
    return GroupedGemvConfig(row_tile(outputs, num_sms), 256, 2)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    config: GroupedGemvConfig | None = None,
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` with a weight in groups, for one row of x.

    Args:
        weight, scales, zeros, group: as in :class:`~shotcast.layers.quantized.GroupedRows`, complete before any kernel
            that may still be running when this one starts. x is bfloat16 or float16. The other arguments and the result
            are those of :func:`shotcast.kernels.triton.gemv.linear`.
    """
    outputs, inputs = weight.shape[0], x.shape[1]
    if config is None:
        config = choose_config(outputs, num_sms(x.device))
    tile = max(2, config.tile) if gated else config.tile
    out = x.new_empty(1, outputs // 2 if gated else outputs)
    options = launch_options(x.device, config.warps)
    shape = GroupedGemvShape(
        TILE=tile,
        WORDS=config.words,
        GROUP=group,
        STEP=step_columns(group),
        GATED=gated,
        NATIVE=zeros is None and has_float8_conversions(x.device),
        PDL=options["launch_pdl"],
    )
    grouped_gemv_kernel[(-(-outputs // tile),)](x, weight, scales, zeros, bias, out, outputs, inputs, shape, **options)
    return out
