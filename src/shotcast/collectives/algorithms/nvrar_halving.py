r"""Halving and doubling between nodes: 2 log2 H steps, and less than twice the slice whatever H. For large messages.

.. math:: T = f + 2a + 2 \frac{L-1}{L} M / b + M / m + 2 k\,a_n + (1 - 2^{-k}) (S + M/L) / b_n

with the terms of :mod:`shotcast.collectives.algorithms.nvrar`. In step s, the nodes of leaves v and v xor 2^s halve
what both still have, and each adds up its half; then the sums, rounded, go back the same way.
"""

from __future__ import annotations

from shotcast.collectives.algorithm import Algorithm
from shotcast.collectives.between_nodes import doublings, forms_of, in_pairs, slice_of
from shotcast.cost.collective import Work
from shotcast.wire import NodeShape


def work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of exchanging half of the slice, a quarter and so on, and the way back."""
    steps = doublings(shape.nodes)
    sent = (1 - 2.0**-steps) * sum(slice_of(nbytes, shape, itemsize))
    return in_pairs(nbytes, shape, itemsize, 2 * steps, sent)


ALGORITHM = Algorithm(
    name="nvrar_halving",
    label="NVRAR halving",
    summary="sums of nodes by recursive halving, then the rounded parts by doubling",
    in_contract=lambda shape: True,
    color="#a67c00",
    forms=forms_of(
        work,
        hosts="shotcast.transport.network.nvrar_halving:ALL_REDUCE",
        normed_hosts="shotcast.transport.network.fused:HALVING",
        triton="shotcast.transport.triton.nvrar:bind_halving",
        normed_triton="shotcast.transport.triton.fused_nvrar:bind_halving",
    ),
)
