"""The results of reductions, and of sums by the name of an algorithm, bit for bit, in plain torch on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from shotcast.collectives.algorithm import imported
from shotcast.collectives.registry import registered
from shotcast.hardware.nodes import NodeLayout
from shotcast.wire import Op


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


def all_reduce(xs: Sequence[torch.Tensor], algorithm: str, layout: NodeLayout | None = None) -> torch.Tensor:
    """Return the all-reduce of every rank's tensor ``xs[r]`` by a registered algorithm.

    Args:
        layout: the nodes of the ranks; None for one.
    """
    return _by_name(Op.ALL_REDUCE, algorithm)(xs, 0, layout or NodeLayout.one_node(len(xs)))


def reduce_scatter(xs: Sequence[torch.Tensor], rank: int, algorithm: str) -> torch.Tensor:
    """Return rank ``rank``'s part of the reduce-scatter of [N * k, ...] tensors by a registered algorithm."""
    return _by_name(Op.REDUCE_SCATTER, algorithm)(xs, rank, NodeLayout.one_node(len(xs)))


def _by_name(op: Op, algorithm: str) -> Callable[[Sequence[torch.Tensor], int, NodeLayout], torch.Tensor]:
    form = registered()[algorithm].forms[op]
    function: Callable[[Sequence[torch.Tensor], int, NodeLayout], torch.Tensor] = imported(form.reference)
    return function
