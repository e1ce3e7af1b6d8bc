r"""Ring: each rank sends only to the next, one slice per step. The baseline that MultiShot is measured against.

.. math:: T = f + (2N-2) (a + M / (N b)) + \tfrac{3}{2} M / m

for N ranks, a message of M bytes, a fixed cost f of the call, a step latency a, a bandwidth b each way and a rate m at
which a rank consumes arriving data; reduce_scatter and all_gather take half the steps, send half the bytes, and consume
M. (Half of one pass hides under the transfers of the other, since steps wait for each other.)
"""

from __future__ import annotations

from typing import Any

from shotcast.collectives.algorithm import Algorithm, Form, slice_of_message
from shotcast.cost.collective import Work
from shotcast.wire import NodeShape, Op


def all_reduce_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of 2N - 2 steps of one slice each."""
    return _hops(2 * (shape.world_size - 1), nbytes, shape, 1.5 * nbytes)


def half_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of N - 1 steps of one slice each."""
    return _hops(shape.world_size - 1, nbytes, shape, nbytes)


def _hops(hops: int, nbytes: int, shape: NodeShape, taken: float) -> Work:
    """Return the work of the slowest rank: on several nodes, the last of its node, whose hops all leave the node."""
    sent = hops * nbytes / shape.world_size
    if shape.nodes == 1:
        return Work(hops, sent, taken)
    return Work(0, 0.0, taken, network_steps=hops, network_sent=sent)


def _form(cpu: str, **fields: Any) -> Form:
    return Form(
        triton="shotcast.transport.triton.ring:bind",
        cpu=cpu,
        share=slice_of_message,
        large_warps=lambda world_size: 0,
        **fields,
    )


ALGORITHM = Algorithm(
    name="ring",
    label="ring",
    summary="each rank sends only to the next, a slice a step, rounded at each hop",
    in_contract=lambda shape: shape.world_size == 2,  # the addition of two ranks commutes
    color="#7f7f7f",
    forms={
        Op.ALL_REDUCE: _form("shotcast.transport.cpu.ring:ALL_REDUCE", work=all_reduce_work),
        Op.REDUCE_SCATTER: _form("shotcast.transport.cpu.ring:REDUCE_SCATTER", work=half_work),
        Op.ALL_GATHER: _form("shotcast.transport.cpu.ring:ALL_GATHER", work=half_work, uneven=False, any_dtype=False),
    },
)
