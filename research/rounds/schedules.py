"""Schedules as plain values: in which rounds ranks send, whom they wait for, and how many bytes pass in each.

The work of an algorithm (:class:`shotcast.cost.collective.Work`) says what the slowest rank does in all; its rounds say
which rank waits for which, so that ranks that are late, and networks that are not even, can be followed through a call
(:mod:`rounds.ranks`). Ranks are counted node by node.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shotcast.collectives.algorithms.nvrar import doublings, slice_of
from shotcast.hardware.nodes import folded
from shotcast.wire import NodeShape


class Reach(enum.Enum):
    """Whom each rank waits for in a round."""

    NODE = "all ranks of its node"
    PEERS = "the ranks of its local rank on all nodes"
    PAIR = "one rank"


class Round(NamedTuple):
    """One round: each rank sends, then waits for what others sent in it.

    Attributes:
        nbytes: bytes that a rank sends, to all that wait for it together.
        reach: whom a rank waits for.
        sources: with :attr:`Reach.PAIR`, by rank the one that it waits for; itself if it waits for none. A rank that
            nobody waits for sends nothing.
    """

    nbytes: float
    reach: Reach
    sources: tuple[int, ...] = ()


Rounds = Callable[[int, NodeShape, int], tuple[Round, ...]]
"""``rounds(nbytes, shape, itemsize)``: the rounds of a call with a message of this many bytes."""


def ring(nbytes: int, shape: NodeShape, itemsize: int) -> tuple[Round, ...]:
    """Return 2N - 2 rounds, in which each rank sends a slice to the next."""
    ranks = shape.world_size
    before = tuple((rank - 1) % ranks for rank in range(ranks))
    return (Round(nbytes / ranks, Reach.PAIR, before),) * (2 * (ranks - 1))


def one_shot(nbytes: int, shape: NodeShape, itemsize: int) -> tuple[Round, ...]:
    """Return one round, in which each rank of a node sends its message to all others."""
    return (Round((shape.world_size - 1) * nbytes, Reach.NODE),)


def two_shot(nbytes: int, shape: NodeShape, itemsize: int) -> tuple[Round, ...]:
    """Return two rounds, in which each rank of a node sends a slice to each other."""
    return (_slices(nbytes, shape),) * 2


def nvrar(nbytes: int, shape: NodeShape, itemsize: int) -> tuple[Round, ...]:
    """Return the rounds of recursive doubling between nodes."""
    sums = slice_of(nbytes, shape, itemsize).sums
    steps = [Round(sums, Reach.PAIR, partners(shape, 1 << step)) for step in range(doublings(shape.nodes))]
    return _around(nbytes, shape, _folded_around(nbytes, shape, itemsize, steps))


def nvrar_halving(nbytes: int, shape: NodeShape, itemsize: int) -> tuple[Round, ...]:
    """Return the rounds of halving, and of the way back."""
    sums, result = slice_of(nbytes, shape, itemsize)
    number = doublings(shape.nodes)
    there = [Round(sums / (2 << step), Reach.PAIR, partners(shape, 1 << step)) for step in range(number)]
    back = [Round(result / (2 << step), Reach.PAIR, partners(shape, 1 << step)) for step in reversed(range(number))]
    return _around(nbytes, shape, _folded_around(nbytes, shape, itemsize, there + back))


def nvrar_pairs(nbytes: int, shape: NodeShape, itemsize: int) -> tuple[Round, ...]:
    """Return one round between nodes, in which each sends its slice to all others."""
    sums = slice_of(nbytes, shape, itemsize).sums
    return _around(nbytes, shape, [Round((shape.nodes - 1) * sums, Reach.PEERS)] if shape.nodes > 1 else [])


def nvrar_two_shot(nbytes: int, shape: NodeShape, itemsize: int) -> tuple[Round, ...]:
    """Return two rounds between nodes: a part of the slice to each, then the sum of the local part."""
    part = (shape.nodes - 1) / shape.nodes
    steps = [Round(part * each, Reach.PEERS) for each in slice_of(nbytes, shape, itemsize)]
    return _around(nbytes, shape, steps if shape.nodes > 1 else [])


def partners(shape: NodeShape, distance: int) -> tuple[int, ...]:
    """Return by rank the peer on the node whose leaf differs by ``distance``; folded nodes have none.

    Leaf i is that of nodes 2i and 2i + 1 where nodes are folded (:func:`shotcast.hardware.nodes.folded`).
    """
    pairs = folded(shape.nodes)

    def partner(node: int) -> int:
        if node < 2 * pairs:
            if node % 2:
                return node
            leaf = node // 2
        else:
            leaf = node - pairs
        other = leaf ^ distance
        return 2 * other if other < pairs else other + pairs

    return _of_nodes(shape, partner)


def _folded_around(nbytes: int, shape: NodeShape, itemsize: int, steps: list[Round]) -> list[Round]:
    """Return ``steps`` with the folding of nodes before and after, where their number is no power of two."""
    pairs = folded(shape.nodes)
    if not pairs:
        return steps
    sums, result = slice_of(nbytes, shape, itemsize)
    fold = _of_nodes(shape, lambda node: node + 1 if node < 2 * pairs and node % 2 == 0 else node)
    unfold = _of_nodes(shape, lambda node: node - 1 if node < 2 * pairs and node % 2 else node)
    return [Round(sums, Reach.PAIR, fold), *steps, Round(result, Reach.PAIR, unfold)]


def _of_nodes(shape: NodeShape, source: Callable[[int], int]) -> tuple[int, ...]:
    local = shape.ranks_per_node
    return tuple(source(node) * local + rank for node in range(shape.nodes) for rank in range(local))


def _slices(nbytes: int, shape: NodeShape) -> Round:
    return Round((shape.ranks_per_node - 1) / shape.ranks_per_node * nbytes, Reach.NODE)


def _around(nbytes: int, shape: NodeShape, between: list[Round]) -> tuple[Round, ...]:
    """Return the rounds between nodes, with the reduce-scatter and the all-gather inside nodes."""
    if shape.ranks_per_node == 1:
        return tuple(between)
    inside = _slices(nbytes, shape)
    return (inside, *between, inside)


SCHEDULES: Mapping[str, Rounds] = {
    "ring": ring,
    "one_shot": one_shot,
    "two_shot": two_shot,
    "nvrar": nvrar,
    "nvrar_halving": nvrar_halving,
    "nvrar_pairs": nvrar_pairs,
    "nvrar_two_shot": nvrar_two_shot,
}
"""The rounds of all-reduces by algorithm; those of other algorithms are not described."""
