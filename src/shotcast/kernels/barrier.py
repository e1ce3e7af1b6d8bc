"""Barrier: the header exchange that every call makes, and nothing beside it."""

from __future__ import annotations

import triton.language as tl

from shotcast.kernels.sync import enter, exchange_headers, leave_epoch
from shotcast.kernels.target import kernel, release_next_kernel


@kernel
def barrier(own, peers, rank, header, WORLD: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr):
    call = enter(own, peers, rank, header, WARPS, PDL)
    leave_epoch(call, call.rank * 0, False)
    release_next_kernel(PDL)
    exchange_headers(call, WORLD, WARPS)
