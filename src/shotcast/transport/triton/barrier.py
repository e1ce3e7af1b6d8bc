"""The header exchange that every call performs, and nothing else: as a barrier, and as the gate of another call.

A *gate* is one program of one warp that waits, in place of a call's whole grid, until every rank has come to the call.
The grid is launched behind it, so a rank that is late costs this GPU a warp.
"""

from __future__ import annotations

import triton.language as tl

from shotcast.device.triton.intrinsics import kernel
from shotcast.device.triton.launch import Launch
from shotcast.transport.triton.binding import COMPILE_OPTIONS, KernelContext, KernelLaunch
from shotcast.transport.triton.sync import enter, exchange_headers
from shotcast.wire import CallPlan


@kernel
def barrier(
    own,
    peers,
    puts,
    rank,
    header_size,
    header_call,
    PUTS: tl.constexpr,
    WORLD: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return once every rank has begun this call."""
    call = enter(own, peers, rank, header_size, header_call, WARPS, PDL)
    exchange_headers(call, call.rank * 0, False, WORLD, WARPS, PDL, puts, PUTS)


@kernel
def gate(
    own,
    peers,
    puts,
    rank,
    header_size,
    header_call,
    PUTS: tl.constexpr,
    WORLD: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return once every rank has begun the call whose kernel comes next."""
    call = enter(own, peers, rank, header_size, header_call, WARPS, PDL)
    exchange_headers(call, call.rank * 0, False, WORLD, WARPS, PDL, puts, PUTS, True)


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of a barrier, or of the headers before a call of the vendor's library."""
    return context.launch(barrier, plan, programs=1, num_warps=1, tensors="none")


GATE_REGISTERS = 32
"""Registers of a thread of a gate, which needs no more.

A block of another kernel fits beside a gate where it leaves 1,024 registers of a quarter of the SM. The largest of
cuBLAS for Hopper leaves 256, so a gate takes an SM from it (docs/design/progress.md).
"""


def gate_before(launch: Launch) -> Launch:
    """Return the gate of a call, whose kernel ``launch`` follows on the same stream."""
    given = launch.arguments
    names = ("own", "peers", "rank", "header_size", "header_call", "WORLD")
    arguments = {name: given[name] for name in names} | {"WARPS": 1, "PDL": given.get("PDL", False)}
    arguments |= {"puts": given.get("puts", given["own"]), "PUTS": given.get("PUTS", False)}
    kept = ("launch_pdl", "extern_libs", *COMPILE_OPTIONS)
    options = {name: launch.options[name] for name in kept if name in launch.options}
    options |= {"num_warps": 1, "maxnreg": GATE_REGISTERS}
    return Launch(gate, 1, arguments, (), options, padding_bytes=0)
