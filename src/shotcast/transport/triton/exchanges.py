"""The exchange between nodes: ranks with the same local rank on all nodes add up their partial sums.

    doubling  log2 H steps for H nodes: each rank swaps its partial sum for its partner's, leaf xor 2^s
    pairs     one step: each rank sends its partial sum to all others, which add up the whole tree
    halving   in step s a rank swaps half of the tiles that it still has: it sends some to the partner, leaf xor 2^s,
              and adds up what comes for the others. Then the rounded sums go back the same way: 2 log2 H steps, and
              fewer bytes if messages are large

In 16 bits, partial sums pass rounded to the dtype of the call, two to a word. A rank rounds its own partial sum, too:

    pairs     as above
    two_shot  each tile has an owner, to which all send theirs; it adds up the tree, and sends the result to all

For numbers of nodes that are no power of two, doubling and halving *fold*: of the first pairs of nodes, the odd one,
the *extra*, sends its partial sum to the even one, the *pivot*, before the exchange, and gets the result after it. All
but the last two give the bits of the tree in :func:`shotcast.hardware.nodes.folded`, which takes the operands of each
addition in the order of the nodes; the last two, those of the same tree over rounded partial sums.

``begin_*`` sends what a rank has without waiting; ``finish_*`` does the rest, and returns the words of the result. Both
handle one :class:`Tile`: its first word is ``start`` of its slice, and it has ``count`` words, a multiple of 4. A
*value* is a pair of tiles of float32, for the low and the high halves of words. Fields of SHAPE: NODES; DOUBLINGS, the
logarithm of the largest power of two in it; FOLDED, the number of folded pairs; LOCAL, the ranks in a node; PARTS, the
values in a word; and EXCHANGE, DTYPE, WORLD and PUTS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from shotcast.device.triton.words import pack, unpack
from shotcast.transport.triton.network import await_tiles, destination, put_tiles
from shotcast.transport.triton.sync import escape_sentinel

DOUBLING = tl.constexpr(0)
PAIRS = tl.constexpr(1)
HALVING = tl.constexpr(2)
PAIRS_16BIT = tl.constexpr(3)
TWO_SHOT_16BIT = tl.constexpr(4)


class Place(NamedTuple):
    """The place of a rank in the exchange.

    ``leaf`` is the leaf of its node in the tree. ``extra`` and ``pivot`` are 1 for a rank that is one, else 0.
    """

    node: tl.tensor
    local: tl.tensor
    leaf: tl.tensor
    extra: tl.tensor
    pivot: tl.tensor


class Tile(NamedTuple):
    """A tile of a slice of ``slice_words``; ``lanes`` are the numbers of its words."""

    number: tl.tensor
    start: tl.tensor
    slice_words: tl.tensor
    lanes: tl.tensor
    count: tl.tensor


@dataclass(frozen=True)  # without slots, which only one base of a class can have
class NodesShape:
    """The nodes and the exchange between them that a kernel is compiled for."""

    PUTS: bool
    EXCHANGE: int
    NODES: int
    FOLDED: int
    DOUBLINGS: int
    LOCAL: int
    PARTS: int


@triton.jit
def place_of(rank, SHAPE: tl.constexpr):
    """Return the place of a rank. Nodes are consecutive ranks."""
    node = rank // SHAPE.LOCAL
    inner = (node < 2 * SHAPE.FOLDED).to(tl.int32)
    odd = node % 2
    leaf = tl.where(inner != 0, node // 2, node - SHAPE.FOLDED)
    return Place(node, rank % SHAPE.LOCAL, leaf, inner * odd, inner * (1 - odd))


@triton.jit
def partner(place, step, SHAPE: tl.constexpr):
    """Return the rank that this one swaps with in a step."""
    leaf = place.leaf ^ (1 << step)
    return tl.where(leaf < SHAPE.FOLDED, 2 * leaf, leaf + SHAPE.FOLDED) * SHAPE.LOCAL + place.local


@triton.jit
def folding_partner(place, SHAPE: tl.constexpr):
    """Return the rank in the other node of a folded pair; for a node that is not folded, this rank."""
    return (place.node ^ (place.extra + place.pivot)) * SHAPE.LOCAL + place.local


@triton.jit
def targets_of(entry, place, SHAPE: tl.constexpr):
    """Return a rank's targets: its partners step by step, then its folding partner; or each other node, in a ring."""
    DOUBLINGS: tl.constexpr = SHAPE.DOUBLINGS
    NODES: tl.constexpr = SHAPE.NODES
    targets = ()
    if SHAPE.EXCHANGE != DOUBLING and SHAPE.EXCHANGE != HALVING:
        for i in tl.static_range(1, NODES):
            other = (place.node + i) % NODES * SHAPE.LOCAL + place.local
            targets = targets + (destination(entry.peers, entry.puts, other, SHAPE.PUTS),)
    else:
        for step in tl.static_range(DOUBLINGS):
            targets = targets + (destination(entry.peers, entry.puts, partner(place, step, SHAPE), SHAPE.PUTS),)
        if SHAPE.FOLDED:
            targets = targets + (destination(entry.peers, entry.puts, folding_partner(place, SHAPE), SHAPE.PUTS),)
    return targets


@triton.jit
def exchange_quads(slice_quads, SHAPE: tl.constexpr):
    """Return the size, in quads, of all slots of an exchange for message slices of ``slice_quads``."""
    if SHAPE.NODES == 1:
        quads = slice_quads * 0
    elif SHAPE.EXCHANGE == DOUBLING:
        quads = slice_quads * (SHAPE.DOUBLINGS * SHAPE.PARTS + (SHAPE.FOLDED > 0) * (SHAPE.PARTS + 1))
    elif SHAPE.EXCHANGE == HALVING:
        quads = slice_quads * ((SHAPE.DOUBLINGS + (SHAPE.FOLDED > 0)) * SHAPE.PARTS + 1)
    elif SHAPE.EXCHANGE == PAIRS:
        quads = slice_quads * ((SHAPE.NODES - 1) * SHAPE.PARTS)
    elif SHAPE.EXCHANGE == PAIRS_16BIT:
        quads = slice_quads * (SHAPE.NODES - 1)
    else:
        quads = slice_quads * SHAPE.NODES
    return quads


@triton.jit
def bits_of(value, PARTS: tl.constexpr):
    """Split a value into PARTS tiles of 32 bits, which may be sent through slots."""
    bits = (escape_sentinel(value[0].to(tl.int32, bitcast=True)),)
    if PARTS == 2:
        bits = bits + (escape_sentinel(value[1].to(tl.int32, bitcast=True)),)
    return bits


@triton.jit
def value_of(bits, at, PARTS: tl.constexpr):
    """Join the PARTS tiles of bits from position ``at`` on into a value."""
    low = bits[at].to(tl.float32, bitcast=True)
    high = low
    if PARTS == 2:
        high = bits[at + 1].to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def added(first, second):
    """Add two values."""
    return first[0] + second[0], first[1] + second[1]


@triton.jit
def either(condition, one, other):
    """Select one of two values."""
    return tl.where(condition, one[0], other[0]), tl.where(condition, one[1], other[1])


@triton.jit
def added_by_leaf(mine, theirs, place, step):
    """Add a value and the partner's, in the order of their leaves. (The payload of a NaN depends on the order.)"""
    lower = (place.leaf >> step) & 1 == 0
    return added(either(lower, mine, theirs), either(lower, theirs, mine))


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """Round a value to words of the result, which may be sent through slots."""
    return escape_sentinel(pack(value[0], value[1], DTYPE))


# -- folding ----------------------------------------------------------------------------------------------------------


@triton.jit
def begin_folded(call, network, targets, place, tile, value, SHAPE: tl.constexpr):
    """Send the partial sum of an extra. Its slot follows the slots of the steps."""
    word = SHAPE.DOUBLINGS * tile.slice_words * SHAPE.PARTS + tile.start * SHAPE.PARTS
    put_tiles(
        call,
        network,
        targets[SHAPE.DOUBLINGS],
        word,
        tile.lanes,
        bits_of(value, SHAPE.PARTS),
        tile.count * place.extra,
        SHAPE.PARTS,
    )


@triton.jit
def await_folded(call, network, place, tile, value, SHAPE: tl.constexpr):
    """Add, in a pivot, the partial sum that its extra has sent. Returns (value, call)."""
    word = SHAPE.DOUBLINGS * tile.slice_words * SHAPE.PARTS + tile.start * SHAPE.PARTS
    other, pivots = folding_partner(place, SHAPE), tile.count * place.pivot
    bits, call = await_tiles(
        call, network, (word,), tile.lanes, (pivots,), other, 0, SHAPE.LOCAL > 1, SHAPE.PARTS, 1, SHAPE.WORLD
    )
    return either(place.pivot != 0, added(value, value_of(bits, 0, SHAPE.PARTS)), value), call


@triton.jit
def unfold(call, network, target, place, tile, word, words, DEPTH: tl.constexpr, SHAPE: tl.constexpr):
    """Send the words of the result from a pivot to its extra. Returns (words, call)."""
    put_tiles(call, network, target, word, tile.lanes, (words,), tile.count * place.pivot, 1)
    other, extras = folding_partner(place, SHAPE), tile.count * place.extra
    came, call = await_tiles(call, network, (word,), tile.lanes, (extras,), other, 0, DEPTH, 1, 1, SHAPE.WORLD)
    return tl.where(place.extra != 0, came[0], words), call


# -- doubling ---------------------------------------------------------------------------------------------------------


@triton.jit
def begin_doubling(call, network, targets, place, tile, value, SHAPE: tl.constexpr):
    """Send an extra's partial sum to its pivot, or the step-0 partial sum of a rank that is not folded."""
    count = tile.count
    if SHAPE.FOLDED:
        begin_folded(call, network, targets, place, tile, value, SHAPE)
        count = count * (1 - place.extra - place.pivot)
    put_tiles(
        call, network, targets[0], tile.start * SHAPE.PARTS, tile.lanes, bits_of(value, SHAPE.PARTS), count, SHAPE.PARTS
    )


@triton.jit
def finish_doubling(call, network, targets, place, tile, value, SHAPE: tl.constexpr):
    """Swap partial sums step by step. Returns (words, call)."""
    PARTS: tl.constexpr = SHAPE.PARTS
    DOUBLINGS: tl.constexpr = SHAPE.DOUBLINGS
    lanes = tile.lanes
    EARLIER: tl.constexpr = (SHAPE.FOLDED > 0) + (SHAPE.LOCAL > 1)
    slot = tile.slice_words * PARTS
    word = tile.start * PARTS
    active = tile.count * (1 - place.extra)
    if SHAPE.FOLDED:
        value, call = await_folded(call, network, place, tile, value, SHAPE)
        put_tiles(call, network, targets[0], word, lanes, bits_of(value, PARTS), tile.count * place.pivot, PARTS)
    for step in tl.static_range(DOUBLINGS):
        other = partner(place, step, SHAPE)
        bits, call = await_tiles(
            call, network, (word + step * slot,), lanes, (active,), other, 0, step + EARLIER, PARTS, 1, SHAPE.WORLD
        )
        value = added_by_leaf(value, value_of(bits, 0, PARTS), place, step)
        if step + 1 < DOUBLINGS:
            next_word = word + (step + 1) * slot
            put_tiles(call, network, targets[step + 1], next_word, lanes, bits_of(value, PARTS), active, PARTS)
    words = rounded(value, SHAPE.DTYPE)
    if SHAPE.FOLDED:
        last = (DOUBLINGS + 1) * slot + tile.start
        words, call = unfold(call, network, targets[DOUBLINGS], place, tile, last, words, DOUBLINGS + EARLIER, SHAPE)
    return words, call


# -- pairs ------------------------------------------------------------------------------------------------------------


@triton.jit
def slot_of(node, other):
    """Return the slot of a node's partial sum at another node, which has slots for all but itself, in node order."""
    return node - (other < node).to(tl.int32)


@triton.jit
def begin_pairs(call, network, targets, place, tile, bits, PARTS: tl.constexpr, SHAPE: tl.constexpr):
    """Send the partial sum, as PARTS tiles of 32 bits, to all other nodes."""
    NODES: tl.constexpr = SHAPE.NODES
    for i in tl.static_range(1, NODES):
        slot = slot_of(place.node, (place.node + i) % NODES)
        put_tiles(
            call,
            network,
            targets[i - 1],
            (slot * tile.slice_words + tile.start) * PARTS,
            tile.lanes,
            bits,
            tile.count,
            PARTS,
        )


@triton.jit
def await_pairs(call, network, place, tile, count, PARTS: tl.constexpr, SHAPE: tl.constexpr):
    """Wait for the partial sums of all other nodes. Returns (PARTS tiles of 32 bits for each node, call)."""
    NODES: tl.constexpr = SHAPE.NODES
    firsts = ()
    counts = ()
    for node in tl.static_range(NODES):
        firsts = firsts + ((slot_of(node, place.node) * tile.slice_words + tile.start) * PARTS,)
        counts = counts + (tl.where(place.node == node, 0, count),)
    return await_tiles(
        call, network, firsts, tile.lanes, counts, place.local, SHAPE.LOCAL, SHAPE.LOCAL > 1, PARTS, NODES, SHAPE.WORLD
    )


@triton.jit
def summed_by_tree(partial, SHAPE: tl.constexpr):
    """Add up the values of all nodes in the order of the tree. Returns the sum as a tuple of one."""
    DOUBLINGS: tl.constexpr = SHAPE.DOUBLINGS
    sums = ()
    for leaf in tl.static_range(SHAPE.NODES - SHAPE.FOLDED):
        if leaf < SHAPE.FOLDED:
            sums = sums + (added(partial[2 * leaf], partial[2 * leaf + 1]),)
        else:
            sums = sums + (partial[leaf + SHAPE.FOLDED],)
    for level in tl.static_range(DOUBLINGS):
        upper = ()
        for i in tl.static_range(2 ** (DOUBLINGS - 1 - level)):
            upper = upper + (added(sums[2 * i], sums[2 * i + 1]),)
        sums = upper
    return sums


@triton.jit
def finish_pairs(call, network, place, tile, value, SHAPE: tl.constexpr):
    """Wait for the partial sums of all other nodes, and add up the tree. Returns (words, call)."""
    NODES: tl.constexpr = SHAPE.NODES
    bits, call = await_pairs(call, network, place, tile, tile.count, SHAPE.PARTS, SHAPE)
    partial = ()
    for node in tl.static_range(NODES):
        partial = partial + (either(place.node == node, value, value_of(bits, node * SHAPE.PARTS, SHAPE.PARTS)),)
    (total,) = summed_by_tree(partial, SHAPE)
    return rounded(total, SHAPE.DTYPE), call


# -- in 16 bits -------------------------------------------------------------------------------------------------------


@triton.jit
def summed_rounded(words, bits, place, SHAPE: tl.constexpr):
    """Add up the rounded partial sums of all nodes; this node's is ``words``. Returns the words of the result.

    (None of them is -0.0: partial sums are multiples of the least subnormal, so none rounds to zero.)
    """
    NODES: tl.constexpr = SHAPE.NODES
    partial = ()
    for node in tl.static_range(NODES):
        partial = partial + (unpack(tl.where(place.node == node, words, bits[node]), SHAPE.DTYPE),)
    (total,) = summed_by_tree(partial, SHAPE)
    return rounded(total, SHAPE.DTYPE)


@triton.jit
def finish_pairs_16bit(call, network, place, tile, words, SHAPE: tl.constexpr):
    """Wait for the rounded partial sums of all other nodes, and add up the tree. Returns (words, call)."""
    bits, call = await_pairs(call, network, place, tile, tile.count, 1, SHAPE)
    return summed_rounded(words, bits, place, SHAPE), call


@triton.jit
def owns(place, number, SHAPE: tl.constexpr):
    """Return 1 if the rank is on the node that adds up a tile, else 0."""
    return (number % SHAPE.NODES == place.node).to(tl.int32)


@triton.jit
def begin_two_shot_16bit(call, network, targets, place, tile, words, SHAPE: tl.constexpr):
    """Send the words of the rounded partial sum to the owner of the tile."""
    owner = tile.number % SHAPE.NODES
    address = targets[0][0]
    pe = targets[0][1]
    for i in tl.static_range(1, SHAPE.NODES - 1):
        chosen = (place.node + 1 + i) % SHAPE.NODES == owner
        address = tl.where(chosen, targets[i][0], address)
        pe = tl.where(chosen, targets[i][1], pe)
    word = slot_of(place.node, owner) * tile.slice_words + tile.start
    put_tiles(
        call, network, (address, pe), word, tile.lanes, (words,), tile.count * (1 - owns(place, tile.number, SHAPE)), 1
    )


@triton.jit
def finish_two_shot_16bit(call, network, targets, place, tile, words, SHAPE: tl.constexpr):
    """Add up a tile in its owner, and send the words of the result to all, in the last slot. Returns (words, call)."""
    owned = tile.count * owns(place, tile.number, SHAPE)
    bits, call = await_pairs(call, network, place, tile, owned, 1, SHAPE)
    words = summed_rounded(words, bits, place, SHAPE)
    last = (SHAPE.NODES - 1) * tile.slice_words + tile.start
    for i in tl.static_range(SHAPE.NODES - 1):
        put_tiles(call, network, targets[i], last, tile.lanes, (words,), owned, 1)
    owner = tile.number % SHAPE.NODES * SHAPE.LOCAL + place.local
    came, call = await_tiles(
        call, network, (last,), tile.lanes, (tile.count - owned,), owner, 0, 1 + (SHAPE.LOCAL > 1), 1, 1, SHAPE.WORLD
    )
    return tl.where(owns(place, tile.number, SHAPE) != 0, words, came[0]), call


# -- halving ----------------------------------------------------------------------------------------------------------


@triton.jit
def still_has(place, number, step):
    """Return 1 if a rank has a tile before a step of halving, else 0: the lower bits of the leaf are the tile's."""
    return ((place.leaf ^ number) & ((1 << step) - 1) == 0).to(tl.int32) * (1 - place.extra)


@triton.jit
def gives_away(place, number, step):
    """Return 1 if a rank that has a tile sends it to its partner in a step, 0 if it gets the partner's."""
    return ((place.leaf ^ number) >> step) & 1


@triton.jit
def begin_halving(call, network, targets, place, tile, value, SHAPE: tl.constexpr):
    """Send an extra's partial sum to its pivot, or what a rank that is not folded gives away in step 0."""
    count = tile.count
    if SHAPE.FOLDED:
        begin_folded(call, network, targets, place, tile, value, SHAPE)
        count = count * (1 - place.extra - place.pivot)
    count = count * gives_away(place, tile.number, 0)
    put_tiles(
        call, network, targets[0], tile.start * SHAPE.PARTS, tile.lanes, bits_of(value, SHAPE.PARTS), count, SHAPE.PARTS
    )


@triton.jit
def finish_halving(call, network, targets, place, tile, value, SHAPE: tl.constexpr):
    """Add up a tile in the rank whose leaf has the lowest bits of its number, and spread the words from there.

    A rank that has given a tile away in step s gets its words from the same partner, and passes them on to the ranks
    that gave it theirs in the steps before. It gets them once, so all steps, and folding, share a slot. Returns
    (words, call).
    """
    PARTS: tl.constexpr = SHAPE.PARTS
    DOUBLINGS: tl.constexpr = SHAPE.DOUBLINGS
    lanes = tile.lanes
    EARLIER: tl.constexpr = (SHAPE.FOLDED > 0) + (SHAPE.LOCAL > 1)
    slot = tile.slice_words * PARTS
    word = tile.start * PARTS
    if SHAPE.FOLDED:
        value, call = await_folded(call, network, place, tile, value, SHAPE)
        sent = tile.count * place.pivot * gives_away(place, tile.number, 0)
        put_tiles(call, network, targets[0], word, lanes, bits_of(value, PARTS), sent, PARTS)
    for step in tl.static_range(DOUBLINGS):
        had = tile.count * still_has(place, tile.number, step)
        away = gives_away(place, tile.number, step)
        if step > 0:
            put_tiles(call, network, targets[step], word + step * slot, lanes, bits_of(value, PARTS), had * away, PARTS)
        other = partner(place, step, SHAPE)
        bits, call = await_tiles(
            call,
            network,
            (word + step * slot,),
            lanes,
            (had * (1 - away),),
            other,
            0,
            step + EARLIER,
            PARTS,
            1,
            SHAPE.WORLD,
        )
        value = added_by_leaf(value, value_of(bits, 0, PARTS), place, step)
    words = rounded(value, SHAPE.DTYPE)
    last = (DOUBLINGS + (SHAPE.FOLDED > 0)) * slot + tile.start
    for back in tl.static_range(DOUBLINGS):
        step = DOUBLINGS - 1 - back
        had = tile.count * still_has(place, tile.number, step)
        away = gives_away(place, tile.number, step)
        other = partner(place, step, SHAPE)
        came, call = await_tiles(
            call, network, (last,), lanes, (had * away,), other, 0, DOUBLINGS + back + EARLIER, 1, 1, SHAPE.WORLD
        )
        words = tl.where(had * away != 0, came[0], words)
        put_tiles(call, network, targets[DOUBLINGS - 1 - back], last, lanes, (words,), had * (1 - away), 1)
    if SHAPE.FOLDED:
        words, call = unfold(
            call, network, targets[DOUBLINGS], place, tile, last, words, 2 * DOUBLINGS + EARLIER, SHAPE
        )
    return words, call
