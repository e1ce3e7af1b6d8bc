"""Barrier: the header exchange that every call performs, and nothing else."""

from __future__ import annotations

import triton.language as tl

from shotcast.device.triton.intrinsics import kernel
from shotcast.transport.triton.binding import KernelContext, KernelLaunch
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


def bind(plan: CallPlan, context: KernelContext) -> KernelLaunch:
    """Return the launch of a barrier, or of the headers before a call of the vendor's library."""
    return context.launch(barrier, plan, programs=1, num_warps=1, tensors="none")
