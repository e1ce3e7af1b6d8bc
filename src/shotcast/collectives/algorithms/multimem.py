r"""Multimem: MultiShot with the sum in the switch, through a multicast address.

.. math:: T = f + 3a + \frac{N+1}{N} M / b + 2 M / m

for N ranks, a message of M bytes, a fixed cost f of the call, a step latency a, a bandwidth b each way and a rate m at
which a rank consumes arriving data: staging and a flag, a load that the switch sums, a store to all.

The switch reads a slice of M/N from every rank, the owner included, for each of the N owners, and the result goes back
to its owner; then it takes M/N from each owner to every rank, the owner included. So a rank sends M + M/N and receives
M/N + M. (A user measured on 4 H20 that the local copy crosses the wire as well: forums.developer.nvidia.com topic
356726.) With N = 2 it sends more than two-shot, from N = 4 on less. The equation is not calibrated.
"""

from __future__ import annotations

from shotcast.collectives.algorithm import Algorithm, Form, slice_of_message
from shotcast.cost.collective import Work
from shotcast.wire import NodeShape, Op


def work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work in the equation above."""
    return Work(3, nbytes + nbytes / shape.world_size, 2 * nbytes).over(shape)


ALGORITHM = Algorithm(
    name="multimem",
    label="multimem",
    summary="the switch adds up what one multicast load names, and one multicast store goes to all",
    in_contract=lambda shape: False,
    multicast=True,
    color="#e377c2",
    forms={
        Op.ALL_REDUCE: Form(
            work=work,
            triton="shotcast.transport.triton.multimem:bind",
            share=slice_of_message,
            large_warps=lambda world_size: 0,
            divides=True,
        )
    },
)
