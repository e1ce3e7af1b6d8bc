"""Assembly of rows of logits from the ranks' columns, with the largest logit of each row.

One kernel concatenates the columns of all ranks as float32 and finds the largest logit of each tile; a second kernel
finds the largest over the tiles. Greedy decoding therefore needs no further pass over the logits and no further kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from shotcast.kernels.triton.activations import tanh

TILE = 1024
"""Columns per program."""


@triton.jit
def concat_kernel(parts, starts, values, largest, tokens, rows, vocab, cap, TILE: tl.constexpr):
    """Program (row, rank, tile): copy the tile, soft-capped unless ``cap`` is None, and store its largest value and
    that value's token.

    NaN counts as infinity, so a row that holds either has an infinite largest value.
    """
    row = tl.program_id(0).to(tl.int64)
    rank, tile = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + rank)
    width = tl.load(starts + rank + 1) - start
    i = tile * TILE + tl.arange(0, TILE)
    inside = i < width
    source = parts + start.to(tl.int64) * rows + row * width
    value = tl.load(source + i, mask=inside, other=float("-inf")).to(tl.float32)
    if cap is not None:
        value = tl.where(inside, cap * tanh(value / cap), value)
    tl.store(values + row * vocab + start + i, value, mask=inside)
    order = tl.where(value != value, float("inf"), value)
    value_max, column = tl.max(order, axis=0, return_indices=True)
    # tiles are in the order of their tokens; an empty tile is minus infinity, and no earlier tile is less
    index = (row * tl.num_programs(1) + rank) * tl.num_programs(2) + tile
    tl.store(largest + index, value_max)
    tl.store(tokens + index, start + tile * TILE + column)


@triton.jit
def argmax_kernel(largest, tokens, best, count, COUNT: tl.constexpr):
    """Program (row): find the largest value of its tiles; the first one wins a tie."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, COUNT)
    order = tl.load(largest + row * count + tile, mask=tile < count, other=float("-inf"))
    value_max, column = tl.max(order, axis=0, return_indices=True)
    token = tl.load(tokens + row * count + column)
    tl.store(best + row * 2, token.to(tl.int64))
    tl.store(best + row * 2 + 1, ((value_max < float("inf")) & (value_max > float("-inf"))).to(tl.int64))


def concat_columns(
    parts: torch.Tensor,
    widths: Sequence[int],
    starts: torch.Tensor,
    values: torch.Tensor,
    best: torch.Tensor,
    cap: float = 0.0,
) -> None:
    """Fill ``values`` and ``best`` from the ranks' columns.

    Args:
        parts: [rows, widths[rank]] of each rank, concatenated, in a floating-point dtype.
        widths: the number of columns of each rank.
        starts: int32 [ranks + 1], the first column of each rank, then the total number of columns.
        values: float32 [rows, sum(widths)], output.
        best: int64 [rows, 2], output: the token of the largest logit (the lowest token on a tie), and 1 if all logits
            of the row are numbers (at least one above minus infinity, none NaN or plus infinity), else 0.
        cap: the soft cap; values x become ``cap * tanh(x / cap)``, or stay unchanged if it is 0.
    """
    rows, vocab = values.shape
    tiles = triton.cdiv(max(widths), TILE)
    count = len(widths) * tiles
    largest = torch.empty(rows * count, dtype=torch.float32, device=values.device)
    tokens = torch.empty(rows * count, dtype=torch.int32, device=values.device)
    concat_kernel[(rows, len(widths), tiles)](
        parts, starts, values, largest, tokens, rows, vocab, cap or None, TILE, num_warps=4
    )
    argmax_kernel[(rows,)](largest, tokens, best, count, triton.next_power_of_2(count), num_warps=4)
