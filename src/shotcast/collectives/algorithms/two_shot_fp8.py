r"""Two-shot in FP8: half the bytes of 16-bit floats, a quarter of float32, at the price of precision.

.. math:: T = f + 2a + 2 \frac{N-1}{N} R M / b + M / m

with R = 33/32 bytes per element in place of the item size. GPUs convert while they wait for memory. The other terms are
as for two-shot.
"""

from __future__ import annotations

from shotcast import wire
from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, Workspace, slice_of_message
from shotcast.cost.collective import Work
from shotcast.transport.triton.layout import QUAD, WorkspaceLayout, fp8_slot_quads
from shotcast.wire import NodeShape, Op


def work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of two-shot with 33/32 bytes sent per element."""
    world_size = shape.world_size
    sent = 2 * (world_size - 1) * nbytes / world_size * (33 / 32 / itemsize)
    return Work(2, sent, nbytes).over(shape)


def _workspace(problem: CollectiveProblem) -> Workspace:
    world_size = problem.topology.world_size
    needed = 2 * world_size * fp8_slot_quads(problem.nbytes, world_size, problem.dtype) * QUAD
    return Workspace(needed, WorkspaceLayout.for_messages(problem.topology.max_bytes).slots_quads * QUAD)


def _share(problem: CollectiveProblem) -> int:
    """Return the bytes of a rank's slice as sent: one per element."""
    if problem.dtype not in wire.REDUCIBLE:
        return slice_of_message(problem)
    return -(-problem.nbytes // (problem.topology.world_size * wire.DTYPES[problem.dtype]))


ALGORITHM = Algorithm(
    name="two_shot_fp8",
    label="two-shot FP8",
    summary="two-shot whose slices travel as FP8 with a scale for each 128 elements",
    lossy=True,
    error_bound="shotcast.collectives.reference:fp8_error_bound",
    color="#ff7f0e",
    forms={
        Op.ALL_REDUCE: Form(
            work=work,
            triton="shotcast.transport.triton.two_shot_fp8:bind",
            share=_share,
            # of more than four ranks, tiles of 1024 words have too many values for the registers
            large_warps=lambda world_size: 0 if world_size > 4 else 8,
            workspace=_workspace,
        )
    },
)
