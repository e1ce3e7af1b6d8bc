r"""NVRAR: recursive doubling between nodes, in few network steps and, for few nodes, few bytes.

.. math:: T = f + 2a + 2 \frac{L-1}{L} M / b + M / m + k (a_n + S / b_n)

for :math:`H = 2^k` nodes of L ranks, a message of M bytes, and :math:`S = 4 E / L` bytes of float32 sums of the slice
of a rank, E the elements of the message; f is the fixed cost of a call, a and b the latency and the bandwidth inside a
node, m the rate at which a rank takes in what has arrived, :math:`a_n` and :math:`b_n` latency and bandwidth of the
network. For other H, k is floor(log2 H), and folding adds :math:`2 a_n + (S + M/L) / b_n`. In step s, the node of leaf
v exchanges its sum with that of leaf v xor 2^s.

The algorithm is that of "LLM Inference Beyond a Single Node" (arXiv 2511.09557).
"""

from __future__ import annotations

from shotcast.collectives.algorithm import Algorithm
from shotcast.collectives.between_nodes import doublings, forms_of, in_pairs, slice_of
from shotcast.cost.collective import Work
from shotcast.wire import NodeShape


def work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of exchanging the whole slice in each step."""
    steps = doublings(shape.nodes)
    return in_pairs(nbytes, shape, itemsize, steps, steps * slice_of(nbytes, shape, itemsize).sums)


ALGORITHM = Algorithm(
    name="nvrar",
    label="NVRAR",
    summary="sums of nodes by recursive doubling between ranks of equal local rank",
    in_contract=lambda shape: True,
    color="#0b6e4f",
    forms=forms_of(
        work,
        hosts="shotcast.transport.network.nvrar:ALL_REDUCE",
        normed_hosts="shotcast.transport.network.fused:NVRAR",
        triton="shotcast.transport.triton.nvrar:bind",
        normed_triton="shotcast.transport.triton.fused_nvrar:bind",
    ),
)
