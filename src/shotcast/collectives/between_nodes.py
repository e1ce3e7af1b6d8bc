"""Shared parts of the all-reduces between nodes: the work inside nodes, the folding of nodes, and the forms.

For H nodes of L ranks and a message of M bytes, ranks of a node first add up a slice of M/L each, with a
reduce-scatter. Then ranks of equal local rank, the peers, exchange their slices over the network: S bytes, since sums
of nodes are float32 for any dtype of the call. The sum of all nodes is rounded to the dtype, which leaves R = M/L
bytes, and the ranks of the node gather the slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shotcast import wire
from shotcast.collectives.algorithm import CollectiveProblem, Form, Workspace, slice_in_node
from shotcast.collectives.fused_rows import rows_unsupported_reason, tile_launch, tiles_of_rows
from shotcast.cost.collective import Work
from shotcast.hardware.nodes import folded
from shotcast.transport.triton.layout import WorkspaceLayout
from shotcast.units import align_up
from shotcast.wire import LaunchShape, NodeShape, Op


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


def rows_launch(problem: CollectiveProblem) -> LaunchShape:
    """Return the launch of a fused all-reduce: one program per tile of each slice."""
    return tile_launch(problem, -(-tiles_of_rows(problem)[0] // problem.topology.shape.ranks_per_node))


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
    rows: dict[str, Any] = {"launch": rows_launch, "workspace": rows_workspace} if normed_triton else {}
    tree = "shotcast.collectives.reference:tree_all_reduce"
    sums: dict[str, Any] = {"reference": tree, "share": slice_in_node, "divides": True, **others}
    normed = Form(
        work=work,
        triton=normed_triton,
        hosts=normed_hosts,
        unsupported_reason=rows_unsupported_reason,
        between_nodes=True,
        **rows,
    )
    plain = Form(work=work, triton=triton, hosts=hosts, between_nodes=True, **sums)
    return {Op.ALL_REDUCE: plain, **dict.fromkeys(wire.ALL_REDUCE_NORMS, normed)}
