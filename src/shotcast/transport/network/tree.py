"""The tree in which sums of nodes are added up (:func:`shotcast.hardware.nodes.folded`), for compiled code."""

from __future__ import annotations

from shotcast.device.cpu.lazy_numba import njit


@njit(error_model="numpy")
def leaves(nodes: int) -> int:
    """Return the leaves of the tree: the largest power of two up to ``nodes``."""
    count = 1
    while 2 * count <= nodes:
        count *= 2
    return count


@njit(error_model="numpy")
def leaf_of(node: int, pairs: int) -> int:
    """Return the leaf of a node; of two that are folded into one leaf, the even one has it. ``pairs``: their number."""
    return node // 2 if node < 2 * pairs else node - pairs


@njit(error_model="numpy")
def node_of(leaf: int, pairs: int) -> int:
    """Return the node that has a leaf."""
    return 2 * leaf if leaf < pairs else leaf + pairs
