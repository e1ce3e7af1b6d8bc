"""The parts of an operation in compiled host code: schedule, arithmetic and the size of pipeline steps."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from shotcast.device.cpu.compilation import Arithmetic, CompiledSchedule
from shotcast.device.cpu.reductions import REDUCTIONS, SUMS
from shotcast.errors import UnsupportedError
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.norm import arithmetic_of
from shotcast.wire import CallPlan

LINE_BYTES = 64


class ChunkLimits(NamedTuple):
    """Bytes of a pipeline step: the maximum, the default, and the multiple to which they are rounded down."""

    most: int
    default: int
    multiple: int = LINE_BYTES


def one_generation(plan: CallPlan, world_size: int, capacity: int) -> ChunkLimits:
    """Compute the limits of schedules in which a rank stages its part only; ``capacity`` is a generation's bytes."""
    return ChunkLimits(capacity, 256 << 10)


def for_all_ranks(plan: CallPlan, world_size: int, capacity: int) -> ChunkLimits:
    """Compute the limits of schedules that stage a part for each rank."""
    return ChunkLimits(capacity // world_size, (512 << 10) // world_size)


def check_sum(plan: CallPlan, served: Container[str]) -> None:
    """Raise UnsupportedError unless ``plan`` is a sum in one of the ``served`` dtypes."""
    if plan.dtype not in served or plan.reduction != "sum":
        what = f"{plan.algorithm} {plan.op.label} ({plan.reduction}) of {plan.dtype}"
        raise UnsupportedError(f"compiled CPU ranks have no {what}")


def sums(plan: CallPlan) -> dict[int, Arithmetic]:
    """Look up the plan's addition, by word of the plan record. Raises UnsupportedError if there is none."""
    check_sum(plan, SUMS)
    return {layout.ARITHMETIC: SUMS[plan.dtype]}


def reductions(plan: CallPlan) -> dict[int, Arithmetic]:
    """Look up the plan's reduction, by word of the plan record. Raises UnsupportedError if there is none."""
    found = REDUCTIONS.get((plan.dtype, plan.reduction))
    if found is None:
        raise UnsupportedError(f"compiled CPU ranks have no {plan.op.label} ({plan.reduction}) of {plan.dtype}")
    return {layout.ARITHMETIC: found}


def sums_and_norms(plan: CallPlan) -> dict[int, Arithmetic]:
    """Return the addition of the plan's dtype, and the arithmetic of its norm, by word of the plan record."""
    summed = sums(plan)
    assert plan.norm is not None
    add, norm = arithmetic_of(plan.dtype, plan.norm)
    return summed | {layout.ADD: add, layout.NORM: norm}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """The implementation of an operation in compiled host code."""

    schedule: CompiledSchedule  # the compiled function
    # `chunk(plan, world_size, capacity)`, the limits of a pipeline step
    chunk: Callable[[CallPlan, int, int], ChunkLimits] = one_generation
    # `arithmetic(plan)`, the functions that the schedule calls, by word of the plan record
    arithmetic: Callable[[CallPlan], dict[int, Arithmetic]] = lambda plan: {}
    norms: bool = False  # rows are normalized after the sum, so calls pass the tensors of the norm
    alone: HostCall | None = None  # the call for a single rank, if the schedule needs two
    header_only: bool = False  # no data is moved, only the header
    # `slots(nodes, slice_bytes)`, on several nodes: the number of float32 slices to allocate in addition to the sum of
    # this node, for the slices that arrive at once; a slice has `slice_bytes` in the dtype of the call
    slots: Callable[[int, int], int] = lambda nodes, slice_bytes: 0
