"""How a dimension is divided between ranks: contiguous parts, as equal as they can be."""

from __future__ import annotations

import itertools

from shotcast.errors import ConfigError

FFN_UNIT = VOCAB_UNIT = 64
"""Columns of feed-forward networks and rows of vocabularies are divided in multiples of this, if there are enough."""


def partition(total: int, parts: int, unit: int = 1) -> list[range]:
    """``total`` elements in ``parts`` contiguous ranges; the first ones are longer by at most one ``unit``, and
    the last one has what is no whole unit.

    Boundaries are multiples of ``unit``, where ``total`` has as many units as parts.

    Raises:
        ConfigError: there are fewer elements than parts.
    """
    if total < parts:
        raise ConfigError(f"{total} cannot be divided between {parts} ranks: each needs at least one")
    while unit > 1 and total // unit < parts:
        unit //= 2
    whole, rest = divmod(total, unit)
    each, more = divmod(whole, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + unit * (each + (part < more)))
    bounds[-1] += rest
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def partition_heads(heads: int, kv_heads: int, rank: int, ranks: int) -> tuple[range, range, tuple[int, ...]]:
    """The attention heads of a rank: its query heads, the key-value heads that these read, and which each reads.

    Query heads are divided evenly, whatever groups they form: a key-value head whose queries are on two ranks is kept
    by both. So more ranks than key-value heads, and nine heads on two ranks, need nothing special.

    Returns:
        (query heads, key-value heads, for each query head the place of its own among these).
    """
    if heads % kv_heads:
        raise ConfigError(f"{heads} heads do not divide into groups for {kv_heads} key-value heads")
    group = heads // kv_heads
    mine = partition(heads, ranks)[rank]
    kept = range(mine.start // group, (mine.stop - 1) // group + 1)
    return mine, kept, tuple(head // group - kept.start for head in mine)
