"""The route of each process group call: its communicator, or the inner Gloo or NCCL group."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shotcast import wire
from shotcast.collectives.reductions import check_reduction, is_divided
from shotcast.errors import ConfigError, UnsupportedError

OWN, LIBRARY, INNER = "own", "library", "inner"
"""The routes: the communicator's native kernels, the vendor library under the communicator, or the inner group."""

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
"""Operations that have a reduction."""
MOVING = ("broadcast", "all_gather", "all_to_all", "gather", "scatter", "barrier")
"""Operations that move bytes."""
MESSAGES = ("send", "recv", "recv_anysource")
"""Operations between two ranks."""


def is_scaled(dtype: torch.dtype) -> bool:
    """Return whether PREMUL_SUM is defined for a dtype: factors are seldom integers."""
    return dtype.is_floating_point or dtype.is_complex


class Route(NamedTuple):
    """The route of a call."""

    name: str  # `own`, `library` or `inner`
    reason: str = ""  # why that is so; empty for `own` before the communicator exists
    algorithm: str = ""  # of the communicator, once it exists

    @property
    def is_own(self) -> bool:
        return self.name == OWN


_OWN = Route(OWN)
_KNOWN = dict.fromkeys((*REDUCING, *MOVING, *MESSAGES))


def route_of(op: str, dtype: torch.dtype, reduction: str = "sum", layout: torch.layout = torch.strided) -> Route:
    """Return the route of a call, given its operation, the dtype and layout of its tensors, and its reduction.

    Raises ConfigError if there is no such operation.
    """
    if op not in _KNOWN:
        op = op.removesuffix("_coalesced")
        if op not in _KNOWN:
            known = ", ".join(_KNOWN)
            raise ConfigError(f"a process group has no operation {op!r}; there are {known}, and coalesced forms")
    if op in MESSAGES:
        return Route(INNER, "messages have tags, and any rank as their source")
    if layout is not torch.strided:
        return Route(INNER, "the tensors are sparse")
    if op in MOVING:
        return _OWN
    name = str(dtype).removeprefix("torch.")
    if name not in wire.REDUCED:
        return Route(INNER, f"no native kernel adds up {name}")
    try:
        check_reduction(name, reduction)
    except UnsupportedError as error:
        return Route(INNER, str(error))
    if reduction not in wire.REDUCED[name] and not is_divided(name, reduction):
        return Route(INNER, f"no native kernel has {reduction} of {name}")
    return _OWN
