r"""NVRAR in 16 bits: the sums of nodes pass rounded, in half the bytes of float32, at the price of precision.

.. math:: T = f + 2a + 2 \frac{L-1}{L} M / b + M / m + \min\left(a_w + (H - 1) R / b_w,\;
    2 a_w + 2 \frac{H-1}{H} R / b_w\right)

with the terms of :mod:`shotcast.collectives.algorithms.nvrar`, for any number H of nodes, and R = M / L bytes of a
slice in the dtype of the call, float16 or bfloat16; :math:`a_w` and :math:`b_w` are latency and bandwidth where a rank
sends to all peers at once. Each node sends its sum, rounded, to all others where the slice is short or there are two
nodes (:func:`shotcast.wire.in_one_step`). Otherwise each sends a part to each other, which adds up, and
then the rounded parts to all: the second step is that of two-shot, whose result is rounded anyway.

The exchange is neither doubling nor halving, whose later steps would round sums of sums again: here the sum of a node
is rounded once, whatever the number of nodes. With one rank a node nothing is lost, since its numbers have 16 bits.
"""

from __future__ import annotations

from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, slice_in_node
from shotcast.collectives.between_nodes import slice_of, to_all
from shotcast.cost.collective import Work
from shotcast.wire import SIXTEEN_BITS, NodeShape, Op, in_one_step


def work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of sending the rounded slice to each peer, or parts of it and of the result."""
    others, rounded = shape.nodes - 1, slice_of(nbytes, shape, itemsize).result
    if in_one_step(shape.nodes, int(rounded)):
        return to_all(nbytes, shape, min(others, 1), others * rounded)
    return to_all(nbytes, shape, 2, 2 * others / shape.nodes * rounded)


def _obstacle(problem: CollectiveProblem) -> str:
    if problem.dtype in SIXTEEN_BITS:
        return ""
    return f"it sends sums of nodes in the 16 bits of {' or '.join(SIXTEEN_BITS)}, and this is {problem.dtype}"


ALGORITHM = Algorithm(
    name="nvrar_16bit",
    label="NVRAR 16-bit",
    summary="the rounded sum of each node to all others, or of large messages a part to each and then the sums",
    in_contract=lambda shape: False,
    lossy=True,
    by_name=True,
    error_bound="shotcast.collectives.reference:rounded_nodes_error_bound",
    color="#c2185b",
    forms={
        Op.ALL_REDUCE: Form(
            work=work,
            triton="shotcast.transport.triton.nvrar:bind_16bit",
            hosts="shotcast.transport.network.nvrar_16bit:ALL_REDUCE",
            reference="shotcast.collectives.reference:rounded_nodes_all_reduce",
            share=slice_in_node,
            obstacle=_obstacle,
            between_nodes=True,
            divides=True,
        )
    },
)
