"""The results of reductions, and of sums by the name of an algorithm, bit for bit, in plain torch on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from shotcast import wire
from shotcast.collectives.reference import ordered_sum, tree_sum
from shotcast.collectives.registry import registered
from shotcast.hardware.nodes import NodeLayout


def reduced(xs: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return the result of a reduction by native kernels, in rank order, for every dtype of ``wire.REDUCED``."""
    dtype = xs[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(reduced([torch.view_as_real(x) for x in xs], reduction))
    if not dtype.is_floating_point:
        return _reduced_integers(xs, reduction)
    if reduction in ("max", "min"):
        return functools.reduce(_larger if reduction == "max" else _smaller, xs)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    total = torch.full_like(xs[0], float(reduction == "prod"), dtype=wide)
    for x in xs:
        total = total * x.to(wide) if reduction == "prod" else total + x.to(wide)
    if reduction == "avg":
        total = total / torch.full_like(total, len(xs))
    return total.to(dtype)


def _larger(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the larger of two floats, +0.0 being larger than -0.0, or a NaN."""
    return torch.where((x == 0) & (y == 0), x + y, torch.maximum(x, y))


def _smaller(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -_larger(-x, -y)


_OF_INTEGERS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_OF_BOOL = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _reduced_integers(xs: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return a reduction of integers, modulo 2^bits, or of bool."""
    dtype = xs[0].dtype
    if dtype is torch.bool:
        reduction, xs = _OF_BOOL.get(reduction, reduction), [x.view(torch.uint8) != 0 for x in xs]
    elif dtype in _SIGNED:  # PyTorch computes little with these
        signed = _SIGNED[dtype]
        # the order of unsigned numbers is that of signed ones with the highest bit inverted
        flip = torch.iinfo(signed).min if reduction in ("max", "min") else 0
        return (_reduced_integers([x.view(signed) ^ flip for x in xs], reduction) ^ flip).view(dtype)
    return functools.reduce(_OF_INTEGERS[reduction], xs)


def ring_sum(xs: Sequence[torch.Tensor], owner: int) -> torch.Tensor:
    """Compute the slice of ``owner``: x_{owner+1} plus each next rank's slice, rounded to the dtype at each hop."""
    world_size = len(xs)
    total = ordered_sum([xs[(owner + 1) % world_size]])
    for step in range(2, world_size + 1):
        total = (total.float() + xs[(owner + step) % world_size].float()).to(total.dtype)
    return total


def through_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round float32 values [n] as FP8 transport does: to e4m3 with one scale per block."""
    rows = torch.nn.functional.pad(x, (0, -x.numel() % wire.FP8_BLOCK)).view(-1, wire.FP8_BLOCK)
    largest = rows.abs().amax(1, keepdim=True)
    size, limit = largest.clamp_min(2.0**-100), torch.full_like(largest, wire.FP8_LARGEST)
    scale = torch.where(largest.isfinite(), size / limit, torch.nan)
    return ((rows * (limit / size)).to(torch.float8_e4m3fn).float() * scale).view(-1)[: x.numel()]


def fp8_sum(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute a slice of ``two_shot_fp8``: quantized parts added in float32, in rank order, and quantized again."""
    total = torch.zeros_like(xs[0], dtype=torch.float32)
    for x in xs:
        total = total + through_fp8(x.float())
    return through_fp8(total).to(xs[0].dtype)


def rounded_nodes_sum(xs: Sequence[torch.Tensor], layout: NodeLayout) -> torch.Tensor:
    """Round each node's sum to the dtype, add them in the tree over nodes, and round once more."""
    sums = [ordered_sum([xs[rank] for rank in members]) for members in layout.members]
    return tree_sum(sums, NodeLayout.of_keys(layout.names))


def _by_slices(
    xs: Sequence[torch.Tensor], sum_of_slice: Callable[[Sequence[torch.Tensor], int], torch.Tensor]
) -> torch.Tensor:
    """Compute the all-reduce whose slice ``j`` is ``sum_of_slice(slices, j)``."""
    flat = [x.reshape(-1) for x in xs]
    item = flat[0].element_size()
    width = wire.slice_bytes(flat[0].numel() * item, len(xs)) // item
    slices = [[x[j * width : (j + 1) * width] for x in flat] for j in range(len(xs))]
    return torch.cat([sum_of_slice(part, j) for j, part in enumerate(slices)]).reshape(xs[0].shape)


def all_reduce(xs: Sequence[torch.Tensor], algorithm: str, layout: NodeLayout | None = None) -> torch.Tensor:
    """Return the all-reduce of every rank's tensor ``xs[r]`` by a built-in algorithm.

    Args:
        layout: the nodes of the ranks; None for one.
    """
    layout = layout or NodeLayout.one_node(len(xs))
    if algorithm == "ring":
        return _by_slices(xs, ring_sum)
    if algorithm == "two_shot_fp8":
        # on a CPU, where a division by a number is one
        return _by_slices([x.cpu() for x in xs], lambda part, _: fp8_sum(part)).to(xs[0].device)
    if algorithm == "nvrar_16bit":
        return rounded_nodes_sum(xs, layout)
    if not registered()[algorithm].in_contract(layout.shape):
        raise ValueError(f"sums of {algorithm} on {layout.shape} are not those of the numerics contract")
    return tree_sum(xs, layout)


def reduce_scatter(xs: Sequence[torch.Tensor], rank: int, algorithm: str) -> torch.Tensor:
    """Return rank ``rank``'s part of the reduce-scatter of [N * k, ...] tensors by a built-in algorithm."""
    parts = [x.chunk(len(xs))[rank] if x.shape[0] else x for x in xs]
    return ring_sum(parts, rank) if algorithm == "ring" else ordered_sum(parts)
