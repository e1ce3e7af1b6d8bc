"""Overlap of communication and computation."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shotcast.overlap.chains import Chain as Chain
    from shotcast.overlap.chains import chain as chain
    from shotcast.overlap.controller import Controller as Controller
    from shotcast.overlap.lanes import Lanes as Lanes
    from shotcast.overlap.lanes import lanes_of as lanes_of
    from shotcast.overlap.linear import ColumnParallelLinear as ColumnParallelLinear
    from shotcast.overlap.linear import RowParallelLinear as RowParallelLinear
    from shotcast.overlap.policy import Decision as Decision
    from shotcast.overlap.schedule import Communicate as Communicate
    from shotcast.overlap.schedule import Compute as Compute
    from shotcast.overlap.schedule import Schedule as Schedule

_MODULES = {
    "Chain": "chains",
    "ColumnParallelLinear": "linear",
    "Communicate": "schedule",
    "Compute": "schedule",
    "Controller": "controller",
    "Decision": "policy",
    "Lanes": "lanes",
    "RowParallelLinear": "linear",
    "Schedule": "schedule",
    "chain": "chains",
    "lanes_of": "lanes",
}
"""Public names and their modules, imported on first use because most import torch."""
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shotcast.overlap.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
