"""Communication and computation at once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shotcast.overlap.chains import Chain as Chain
    from shotcast.overlap.chains import chain as chain
    from shotcast.overlap.controller import Controller as Controller
    from shotcast.overlap.ddp import GradientBuckets as GradientBuckets
    from shotcast.overlap.ddp import average_gradients as average_gradients
    from shotcast.overlap.gathered_products import GatheredProducts as GatheredProducts
    from shotcast.overlap.gathered_products import all_gather_matmul as all_gather_matmul
    from shotcast.overlap.lanes import Lanes as Lanes
    from shotcast.overlap.lanes import lanes_of as lanes_of
    from shotcast.overlap.linear import ColumnParallelLinear as ColumnParallelLinear
    from shotcast.overlap.linear import RowParallelLinear as RowParallelLinear
    from shotcast.overlap.policy import Decision as Decision
    from shotcast.overlap.schedule import Communicate as Communicate
    from shotcast.overlap.schedule import Compute as Compute
    from shotcast.overlap.schedule import Schedule as Schedule
    from shotcast.overlap.summed_products import explain_product as explain_product
    from shotcast.overlap.summed_products import matmul_all_reduce as matmul_all_reduce
    from shotcast.overlap.summed_products import matmul_reduce_scatter as matmul_reduce_scatter

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
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shotcast.overlap.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
