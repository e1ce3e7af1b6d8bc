r"""SM-limited calls: one program for each SM that the call may occupy; they send a large message through a window.

.. math:: T = f + s\,a + \max(S / b + M / m,\; S / (K\,c))

for K SMs, each of which moves c bytes per unit of time; s and S are the steps and the bytes sent by two-shot (for an
all-reduce) or one-shot (for the others). The other terms are as for two-shot. The remaining SMs are left to a
concurrent product. The equation is not calibrated: c is the throughput of one NCCL block on 2 H200.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from shotcast import wire
from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, slice_of_message, window_alone
from shotcast.collectives.algorithms import one_shot, two_shot
from shotcast.transport.triton.layout import PROGRESS_STEP_BITS, QUAD, STEPS_IN_FLIGHT, places_in_window, window_bytes
from shotcast.units import align_up
from shotcast.wire import LaunchShape, Op

_CHUNKS = 2
"""The minimum number of chunks of a program that a message should have, so that sending and receiving overlap."""
_LEAST_CHUNK, _MOST_CHUNK = 4 << 10, 128 << 10
_WORDS = 16384
"""Words in the tiles that a program keeps in flight."""
_MANY_SMS = 24
"""The number of SMs from which a program of an all_gather halves its words in flight. It then fits on an SM next to the
product of the rows (``BESIDE_WORDS`` of the kernel), and the programs still fill the link."""
_MOST_WORDS_OF_WARP = 3072
"""The most words of all ranks' tiles that a warp holds at once in a launch worth trying."""


def launch(problem: CollectiveProblem) -> LaunchShape:
    """Launch one program per SM, with chunks that together fill the window unless the message is smaller."""
    world_size, interpreted = problem.topology.world_size, problem.topology.transport.serial
    part = _part(problem)
    capacity = window_bytes(problem.topology.max_bytes) // (places_in_window(problem.op) * world_size)
    least = QUAD if interpreted else _LEAST_CHUNK
    programs = max(1, min(problem.sms, -(-part // least), capacity // QUAD))
    if interpreted:  # its programs run one after the other
        programs = min(programs, 2)
        chunk = min(capacity // programs // QUAD * QUAD, align_up(-(-part // (3 * programs)), QUAD), 4096)
        return LaunchShape(programs, 256, 1, max(chunk, QUAD))
    warps = 16 if world_size <= 3 else 8  # the tiles of more ranks need more registers
    chunk = min(max(-(-part // (programs * _CHUNKS)), least), capacity // programs, _MOST_CHUNK)
    words = _WORDS // 2 if problem.op is Op.ALL_GATHER and problem.sms >= _MANY_SMS else _WORDS
    block = max(1 << (words // _tiles(problem)).bit_length() - 1, 128 * warps)
    while 4 * block > chunk and block > 128 * warps:
        block //= 2
    return LaunchShape(programs, block, warps, chunk // (4 * block) * 4 * block or chunk // QUAD * QUAD)


def _tiles(problem: CollectiveProblem) -> int:
    """Return how many tiles a program loads at once: for sending, adding and receiving."""
    peers = problem.topology.world_size - 1
    of_op = {Op.ALL_REDUCE: 3 * peers + 1, Op.ALL_GATHER: peers + 1, Op.BROADCAST: peers + 1}
    return of_op.get(problem.op, 2 * peers + 1)


def launches(problem: CollectiveProblem) -> list[LaunchShape]:
    """Return launches with the default number of programs and other warps, tiles and chunks that fit."""
    default, found = launch(problem), []
    for warps, block, tiles in itertools.product((8, 16, 32), (2048, 4096, 8192), (1, 2, 4)):
        shape = dataclasses.replace(default, num_warps=warps, block_words=block, chunk_bytes=tiles * 4 * block)
        in_registers = block >= 128 * warps and block * _tiles(problem) <= _MOST_WORDS_OF_WARP * warps
        if in_registers and not launch_unsupported_reason(problem, shape):
            found.append(shape)
    return found


def launch_unsupported_reason(problem: CollectiveProblem, shape: LaunchShape) -> str:
    """Return why a launch, such as a tuned one, does not fit the window or takes too many steps; empty if it works.

    Binding the kernel checks this again for the actual workspace.
    """
    capacity = window_bytes(problem.topology.max_bytes)
    needed = shape.programs * places_in_window(problem.op) * problem.topology.world_size * shape.chunk_bytes
    launch = f"{shape.programs} programs with chunks of {shape.chunk_bytes} bytes"
    if needed > capacity:
        return f"{launch} take {needed} bytes of a window of {capacity}"
    steps = -(-_part(problem) // (shape.programs * shape.chunk_bytes))
    most = (1 << PROGRESS_STEP_BITS) - 2 * STEPS_IN_FLIGHT
    return f"{launch} take {steps} steps" if steps >= most else ""


def _part(problem: CollectiveProblem) -> int:
    """Return the bytes of the longest part, which a rank sends to each other rank."""
    if problem.sizes:
        return max(problem.sizes) * wire.DTYPES.get(problem.dtype, 1)
    return problem.nbytes if problem.op is Op.BROADCAST else slice_of_message(problem)


def _form(**fields: Any) -> Form:
    return Form(
        triton="shotcast.transport.triton.few_sms:bind",
        launch=launch,
        # no launch works if the window is too small for the message
        unsupported_reason=lambda problem: launch_unsupported_reason(problem, launch(problem)),
        launches=launches,
        launch_unsupported_reason=launch_unsupported_reason,
        workspace=window_alone,
        keeps_to_sms=True,
        flags_words=False,
        **fields,
    )


ALGORITHM = Algorithm(
    name="few_sms",
    label="few SMs",
    summary="as two-shot and one-shot, by a program for each SM that the call may occupy (`sms=`)",
    color="#4c78a8",
    forms={
        Op.ALL_REDUCE: _form(work=two_shot.work, any_reduction=True),
        Op.REDUCE_SCATTER: _form(work=one_shot.part_work, any_reduction=True),
        Op.ALL_GATHER: _form(work=one_shot.part_work),
        Op.ALL_TO_ALL: _form(work=one_shot.part_work),
        Op.BROADCAST: _form(work=one_shot.broadcast_work),
    },
)
