"""Communication and computation at once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shotcast.overlap.chains import Chain, chain
    from shotcast.overlap.controller import Controller
    from shotcast.overlap.ddp import GradientBuckets, average_gradients
    from shotcast.overlap.lanes import Lanes, lanes_of
    from shotcast.overlap.linear import ColumnParallelLinear, RowParallelLinear
    from shotcast.overlap.policy import Decision
    from shotcast.overlap.schedule import Communicate, Compute, Schedule

__all__ = [
    "Chain",
    "ColumnParallelLinear",
    "Communicate",
    "Compute",
    "Controller",
    "Decision",
    "GradientBuckets",
    "Lanes",
    "RowParallelLinear",
    "Schedule",
    "average_gradients",
    "chain",
    "lanes_of",
]

_MODULES = {
    "Chain": "chains",
    "ColumnParallelLinear": "linear",
    "Communicate": "schedule",
    "Compute": "schedule",
    "Controller": "controller",
    "Decision": "policy",
    "GradientBuckets": "ddp",
    "Lanes": "lanes",
    "RowParallelLinear": "linear",
    "Schedule": "schedule",
    "average_gradients": "ddp",
    "chain": "chains",
    "lanes_of": "lanes",
}
"""Public names and their modules, most of which import torch. They are imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shotcast.overlap.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
