r"""All-reduces between nodes: ranks of equal local rank exchange the sums of their nodes and add them in one tree.

For H nodes of L ranks and a message of M bytes, ranks of a node first add up a slice of M/L each, with a
reduce-scatter. Then ranks of equal local rank, the peers, exchange their slices over the network. The sum of all nodes
is rounded to the dtype, and the ranks of the node gather the slices. All algorithms take

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

from collections.abc import Callable
from typing import Any, NamedTuple

from shotcast import wire
from shotcast.collectives.algorithm import Algorithm, CollectiveProblem, Form, Workspace, slice_in_node
from shotcast.collectives.fused_rows import fused_forms, tiles_of_rows
from shotcast.cost.collective import Work
from shotcast.hardware.nodes import folded
from shotcast.transport.triton.layout import WorkspaceLayout
from shotcast.units import align_up
from shotcast.wire import SIXTEEN_BITS, NodeShape, Op, in_one_step


class Slice(NamedTuple):
    """Sizes in bytes of the slice that a rank exchanges with its peers: its float32 sums, and the rounded result."""

    sums: float
    result: float


def slice_of(nbytes: int, shape: NodeShape, itemsize: int) -> Slice:
    """Compute S and R of a message."""
    result = nbytes / shape.ranks_per_node
    return Slice(result * 4 / itemsize, result)


def doublings(nodes: int) -> int:
    """Return k = floor(log2 H), the number of steps that combine the nodes left after folding."""
    return nodes.bit_length() - 1


def around(nbytes: int, shape: NodeShape) -> Work:
    """Return the work of a reduce-scatter and an all-gather inside nodes, around an exchange over the network."""
    ranks = shape.ranks_per_node
    return Work(2 if ranks > 1 else 0, 2 * (ranks - 1) / ranks * nbytes, nbytes)


def in_pairs(nbytes: int, shape: NodeShape, itemsize: int, steps: int, sent: float) -> Work:
    """Return the work of :func:`around` for a pairwise exchange between nodes, which needs a power of two of them.

    With any other number, some nodes send their sums to others first and receive the result last: two steps, S + R
    bytes.
    """
    if folded(shape.nodes):
        steps, sent = steps + 2, sent + sum(slice_of(nbytes, shape, itemsize))
    return around(nbytes, shape)._replace(network_steps=steps, network_sent=sent)


def to_all(nbytes: int, shape: NodeShape, steps: int, sent: float) -> Work:
    """Return the work of :func:`around` for an exchange in which each node sends to all others in every step."""
    return around(nbytes, shape)._replace(spread_steps=steps, spread_sent=sent)


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


def rows_workspace(problem: CollectiveProblem) -> Workspace:
    """Return the workspace of a fused all-reduce in whole tiles: that of the phases in nodes or of the exchange.

    It is the one with the larger shortage; rows are not sent in pieces.
    """
    shape, max_bytes = problem.topology.shape, problem.topology.max_bytes
    tiles, block = tiles_of_rows(problem)
    nbytes = align_up(tiles, shape.ranks_per_node) * block * 4
    most = WorkspaceLayout.for_messages(max_bytes, nodes=shape.nodes, ranks_per_node=shape.ranks_per_node).piece_bytes
    return Workspace(nbytes, most) if nbytes > most else Workspace(2 * nbytes, 2 * max_bytes)


def order_unsupported_reason(problem: CollectiveProblem) -> str:
    """Return why the order in which nodes are reduced would matter; empty if it does not.

    Float sums in float32 have a defined node order. No order changes the bits of extrema, integers or bool.
    """
    reduction, dtype = problem.reduction, problem.dtype
    if reduction == "sum" and dtype in wire.REDUCIBLE:
        return ""
    if problem.topology.transport.only_sums:
        return f"kernels of GPUs between nodes add up {', '.join(wire.REDUCIBLE)}, and this is {reduction} of {dtype}"
    if reduction in ("max", "min") or dtype in (*wire.INTEGERS, "bool"):
        return ""
    return f"nodes are reduced one with another, and {reduction} of {dtype} is in the order of ranks"


def forms_of(
    work: Callable[[int, NodeShape, int], Work],
    hosts: str,
    normed_hosts: str,
    triton: str = "",
    normed_triton: str = "",
    **others: Any,
) -> dict[Op, Form]:
    """Return the forms of an all-reduce that adds nodes in a tree, and of its variants with residual and norm.

    The variants use the kernels ``normed_hosts`` and ``normed_triton``; ``others`` are further fields of the plain
    form.
    """
    summed = Form(
        work=work, triton=triton, hosts=hosts, share=slice_in_node, between_nodes=True, divides=True, **others
    )
    normed = fused_forms(
        work,
        lambda problem: problem.topology.shape.ranks_per_node,
        rows_workspace,
        triton=normed_triton,
        hosts=normed_hosts,
        between_nodes=True,
    )
    return {Op.ALL_REDUCE: summed, **normed}


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
