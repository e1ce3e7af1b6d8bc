"""Nodes: which ranks share memory, and the tree that adds up the sums of nodes. Plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shotcast.wire import NodeShape


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The division of the ranks of a communicator into nodes.

    Ranks of one node share memory; a network joins ranks of different nodes. The *peers* of a rank are the ranks with
    its local rank on all nodes.
    """

    members: tuple[tuple[int, ...], ...]  # the ranks of each node, in the order of their local ranks
    names: tuple[str, ...]  # a name for each node: that of its host, and for logical nodes their number on it

    @classmethod
    def of_keys(cls, keys: Sequence[str]) -> NodeLayout:
        """Build a layout from the ranks' keys: ranks with equal keys share a node, which the key names.

        Nodes are in the order of their lowest ranks.
        """
        names = tuple(dict.fromkeys(keys))
        members = tuple(tuple(rank for rank, key in enumerate(keys) if key == name) for name in names)
        return cls(members, names)

    @classmethod
    def one_node(cls, world_size: int) -> NodeLayout:
        """Return the layout of ranks that all share memory."""
        return cls((tuple(range(world_size)),), ("",))

    @property
    def shape(self) -> NodeShape:
        """Nodes and ranks of each; ranks of uneven nodes count as one node."""
        return NodeShape(self.nodes, self.ranks_per_node) if self.even else NodeShape(1, self.world_size)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.members))

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def even(self) -> bool:
        return len({len(ranks) for ranks in self.members}) == 1

    @property
    def ranks_per_node(self) -> int:
        """The ranks of the largest node."""
        return max(map(len, self.members))

    @property
    def consecutive(self) -> bool:
        """True if nodes are consecutive ranks, in their order."""
        return [rank for ranks in self.members for rank in ranks] == list(range(self.world_size))

    def node_of(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self.members) if rank in ranks)

    def local_rank_of(self, rank: int) -> int:
        """Return the position of ``rank`` among the ranks of its node."""
        return self.members[self.node_of(rank)].index(rank)

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the local rank of ``rank`` on each node, including ``rank``. Needs even nodes."""
        local = self.local_rank_of(rank)
        return tuple(ranks[local] for ranks in self.members)

    def describe(self, ranks: Iterable[int], known: Sequence[int] = ()) -> str:
        """Describe ranks and their nodes in words, such as ``2, 3 (node b), 4 (node c)``.

        ``known`` maps ranks to the numbers shown to users; empty if these are the same.
        """
        wanted = set(ranks)
        groups = (
            (name, [known[rank] if known else rank for rank in members if rank in wanted])
            for name, members in zip(self.names, self.members, strict=True)
        )
        return ", ".join(f"{', '.join(map(str, found))} (node {name})" for name, found in groups if found)


def folded(nodes: int) -> int:
    """Return how many pairs of nodes are folded before the others exchange: ``nodes - 2**floor(log2 nodes)``.

    The sums p of the nodes are added up in one fixed tree. For i below this number, leaf i is p[2i] + p[2i+1]; the
    other leaves are the remaining nodes in order, so the number of leaves is a power of two. Then neighbors are added,
    level by level.
    """
    return nodes - (1 << nodes.bit_length() - 1)
