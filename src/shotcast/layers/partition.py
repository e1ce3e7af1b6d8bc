"""Division of a dimension between ranks: contiguous parts, as equal as possible."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from shotcast.errors import ConfigError

FFN_UNIT = VOCAB_UNIT = 64
"""Columns of feed-forward networks and rows of vocabularies are divided in multiples of this, if there are enough."""


def partition(total: int, parts: int, unit: int = 1) -> list[range]:
    """Divide ``total`` elements into ``parts`` contiguous ranges.

    The first ranges are longer by at most one ``unit``. Boundaries are multiples of ``unit`` if there are at least as
    many units as parts; the last range also gets the incomplete unit.

    Raises ConfigError if there are fewer elements than parts.
    """
    if total < parts:
        raise ConfigError(f"{total} cannot be divided between {parts} ranks: each needs at least one")
    unit = _largest_unit(total, parts, unit)
    bounds = [_bound(total, parts, unit, number) for number in range(parts + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def _largest_unit(total: int, parts: int, unit: int) -> int:
    """Halve the unit until there are at least as many units as parts."""
    while unit > 1 and total // unit < parts:
        unit //= 2
    return unit


def _bound(total: int, parts: int, unit: int, number: int) -> int:
    """Return the first element of this part; for the number after the last part, ``total``."""
    if number == parts:
        return total
    each, more = divmod(total // unit, parts)
    return unit * (each * number + min(number, more))


class Shard(NamedTuple):
    """A rank's part of a dimension that partial sums run over."""

    part: range  # the elements, at least one
    # there are more ranks than elements. This rank computes with an element of another one, and takes zeros for the
    # weights that multiply the results, so that it adds nothing to their sum
    zeroed: bool


def shard(total: int, rank: int, ranks: int, unit: int = 1) -> Shard:
    """Return a rank's part of ``total`` elements: its range of their :func:`partition` if each rank gets one."""
    if rank >= total:
        return Shard(range(1), True)
    parts = min(ranks, total)
    unit = _largest_unit(total, parts, unit)
    return Shard(range(_bound(total, parts, unit, rank), _bound(total, parts, unit, rank + 1)), False)


class HeadShard(NamedTuple):
    """The attention heads of a rank."""

    queries: range  # the query heads
    kv: range  # the key-value heads that they read
    kv_head_of: tuple[int, ...]  # for each query head the index of its own among these
    zeroed: bool  # as in :class:`Shard`


def partition_heads(heads: int, kv_heads: int, rank: int, ranks: int) -> HeadShard:
    """Return the attention heads of a rank.

    Query heads are divided evenly, regardless of their groups: a key-value head whose queries are on two ranks is kept
    by both. So more ranks than key-value heads, or nine heads on two ranks, need no special case.
    """
    if heads % kv_heads:
        raise ConfigError(f"{heads} heads do not divide into groups for {kv_heads} key-value heads")
    group = heads // kv_heads
    own, zeroed = shard(heads, rank, ranks)
    kv_own = range(own.start // group, (own.stop - 1) // group + 1)
    return HeadShard(own, kv_own, tuple(head // group - kv_own.start for head in own), zeroed)
