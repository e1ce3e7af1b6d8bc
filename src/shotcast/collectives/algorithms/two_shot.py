r"""Two-shot, also called MultiShot: each owner receives its slice and adds it up, then sends the sum to everyone.

.. math:: T = f + 2a + 2 \frac{N-1}{N} M / b + M / m

for N ranks, a message of M bytes, a fixed cost f of the call, a step latency a, a bandwidth b each way and a rate m at
which a rank consumes arriving data. Two steps for any N; a ring takes 2N - 2. A rank consumes M twice; measurements
show that one pass hides under the transfers of the other.
"""

from __future__ import annotations

from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, Workspace, slice_of_message
from shotcast.collectives.fused_rows import fused_forms, tiles_of_rows
from shotcast.cost.collective import Work
from shotcast.units import align_up
from shotcast.wire import NodeShape, Op


def work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of sending a slice to each peer twice."""
    return Work(2, 2 * (shape.world_size - 1) * nbytes / shape.world_size, nbytes).over(shape)


def _fused_workspace(problem: CollectiveProblem) -> Workspace:
    tiles, block = tiles_of_rows(problem)
    copies = 2 * align_up(tiles, problem.topology.world_size)
    return Workspace(copies * block * 4, 2 * problem.topology.max_bytes)


def reduce_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of sending a slice to each peer, or the work of the root, which receives the sums."""
    return Work(2, (shape.world_size - 1) * nbytes / shape.world_size, 2 * nbytes).over(shape)


ALGORITHM = Algorithm(
    name="two_shot",
    label="two-shot",
    summary="a slice to each owner, which adds up, then a slice to everyone (MultiShot)",
    color="#d62728",
    forms={
        Op.ALL_REDUCE: Form(
            work=work,
            triton="shotcast.transport.triton.two_shot:bind",
            cpu="shotcast.transport.cpu.two_shot:ALL_REDUCE",
            any_reduction=True,
            share=slice_of_message,
            divides=True,
        ),
        Op.REDUCE: Form(
            work=reduce_work,
            triton="shotcast.transport.triton.two_shot:bind",
            cpu="shotcast.transport.cpu.rooted:REDUCE_BY_SLICES",
            share=slice_of_message,
            any_reduction=True,
            divides=True,
        ),
        **fused_forms(
            work,
            lambda problem: problem.topology.world_size,
            _fused_workspace,
            triton="shotcast.transport.triton.fused_two_shot:bind",
            cpu="shotcast.transport.cpu.fused:TWO_SHOT",
        ),
    },
)
