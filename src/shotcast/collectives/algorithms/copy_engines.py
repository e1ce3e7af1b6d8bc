r"""Copy engines: all-gather and all-to-all by the engines that copy memory, meant to leave all SMs to other work.

.. math:: T = f + 7 (R + 1) a + L / m + \frac{N-1}{N} M / b_c

for N ranks, a message of M bytes and R rounds, of up to 4 MiB that a rank stages; L bytes are copied on the rank
itself, 2 M / N of an all-gather and M of an all-to-all, and :math:`b_c` is the bandwidth that copy engines reach. The
other terms are those of one-shot. Ranks meet before each round and after the last, in kernels of one warp, which take 5
to 7 us. Those between should continue beside the copies; as nobody has measured that, they count in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shotcast import wire
from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, slice_of_message, window_alone
from shotcast.cost.collective import Work
from shotcast.transport.triton.layout import COPY_PLACES, QUAD, WINDOW_BYTES, window_bytes
from shotcast.units import align_up
from shotcast.wire import LaunchShape, NodeShape, Op

_MEETING_STEPS = 7
"""The time of a meeting in steps of 0.86 us: launched by the host, it takes 5 to 7 us."""


def gather_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of an all-gather: a rank stages its part, and keeps it."""
    part = nbytes / shape.world_size
    return _work(nbytes, shape, part, 2 * part)


def exchange_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of an all-to-all: a rank stages the parts for others, and keeps its own."""
    return _work(nbytes, shape, nbytes, nbytes)


def _work(nbytes: int, shape: NodeShape, staged: float, local: float) -> Work:
    rounds = math.ceil(staged / (WINDOW_BYTES // COPY_PLACES))
    pulled = (shape.world_size - 1) * nbytes / shape.world_size
    return Work(_MEETING_STEPS * (rounds + 1), 0.0, local, engine_sent=pulled)


def launch(problem: CollectiveProblem) -> LaunchShape:
    """Return the launch of the meetings, with the bytes of each part that a round carries."""
    part = slice_of_message(problem)
    if problem.sizes:
        part = max(problem.sizes) * wire.DTYPES.get(problem.dtype, 1)
    room = window_bytes(problem.topology.max_bytes) // (COPY_PLACES * _staged_parts(problem)) // QUAD * QUAD
    return LaunchShape(1, 128, 1, max(QUAD, min(room, align_up(part, QUAD))))


def launch_obstacle(problem: CollectiveProblem, shape: LaunchShape) -> str:
    """Return why the rounds of a launch, as of a tuned table, do not go into the window; empty if they do."""
    needed = COPY_PLACES * _staged_parts(problem) * shape.chunk_bytes
    room = window_bytes(problem.topology.max_bytes)
    return f"rounds of {shape.chunk_bytes} bytes take {needed} of a window of {room}" if needed > room else ""


def _staged_parts(problem: CollectiveProblem) -> int:
    """Return the parts that a round has in a place of the window."""
    return problem.topology.world_size if problem.op is Op.ALL_TO_ALL else 1


def _form(work: Callable[[int, NodeShape, int], Work]) -> Form:
    bind = "shotcast.transport.triton.copy_engines:bind"
    return Form(
        work=work,
        triton=bind,
        launch=launch,
        launch_obstacle=launch_obstacle,
        workspace=window_alone,
        keeps_to_sms=True,
    )


ALGORITHM = Algorithm(
    name="copy_engines",
    label="copy engines",
    summary="each rank copies from the windows of the others, by copy engines (`sms=`)",
    color="#72b7b2",
    forms={Op.ALL_GATHER: _form(gather_work), Op.ALL_TO_ALL: _form(exchange_work)},
)
