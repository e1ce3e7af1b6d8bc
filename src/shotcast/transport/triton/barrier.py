"""Barrier: the header exchange that every call performs, and nothing else."""

from __future__ import annotations

import triton.language as tl

from shotcast.device.triton.intrinsics import kernel
from shotcast.transport.triton.sync import enter, exchange_headers


@kernel
def barrier(own, peers, rank, header, WORLD: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr):
    """Return once every rank has begun this call."""
    call = enter(own, peers, rank, header, WARPS, PDL)
    exchange_headers(call, call.rank * 0, False, WORLD, WARPS, PDL)
