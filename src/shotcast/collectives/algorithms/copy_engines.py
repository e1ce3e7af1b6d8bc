r"""Copy engines: the GPU's copy engines move large messages, which leaves the SMs to other work.

.. math:: T = f + s\,a + S / b + M / m

where S is the number of bytes sent by two-shot (for an all-reduce) or one-shot (for the others), and s counts their
steps and the rendezvous of the ranks before the first step and after each. The other terms are as for two-shot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, Workspace, slice_of_message
from shotcast.collectives.algorithms import one_shot, two_shot
from shotcast.cost.collective import Work
from shotcast.transport.triton.layout import ENGINE_ROOM, QUAD, bytes_of_copies, places_of_copies
from shotcast.units import align_up
from shotcast.wire import LaunchShape, NodeShape, Op

COPY_ENGINES = "copy_engines"
_SHARED_FROM = 16 << 20
"""The message size from which calls of non-exclusive communicators use copy engines.

A shorter message takes less than 50 us with all SMs of two H200, and twice that with copy engines
(docs/design/overlap.md).
"""
_OF_A_CHUNK, _MOST_ENQUEUED = 8, 512
"""Kernels, events and waits per chunk, and their limit per call. If a stream takes no more (some 1,024, not measured),
its host waits until other ranks arrive."""
_BLOCK_WORDS, _WARPS, _MOST_PROGRAMS = 2048, 8, 528
"""The launch of the sums, which wait for nothing: four programs on each SM of an H100."""


def _with_meetings(work: Callable[[int, NodeShape, int], Work], count: int) -> Callable[[int, NodeShape, int], Work]:
    def with_meetings(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
        alone = work(nbytes, shape, itemsize)
        return alone._replace(steps=alone.steps + count)

    return with_meetings


_reduce_work, _copy_work = _with_meetings(two_shot.work, 3), _with_meetings(one_shot.part_work, 2)


def launch(problem: CollectiveProblem) -> LaunchShape:
    """Return the launch of the sums, with the bytes of each part sent at once: all of it, or equal chunks.

    Few chunks are faster: each adds a rendezvous, and its sum waits for the end of a product that occupies all SMs.
    """
    part = max(1, slice_of_message(problem))
    capacity = bytes_of_copies(problem.topology.exclusive) // problem.topology.world_size
    chunk = next(
        align_up(math.ceil(part / chunks), QUAD)
        for chunks in itertools.count(1)
        if align_up(math.ceil(part / chunks), QUAD) * places_of_copies(problem.op, chunks) <= capacity
    )
    if problem.topology.transport.serial:
        return LaunchShape(2, 256, 1, chunk)
    return LaunchShape(min(_MOST_PROGRAMS, math.ceil(chunk / (4 * _BLOCK_WORDS))), _BLOCK_WORDS, _WARPS, chunk)


def _unsupported_reason(problem: CollectiveProblem) -> str:
    if problem.topology.shape.nodes > 1:
        return "all ranks are not on one node"
    chunks = math.ceil(slice_of_message(problem) / launch(problem).chunk_bytes)
    enqueued = chunks * (3 * problem.topology.world_size + _OF_A_CHUNK)
    if enqueued > _MOST_ENQUEUED:
        return f"it would enqueue {enqueued} copies and kernels, and {_MOST_ENQUEUED} are the most"
    return ""


def _form(**fields: Any) -> Form:
    return Form(
        triton="shotcast.transport.triton.copy_engines:bind",
        launch=launch,
        unsupported_reason=_unsupported_reason,
        workspace=lambda problem: Workspace(ENGINE_ROOM, problem.topology.max_bytes),
        uneven=False,
        flags_words=False,
        shared_from=_SHARED_FROM,
        **fields,
    )


ALGORITHM = Algorithm(
    name=COPY_ENGINES,
    label="copy engines",
    summary="as two-shot and one-shot, by the engines that copy memory; the SMs only add up",
    color="#72b7b2",
    by_name=True,
    forms={
        Op.ALL_REDUCE: _form(work=_reduce_work, any_reduction=True),
        Op.REDUCE_SCATTER: _form(work=_copy_work, any_reduction=True),
        Op.ALL_GATHER: _form(work=_copy_work),
        Op.ALL_TO_ALL: _form(work=_copy_work),
    },
)
