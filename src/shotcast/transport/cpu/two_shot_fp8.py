"""Two-shot all-reduce whose messages travel in FP8: half the bytes of 16-bit floats, a quarter of float32.

Here for its bits, which are those of ``transport/triton/two_shot_fp8.py``: between processes of one machine bytes cost
less than this arithmetic, and two-shot is faster. Slices are those of the whole message, each cut into blocks of its
own (:mod:`shotcast.transport.cpu.fp8_blocks`), so bits do not depend on the pipeline's pieces. Every rank's values are
quantised, its own too, added in rank order, quantised again; and every rank, the owner too, keeps what that becomes.
"""

from __future__ import annotations

from numba import njit

from shotcast import wire
from shotcast.device.cpu.atomics import call_arithmetic, load, store
from shotcast.device.cpu.compilation import Arithmetic, Schedule
from shotcast.transport.cpu import fp8_blocks
from shotcast.transport.cpu.fp8_blocks import encoded_bytes
from shotcast.transport.cpu.host_call import ChunkLimits, HostCall, check_dtype
from shotcast.transport.cpu.layout import (
    ARITHMETIC,
    CHUNK,
    CONTROL_BYTES,
    DECODE,
    ENCODE,
    GENERATION,
    HEADER,
    ITEMSIZE,
    NBYTES,
    RANK,
    SOURCES,
    STEP,
    WORLD,
)
from shotcast.transport.cpu.slices import slice_size
from shotcast.transport.cpu.waiting import ABORTED, DONE, begin, finish, meet_all, publish, region
from shotcast.wire import CallPlan


@njit(error_model="numpy")
def _length(nbytes: int, part: int, sliced: int, done: int, piece: int) -> int:
    """Bytes of slice ``sliced`` in a piece that begins ``done`` bytes into every slice."""
    begins = sliced * part + done
    return max(0, min(min(piece, part - done), nbytes - begins))


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = about x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same. CHUNK: bytes of a piece.

    A generation holds this rank's sums of the previous piece of its slice, then its values of this piece of all slices.
    """
    word = begin(context, load(plan + HEADER))
    if word == 0:
        return ABORTED
    rank, world_size, step = load(context + RANK), load(context + WORLD), load(context + STEP)
    nbytes, piece, itemsize = load(plan + NBYTES), load(plan + CHUNK), load(plan + ITEMSIZE)
    generation_bytes = load(context + GENERATION)
    part = slice_size(nbytes, world_size)
    room = encoded_bytes(piece // itemsize)
    own = region(context, rank)
    done = 0
    while True:
        staging = CONTROL_BYTES + (step & 1) * generation_bytes
        for sliced in range(world_size):
            length = _length(nbytes, part, sliced, done, piece)
            if length > 0:
                place = own + staging + room * (1 + sliced)
                call_arithmetic(load(plan + ENCODE), place, x + sliced * part + done, length // itemsize, 0)
        step = publish(context, step)
        status = meet_all(context, step, word)
        if status != DONE:
            return status

        length = _length(nbytes, part, rank, done, piece)
        if length > 0:
            for peer in range(world_size):
                store(context + SOURCES + 8 * peer, region(context, peer) + staging + room * (1 + rank))
            # Every peer has published this step, hence read the other generation: it may be written already.
            result = own + CONTROL_BYTES + (step & 1) * generation_bytes
            call_arithmetic(load(plan + ARITHMETIC), result, context + SOURCES, world_size, length // itemsize)

        if done > 0:
            for sliced in range(world_size):
                length = _length(nbytes, part, sliced, done - piece, piece)
                if length > 0:
                    place = out + sliced * part + done - piece
                    call_arithmetic(
                        load(plan + DECODE), place, region(context, sliced) + staging, length // itemsize, 0
                    )
        if done >= part:
            return finish(context, step)
        done += piece


def chunk_limits(plan: CallPlan, world_size: int, room: int) -> ChunkLimits:
    """Return the limits of a piece of a slice: blocks of this piece of all slices, and of the sums of one."""
    block = wire.FP8_BLOCK * wire.DTYPES[plan.dtype]
    most = room // ((world_size + 1) * fp8_blocks.BLOCK_BYTES) * block
    return ChunkLimits(most, (256 << 10) // world_size, block)


def arithmetic(plan: CallPlan) -> dict[int, Arithmetic]:
    """Return the sum of blocks, and what makes blocks and values of the plan's dtype."""
    check_dtype(plan, fp8_blocks.ENCODE)
    return {
        ARITHMETIC: fp8_blocks.SUM,
        ENCODE: fp8_blocks.ENCODE[plan.dtype],
        DECODE: fp8_blocks.DECODE[plan.dtype],
    }


ALL_REDUCE = HostCall(schedule=Schedule(all_reduce), chunk=chunk_limits, arithmetic=arithmetic)
