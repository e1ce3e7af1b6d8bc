"""The parts of a multi-node operation in compiled host code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shotcast import wire
from shotcast.device.cpu.compilation import Arithmetic
from shotcast.device.cpu.reductions import PARTIAL_SUMS, ROUNDED_SUMS, SUMS
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.host_call import ChunkLimits, HostCall, check_sum, reductions
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


def whole_generation(plan: CallPlan, world_size: int, capacity: int) -> ChunkLimits:
    """Compute the limits of a step that stages one part."""
    return ChunkLimits(capacity, 512 << 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsCall(HostCall):
    """The implementation of an operation of CPU ranks on several nodes, in compiled code."""

    # `slots(nodes, slice_bytes)`: the number of float32 slices to allocate in addition to the sum of this node, for the
    # slices that arrive at once; a slice has `slice_bytes` in the dtype of the call
    slots: Callable[[int, int], int] = lambda nodes, slice_bytes: 0
