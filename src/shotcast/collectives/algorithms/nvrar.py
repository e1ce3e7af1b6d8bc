r"""All-reduces between nodes: ranks of equal local rank exchange the sums of their nodes and add them in one tree.

For H nodes of L ranks and a message of M bytes, all of them take

.. math:: T = f + 2a + 2 \frac{L-1}{L} M / b + M / m + X

where f is the fixed cost of a call, a and b the latency and the bandwidth inside a node, and m the rate at which a rank
consumes arriving data. X is the exchange of :math:`S = 4 E / L` bytes of float32 sums of the slice of a rank, E the
elements of the message, or of :math:`R = M / L` bytes of the slice in the dtype of the call. :math:`a_n` and
:math:`b_n` are latency and bandwidth of the network between pairs of nodes, :math:`a_w` and :math:`b_w` are the same
for a rank that sends to all peers at once. Let k be floor(log2 H). If H is not a power of two, folding adds :math:`2
a_n + (S + R) / b_n` to the first two.

``nvrar``: recursive doubling, in few network steps and, for few nodes, few bytes. In step s, the node of leaf v
exchanges sums with the node of leaf v xor 2^s. The algorithm comes from "LLM Inference Beyond a Single Node" (arXiv
2511.09557).

.. math:: X = k (a_n + S / b_n)

``nvrar_halving``: halving and doubling, in 2 k steps, and less than twice the slice for any H. For large messages. In
step s, the nodes of leaves v and v xor 2^s halve what both still have, and each adds up its half; then the sums,
rounded, go back the same way.

.. math:: X = 2 k\,a_n + (1 - 2^{-k}) (S + R) / b_n

``nvrar_pairs``: every node sends its sum to all others, and each adds up the whole tree. One network step, and H - 1
times the slice: the fastest for few nodes or small messages.

.. math:: X = a_w + (H - 1) S / b_w

``nvrar_two_shot``: a part of the slice to each peer, which adds up, then the sums to all, in the dtype of the call. Two
network steps.

.. math:: X = 2 a_w + \frac{H-1}{H} (S + R) / b_w

``nvrar_16bit``: the sums of nodes are sent rounded to float16 or bfloat16, in half the bytes of float32, at the price
of precision. Each node sends its sum to all others if the slice is short or there are two nodes
(:func:`shotcast.wire.in_one_step`). Otherwise each sends a part to each other, which adds up, and then the rounded
parts to all: the second step is as in two-shot, whose result is rounded anyway. Later steps of doubling or halving
would round sums of sums again; here the sum of a node is rounded once for any number of nodes. With one rank per node
nothing is lost, since its numbers have 16 bits.

.. math:: X = \min\left(a_w + (H - 1) R / b_w,\; 2 a_w + 2 \frac{H-1}{H} R / b_w\right)
"""

from __future__ import annotations

from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, slice_in_node
from shotcast.collectives.between_nodes import doublings, forms_of, in_pairs, order_unsupported_reason, slice_of, to_all
from shotcast.cost.collective import Work
from shotcast.wire import SIXTEEN_BITS, NodeShape, Op, in_one_step


def doubling_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of exchanging the whole slice in each step."""
    steps = doublings(shape.nodes)
    return in_pairs(nbytes, shape, itemsize, steps, steps * slice_of(nbytes, shape, itemsize).sums)


def halving_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of exchanging half of the slice, a quarter and so on, then sending the sums back."""
    steps = doublings(shape.nodes)
    sent = (1 - 2.0**-steps) * sum(slice_of(nbytes, shape, itemsize))
    return in_pairs(nbytes, shape, itemsize, 2 * steps, sent)


def pairs_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of sending the slice to each peer."""
    others = shape.nodes - 1
    return to_all(nbytes, shape, min(others, 1), others * slice_of(nbytes, shape, itemsize).sums)


def two_shot_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of sending a part of the slice to each peer, then the sum of the local part to all."""
    others = shape.nodes - 1
    sent = others / shape.nodes * sum(slice_of(nbytes, shape, itemsize))
    return to_all(nbytes, shape, 2 * min(others, 1), sent)


def rounded_work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of sending the rounded slice, or parts of it and of the result, to each peer."""
    others, rounded = shape.nodes - 1, slice_of(nbytes, shape, itemsize).result
    if in_one_step(shape.nodes, int(rounded)):
        return to_all(nbytes, shape, min(others, 1), others * rounded)
    return to_all(nbytes, shape, 2, 2 * others / shape.nodes * rounded)


def _unsupported_reason_of_16_bits(problem: CollectiveProblem) -> str:
    if problem.dtype in SIXTEEN_BITS:
        return ""
    return f"it sends sums of nodes in the 16 bits of {' or '.join(SIXTEEN_BITS)}, and this is {problem.dtype}"


ALGORITHMS = (
    Algorithm(
        name="nvrar",
        label="NVRAR",
        summary="sums of nodes by recursive doubling between ranks of equal local rank",
        in_contract=lambda shape: True,
        color="#0b6e4f",
        forms=forms_of(
            doubling_work,
            hosts="shotcast.transport.network.sums:DOUBLING",
            normed_hosts="shotcast.transport.network.sums:NORMED_DOUBLING",
            triton="shotcast.transport.triton.nvrar:bind",
            normed_triton="shotcast.transport.triton.fused_nvrar:bind",
        ),
    ),
    Algorithm(
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
                work=rounded_work,
                triton="shotcast.transport.triton.nvrar:bind_16bit",
                hosts="shotcast.transport.network.sums:IN_16_BITS",
                reference="shotcast.collectives.reference:rounded_nodes_all_reduce",
                share=slice_in_node,
                unsupported_reason=_unsupported_reason_of_16_bits,
                between_nodes=True,
                divides=True,
            )
        },
    ),
    Algorithm(
        name="nvrar_halving",
        label="NVRAR halving",
        summary="sums of nodes by recursive halving, then the rounded parts by doubling",
        in_contract=lambda shape: True,
        color="#a67c00",
        forms=forms_of(
            halving_work,
            hosts="shotcast.transport.network.sums:HALVING",
            normed_hosts="shotcast.transport.network.sums:NORMED_HALVING",
            triton="shotcast.transport.triton.nvrar:bind_halving",
            normed_triton="shotcast.transport.triton.fused_nvrar:bind_halving",
        ),
    ),
    Algorithm(
        name="nvrar_pairs",
        label="NVRAR all-pairs",
        summary="the sum of each node to all others, each of which adds up all of them",
        in_contract=lambda shape: True,
        color="#1b9aaa",
        forms={
            **forms_of(
                pairs_work,
                hosts="shotcast.transport.network.sums:ALL_PAIRS",
                normed_hosts="shotcast.transport.network.sums:NORMED_ALL_PAIRS",
                triton="shotcast.transport.triton.nvrar:bind_pairs",
                normed_triton="shotcast.transport.triton.fused_nvrar:bind_pairs",
                any_reduction=True,
                unsupported_reason=order_unsupported_reason,
            ),
            Op.REDUCE: Form(
                work=pairs_work,
                hosts="shotcast.transport.network.sums:REDUCE",
                reference="shotcast.collectives.reference:tree_all_reduce",
                share=slice_in_node,
                between_nodes=True,
                any_reduction=True,
                unsupported_reason=order_unsupported_reason,
            ),
        },
    ),
    Algorithm(
        name="nvrar_two_shot",
        label="NVRAR two-shot",
        summary="a part of the sum of each node to each other node, which adds up, then the rounded parts to all",
        in_contract=lambda shape: True,
        color="#6a3d9a",
        forms=forms_of(
            two_shot_work,
            hosts="shotcast.transport.network.sums:TWO_SHOT",
            normed_hosts="shotcast.transport.network.sums:NORMED_TWO_SHOT",
        ),
    ),
)
