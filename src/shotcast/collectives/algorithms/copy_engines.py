r"""Copy engines: all-gather and all-to-all by the engines that copy memory, which leave all SMs to other work.

.. math:: T = f + 4a + \frac{N-1}{N} M / b_c

for N ranks and a message of M bytes; :math:`b_c` is the bandwidth that copy engines reach, and the other terms are
those of one-shot. Ranks meet in kernels of one warp, which go on beside the copies but for the first and the last.
"""

from __future__ import annotations

from typing import Any

from shotcast import wire
from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, Workspace, slice_of_message
from shotcast.cost.collective import Work
from shotcast.transport.triton.layout import COPY_PLACES, QUAD, window_bytes
from shotcast.units import align_up
from shotcast.wire import LaunchShape, NodeShape, Op


def work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of copying a part of the message from each peer."""
    return Work(4, 0.0, 0.0, engine_sent=(shape.world_size - 1) * nbytes / shape.world_size)


def launch(problem: CollectiveProblem) -> LaunchShape:
    """Return the launch of the meetings, with the bytes of each part that a round carries."""
    part = slice_of_message(problem)
    if problem.sizes:
        part = max(problem.sizes) * wire.DTYPES.get(problem.dtype, 1)
    parts = problem.topology.world_size if problem.op is Op.ALL_TO_ALL else 1
    room = window_bytes(problem.topology.max_bytes) // (COPY_PLACES * parts) // QUAD * QUAD
    return LaunchShape(1, 128, 1, max(QUAD, min(room, align_up(part, QUAD))))


def _window_alone(problem: CollectiveProblem) -> Workspace:
    return Workspace(0, problem.topology.max_bytes)


def _form(**fields: Any) -> Form:
    bind = "shotcast.transport.triton.copy_engines:bind"
    return Form(work=work, triton=bind, launch=launch, workspace=_window_alone, keeps_to_sms=True, **fields)


ALGORITHM = Algorithm(
    name="copy_engines",
    label="copy engines",
    summary="each rank copies from the windows of the others, by copy engines (`sms=`)",
    color="#72b7b2",
    forms={Op.ALL_GATHER: _form(), Op.ALL_TO_ALL: _form()},
)
