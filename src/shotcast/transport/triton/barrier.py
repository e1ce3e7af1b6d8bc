"""The header exchange of every call as a kernel: as a barrier, or as the gate of another call.

A *gate* is one program of one warp that waits, in place of a call's whole grid, until every rank has reached the call.
A waiting grid holds SMs that others need: a GEMM on another stream, a call of another communicator, a message of NCCL,
and maybe what the late rank waits for. The calls of a communicator that is not *exclusive* are therefore launched
behind a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from shotcast.device.triton.intrinsics import kernel
from shotcast.device.triton.launch import Launch
from shotcast.transport.triton.binding import COMPILE_OPTIONS, KernelContext, KernelLaunch
from shotcast.transport.triton.sync import EntryWithPuts, enter, exchange_headers
from shotcast.wire import CallPlan


@dataclass(frozen=True, slots=True)
class MeetingShape:
    """The argument SHAPE of a kernel that only exchanges headers."""

    PUTS: bool
    WORLD: int
    WARPS: int
    PDL: bool


@kernel(shape=MeetingShape)
def barrier(entry: EntryWithPuts, SHAPE: tl.constexpr):
    """Wait until every rank has begun this call."""
    call = enter(entry, SHAPE.WARPS, SHAPE.PDL)
    exchange_headers(call, call.rank * 0, False, SHAPE.WORLD, SHAPE.WARPS, SHAPE.PDL, entry.puts, SHAPE.PUTS)


@kernel(shape=MeetingShape)
def gate(entry: EntryWithPuts, SHAPE: tl.constexpr):
    """Wait until every rank has begun the call whose kernel comes next."""
    call = enter(entry, SHAPE.WARPS, SHAPE.PDL)
    exchange_headers(call, call.rank * 0, False, SHAPE.WORLD, SHAPE.WARPS, SHAPE.PDL, entry.puts, SHAPE.PUTS, True)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of a barrier, or of the header exchange before a call of the vendor's library."""
    return context.launch(barrier, plan, programs=1, num_warps=1, tensors="none")


GATE_REGISTERS = 32
"""The number of registers of a gate thread, which needs no more.

Fewer would not help: the largest cuBLAS blocks for Hopper start next to no waiting warp (docs/design/progress.md).
"""


def gate_of(launch: Launch) -> Launch | None:
    """Return the gate to launch before a kernel, or None if its grid is one program, such as a barrier's."""
    if launch.programs <= 1:
        return None
    entry, shape = launch.arguments["entry"], launch.arguments["SHAPE"]
    arguments = {
        "entry": EntryWithPuts(**{"puts": entry.own} | entry._asdict()),
        "SHAPE": MeetingShape(getattr(shape, "PUTS", False), shape.WORLD, 1, getattr(shape, "PDL", False)),
    }
    kept = ("launch_pdl", "extern_libs", *COMPILE_OPTIONS)
    options = {name: launch.options[name] for name in kept if name in launch.options}
    options |= {"num_warps": 1, "maxnreg": GATE_REGISTERS}
    return Launch(gate, 1, arguments, (), options, padding_bytes=0)
