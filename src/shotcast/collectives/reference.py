"""What the own algorithms compute, bit for bit, in plain torch on one process: what tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shotcast import wire


def ordered_sum(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """((+0.0 + x_0) + x_1) + ... in float32, rounded once to the dtype: one-shot and two-shot."""
    total = torch.zeros_like(xs[0], dtype=torch.float32)
    for x in xs:
        total = total + x.float()
    return total.to(xs[0].dtype)


def ring_sum(xs: Sequence[torch.Tensor], owner: int) -> torch.Tensor:
    """A slice that ends at ``owner``: x_{owner+1}, then each next rank's added, rounded to the dtype at each hop."""
    world_size = len(xs)
    total = ordered_sum([xs[(owner + 1) % world_size]])
    for step in range(2, world_size + 1):
        total = (total.float() + xs[(owner + step) % world_size].float()).to(total.dtype)
    return total


def all_reduce(xs: Sequence[torch.Tensor], algorithm: str) -> torch.Tensor:
    """The all-reduce of every rank's tensor ``xs[r]`` by ``one_shot``, ``two_shot`` or ``ring``."""
    if algorithm != "ring":
        return ordered_sum(xs)
    flat = [x.reshape(-1) for x in xs]
    item = flat[0].element_size()
    width = wire.slice_bytes(flat[0].numel() * item, len(xs)) // item
    parts = [ring_sum([x[j * width : (j + 1) * width] for x in flat], j) for j in range(len(xs))]
    return torch.cat(parts).reshape(xs[0].shape)


def reduce_scatter(xs: Sequence[torch.Tensor], rank: int, algorithm: str) -> torch.Tensor:
    """Rank ``rank``'s part of the reduce-scatter of [N * k, ...] tensors by ``one_shot`` or ``ring``."""
    parts = [x.chunk(len(xs))[rank] if x.shape[0] else x for x in xs]
    return ring_sum(parts, rank) if algorithm == "ring" else ordered_sum(parts)
