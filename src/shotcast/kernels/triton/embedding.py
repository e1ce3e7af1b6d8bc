"""Lookup of rows in a rank's shard of an embedding matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024
"""Elements of a row that a program copies."""


@triton.jit
def embed_kernel(tokens, weight, out, start, count, HIDDEN: tl.constexpr, TILE: tl.constexpr):
    """Program (token, tile): copy a tile of the token's row."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = i < HIDDEN
    row_index = tl.load(tokens + token) - start
    own = (row_index >= 0) & (row_index < count)
    row = tl.load(weight + tl.where(own, row_index, 0) * HIDDEN + i, mask=inside & own, other=0.0)
    tl.store(out + token * HIDDEN + i, row, mask=inside)


def embed(tokens: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
    """Look up ``tokens``, int64 [tokens], in ``weight`` [count, hidden], which holds rows ``start`` to ``start +
    count``.

    Returns [tokens, hidden], with zeros for tokens of other ranks.
    """
    count, hidden = weight.shape
    out = torch.empty(tokens.shape[0], hidden, dtype=weight.dtype, device=weight.device)
    embed_kernel[(tokens.shape[0], triton.cdiv(hidden, TILE))](
        tokens, weight, out, start, count, hidden, TILE, num_warps=4
    )
    return out
