"""Communication and computation at once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shotcast.overlap.chains import Chain, chain
    from shotcast.overlap.controller import Controller
    from shotcast.overlap.ddp import GradientBuckets, average_gradients
    from shotcast.overlap.gathered_products import GatheredProducts, all_gather_matmul
    from shotcast.overlap.lanes import Lanes, lanes_of
    from shotcast.overlap.linear import ColumnParallelLinear, RowParallelLinear
    from shotcast.overlap.policy import Decision
    from shotcast.overlap.schedule import Communicate, Compute, Schedule
    from shotcast.overlap.summed_products import explain_product, matmul_all_reduce, matmul_reduce_scatter

__all__ = [
    "Chain",
    "ColumnParallelLinear",
    "Communicate",
    "Compute",
    "Controller",
    "Decision",
    "GatheredProducts",
    "GradientBuckets",
    "Lanes",
    "RowParallelLinear",
    "Schedule",
    "all_gather_matmul",
    "average_gradients",
    "chain",
    "explain_product",
    "lanes_of",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]

_MODULES = {
    "Chain": "chains",
    "ColumnParallelLinear": "linear",
    "Communicate": "schedule",
    "Compute": "schedule",
    "Controller": "controller",
    "Decision": "policy",
    "GatheredProducts": "gathered_products",
    "GradientBuckets": "ddp",
    "Lanes": "lanes",
    "RowParallelLinear": "linear",
    "Schedule": "schedule",
    "all_gather_matmul": "gathered_products",
    "average_gradients": "ddp",
    "chain": "chains",
    "explain_product": "summed_products",
    "lanes_of": "lanes",
    "matmul_all_reduce": "summed_products",
    "matmul_reduce_scatter": "summed_products",
}
"""Public names and their modules, most of which import torch. They are imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shotcast.overlap.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
