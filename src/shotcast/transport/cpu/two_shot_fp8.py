"""Two-shot all-reduce whose messages travel in FP8: half the bytes of 16-bit floats, a quarter of float32.

It exists to reproduce the bits of ``transport/triton/two_shot_fp8.py``. Between processes of one machine, bytes cost
less than this arithmetic, and two-shot is faster.

Slices divide the whole message. Each slice is divided into blocks separately
(:mod:`shotcast.transport.cpu.fp8_blocks`), so the bits do not depend on the pieces of the pipeline. The values of every
rank, including this one, are quantized, added in rank order, and quantized again. Every rank, including the owner,
keeps the dequantized sum.
"""

from __future__ import annotations

from shotcast import wire
from shotcast.device.cpu.atomics import call_arithmetic, load, store
from shotcast.device.cpu.compilation import Arithmetic, CompiledSchedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu import fp8_blocks
from shotcast.transport.cpu.fp8_blocks import encoded_bytes
from shotcast.transport.cpu.host_call import ChunkLimits, HostCall, check_sum
from shotcast.transport.cpu.layout import ARITHMETIC, DECODE, ENCODE, SOURCES
from shotcast.transport.cpu.staging import generation, sizes, slice_size
from shotcast.transport.cpu.waiting import ABORTED, DONE, await_all, begin, finish, publish, region
from shotcast.wire import CallPlan


@njit(error_model="numpy")
def _piece_bytes(nbytes: int, part: int, index: int, done: int, piece: int) -> int:
    """Compute the bytes of slice ``index`` in a piece that begins ``done`` bytes into every slice."""
    start = index * part + done
    return max(0, min(min(piece, part - done), nbytes - start))


def all_reduce(context: int, plan: int, x: int, out: int) -> int:
    """out = about x_0 + ... + x_{N-1} on every rank. x, out: nbytes; they may be the same. CHUNK: bytes of a piece.

    A generation holds this rank's sums of the previous piece of its slice, then its values of this piece of all slices.
    """
    word, rank, world_size, step = begin(context, plan)
    if word == 0:
        return ABORTED
    nbytes, piece, itemsize = sizes(plan)
    part = slice_size(nbytes, world_size)
    capacity = encoded_bytes(piece // itemsize)
    own = region(context, rank)
    done = 0
    while True:
        staging = generation(context, step)
        for index in range(world_size):
            length = _piece_bytes(nbytes, part, index, done, piece)
            if length > 0:
                target = own + staging + capacity * (1 + index)
                call_arithmetic(load(plan + ENCODE), target, x + index * part + done, length // itemsize, 0)
        step = publish(context, step)
        status = await_all(context, step, word)
        if status != DONE:
            return status

        length = _piece_bytes(nbytes, part, rank, done, piece)
        if length > 0:
            for peer in range(world_size):
                store(context + SOURCES + 8 * peer, region(context, peer) + staging + capacity * (1 + rank))
            # Every peer has published this step, so it has read the other generation, which may be written now.
            result = own + generation(context, step)
            call_arithmetic(load(plan + ARITHMETIC), result, context + SOURCES, world_size, length // itemsize)

        if done > 0:
            for index in range(world_size):
                length = _piece_bytes(nbytes, part, index, done - piece, piece)
                if length > 0:
                    target = out + index * part + done - piece
                    call_arithmetic(
                        load(plan + DECODE), target, region(context, index) + staging, length // itemsize, 0
                    )
        if done >= part:
            return finish(context, step)
        done += piece


def chunk_limits(plan: CallPlan, world_size: int, capacity: int) -> ChunkLimits:
    """Compute the limits of a piece of a slice: blocks of this piece of all slices, and of the sums of one."""
    block = wire.FP8_BLOCK * wire.DTYPES[plan.dtype]
    most = capacity // ((world_size + 1) * fp8_blocks.BLOCK_BYTES) * block
    return ChunkLimits(most, (256 << 10) // world_size, block)


def arithmetic(plan: CallPlan) -> dict[int, Arithmetic]:
    """Return the sum of blocks, and the conversions between blocks and values of the plan's dtype."""
    check_sum(plan, fp8_blocks.ENCODE)
    return {ARITHMETIC: fp8_blocks.SUM, ENCODE: fp8_blocks.ENCODE[plan.dtype], DECODE: fp8_blocks.DECODE[plan.dtype]}


ALL_REDUCE = HostCall(schedule=CompiledSchedule(all_reduce), chunk=chunk_limits, arithmetic=arithmetic)
