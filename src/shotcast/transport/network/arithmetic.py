"""The arithmetic of reductions of CPU ranks on several nodes."""

from __future__ import annotations

from shotcast import wire
from shotcast.device.cpu.compilation import Arithmetic
from shotcast.device.cpu.reductions import PARTIAL_SUMS, ROUNDED_SUMS, SUMS
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.host_call import check_sum, reductions
from shotcast.wire import CallPlan


def partial_sums(plan: CallPlan) -> dict[int, Arithmetic]:
    """Look up the arithmetic of sums over nodes, by word of the plan record.

    Raises UnsupportedError for a dtype without addition.
    """
    check_sum(plan, PARTIAL_SUMS)
    return {
        layout.PARTIAL: PARTIAL_SUMS[plan.dtype],
        layout.ADD_PARTIAL: SUMS["float32"],
        layout.ROUND: ROUNDED_SUMS[plan.dtype],
    }


def node_reductions(plan: CallPlan) -> dict[int, Arithmetic]:
    """Look up the arithmetic of sums over nodes in float32, or of a reduction in the dtype itself.

    Raises UnsupportedError for a dtype without that reduction.
    """
    if plan.reduction == "sum" and plan.dtype in PARTIAL_SUMS:
        return partial_sums(plan)
    (arithmetic,) = reductions(plan).values()
    return dict.fromkeys((layout.PARTIAL, layout.ADD_PARTIAL, layout.ROUND), arithmetic)


def partial_bytes(plan: CallPlan) -> int:
    """Return the bytes of an element as nodes exchange it; sums of floats are in float32."""
    return 4 if plan.reduction == "sum" and plan.dtype in PARTIAL_SUMS else wire.DTYPES[plan.dtype]
