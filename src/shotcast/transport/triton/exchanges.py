"""The exchange between nodes: each rank adds up the partial sums of the ranks of its local rank on all nodes.

    doubling  log2 H steps for H nodes: each rank swaps its partial sum with that of its partner, leaf xor 2^s
    pairs     one step: each rank sends its partial sum to all others, which add up the whole tree
    halving   in step s a rank swaps half of the tiles that it still has: it sends some to the partner, leaf xor 2^s,
              and adds up what comes of the others. Then the sums, rounded, go back the same way: 2 log2 H steps, and
              fewer bytes where messages are large

In 16 bits, partial sums pass rounded to the dtype of the call, two to a word. The own one is rounded, too:

    pairs     as above
    two_shot  each tile has an owner, to which all send theirs; it adds up the tree, and sends the result to all

Doubling and halving take a power of two. Of other numbers, the first nodes are *folded*: of each pair of them the odd
one, the *extra*, sends its partial sum to the even one, the *pivot*, before the exchange, and gets the result after it.
The first three give the same bits: those of the tree in :func:`shotcast.hardware.nodes.folded`, where the operands of
each addition are in the order of the nodes. The last two give those of the same tree over rounded partial sums.

An exchange has two parts. ``begin_*`` sends what a rank has without a wait; ``finish_*`` does the rest, and returns the
words of the result. Both are for one tile: its first word is ``start`` of a slice of ``slice_words``, and it has
``count`` words, a multiple of 4. ``tile`` is its number. A *value* is a pair of tiles of float32, for the low and the
high halves of words.

Common arguments: NODES; DOUBLINGS, the logarithm of the largest power of two in it, and FOLDED, the pairs that are
folded; LOCAL, the ranks in a node; PARTS, the values in a word.
"""

from __future__ import annotations

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

    ``leaf`` is that of its node in the tree. ``extra`` and ``pivot`` are 1 in a rank that is one, else 0.
    """

    node: tl.tensor
    local: tl.tensor
    leaf: tl.tensor
    extra: tl.tensor
    pivot: tl.tensor


@triton.jit
def place_of(rank, FOLDED: tl.constexpr, LOCAL: tl.constexpr):
    """Return the place of a rank. Nodes are consecutive ranks."""
    node = rank // LOCAL
    inner = (node < 2 * FOLDED).to(tl.int32)
    odd = node % 2
    leaf = tl.where(inner != 0, node // 2, node - FOLDED)
    return Place(node, rank % LOCAL, leaf, inner * odd, inner * (1 - odd))


@triton.jit
def partner(place, step, FOLDED: tl.constexpr, LOCAL: tl.constexpr):
    """Return the rank that this one swaps with in a step."""
    leaf = place.leaf ^ (1 << step)
    return tl.where(leaf < FOLDED, 2 * leaf, leaf + FOLDED) * LOCAL + place.local


@triton.jit
def folding_partner(place, LOCAL: tl.constexpr):
    """Return the rank in the other node of a folded pair; for a node that is not folded, this rank."""
    return (place.node ^ (place.extra + place.pivot)) * LOCAL + place.local


@triton.jit
def targets_of(
    peers,
    puts,
    place,
    PUTS: tl.constexpr,
    EXCHANGE: tl.constexpr,
    NODES: tl.constexpr,
    FOLDED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Return where a rank sends to: its partners step by step, then that of its pair; or each other node, in a ring."""
    targets = ()
    if EXCHANGE != DOUBLING and EXCHANGE != HALVING:
        for i in tl.static_range(1, NODES):
            targets = targets + (destination(peers, puts, (place.node + i) % NODES * LOCAL + place.local, PUTS),)
    else:
        for step in tl.static_range(DOUBLINGS):
            targets = targets + (destination(peers, puts, partner(place, step, FOLDED, LOCAL), PUTS),)
        if FOLDED:
            targets = targets + (destination(peers, puts, folding_partner(place, LOCAL), PUTS),)
    return targets


@triton.jit
def exchange_quads(
    slice_quads,
    EXCHANGE: tl.constexpr,
    NODES: tl.constexpr,
    FOLDED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the quads of all slots of an exchange, for slices of ``slice_quads`` of the message."""
    if NODES == 1:
        quads = slice_quads * 0
    elif EXCHANGE == DOUBLING:
        quads = slice_quads * (DOUBLINGS * PARTS + (FOLDED > 0) * (PARTS + 1))
    elif EXCHANGE == HALVING:
        quads = slice_quads * ((DOUBLINGS + (FOLDED > 0)) * PARTS + 1)
    elif EXCHANGE == PAIRS:
        quads = slice_quads * ((NODES - 1) * PARTS)
    elif EXCHANGE == PAIRS_16BIT:
        quads = slice_quads * (NODES - 1)
    else:
        quads = slice_quads * NODES
    return quads


@triton.jit
def bits_of(value, PARTS: tl.constexpr):
    """Return a value as PARTS tiles of 32 bits, which may be sent through slots."""
    bits = (escape_sentinel(value[0].to(tl.int32, bitcast=True)),)
    if PARTS == 2:
        bits = bits + (escape_sentinel(value[1].to(tl.int32, bitcast=True)),)
    return bits


@triton.jit
def value_of(bits, at, PARTS: tl.constexpr):
    """Return the value whose PARTS tiles of bits begin at position ``at``."""
    low = bits[at].to(tl.float32, bitcast=True)
    high = low
    if PARTS == 2:
        high = bits[at + 1].to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def added(first, second):
    """Return the sum of two values."""
    return first[0] + second[0], first[1] + second[1]


@triton.jit
def either(condition, one, other):
    """Return one of two values."""
    return tl.where(condition, one[0], other[0]), tl.where(condition, one[1], other[1])


@triton.jit
def added_by_leaf(mine, theirs, place, step):
    """Return the sum of a value and the partner's. (The payload of a NaN depends on the order.)"""
    lower = (place.leaf >> step) & 1 == 0
    return added(either(lower, mine, theirs), either(lower, theirs, mine))


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """Return the words of the result, which may be sent through slots."""
    return escape_sentinel(pack(value[0], value[1], DTYPE))


# -- folding ----------------------------------------------------------------------------------------------------------


@triton.jit
def begin_folded(
    call,
    network,
    targets,
    place,
    start,
    slice_words,
    lanes,
    value,
    count,
    DOUBLINGS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Send the partial sum of an extra. Its slot comes after those of the steps."""
    word = DOUBLINGS * slice_words * PARTS + start * PARTS
    put_tiles(call, network, targets[DOUBLINGS], word, lanes, bits_of(value, PARTS), count * place.extra, PARTS)


@triton.jit
def await_folded(
    call,
    network,
    place,
    start,
    slice_words,
    lanes,
    value,
    count,
    DOUBLINGS: tl.constexpr,
    LOCAL: tl.constexpr,
    PARTS: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Add what the extra has sent, in its pivot. Returns (value, call)."""
    word = DOUBLINGS * slice_words * PARTS + start * PARTS
    other, pivots = folding_partner(place, LOCAL), count * place.pivot
    bits, call = await_tiles(call, network, (word,), lanes, (pivots,), other, 0, LOCAL > 1, PARTS, 1, WORLD)
    return either(place.pivot != 0, added(value, value_of(bits, 0, PARTS)), value), call


@triton.jit
def unfold(
    call,
    network,
    target,
    place,
    word,
    lanes,
    words,
    count,
    DEPTH: tl.constexpr,
    LOCAL: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Send the words of the result from a pivot to its extra. Returns (words, call)."""
    put_tiles(call, network, target, word, lanes, (words,), count * place.pivot, 1)
    other, extras = folding_partner(place, LOCAL), count * place.extra
    came, call = await_tiles(call, network, (word,), lanes, (extras,), other, 0, DEPTH, 1, 1, WORLD)
    return tl.where(place.extra != 0, came[0], words), call


# -- doubling ---------------------------------------------------------------------------------------------------------


@triton.jit
def begin_doubling(
    call,
    network,
    targets,
    place,
    start,
    slice_words,
    lanes,
    value,
    count,
    FOLDED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Send the partial sum of an extra to its pivot, and that of any other rank but a pivot in step 0."""
    if FOLDED:
        begin_folded(call, network, targets, place, start, slice_words, lanes, value, count, DOUBLINGS, PARTS)
        count = count * (1 - place.extra - place.pivot)
    put_tiles(call, network, targets[0], start * PARTS, lanes, bits_of(value, PARTS), count, PARTS)


@triton.jit
def finish_doubling(
    call,
    network,
    targets,
    place,
    start,
    slice_words,
    lanes,
    value,
    count,
    FOLDED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    LOCAL: tl.constexpr,
    DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Swap partial sums step by step. Returns (words, call)."""
    EARLIER: tl.constexpr = (FOLDED > 0) + (LOCAL > 1)
    slot = slice_words * PARTS
    word = start * PARTS
    active = count * (1 - place.extra)
    if FOLDED:
        value, call = await_folded(
            call, network, place, start, slice_words, lanes, value, count, DOUBLINGS, LOCAL, PARTS, WORLD
        )
        put_tiles(call, network, targets[0], word, lanes, bits_of(value, PARTS), count * place.pivot, PARTS)
    for step in tl.static_range(DOUBLINGS):
        other = partner(place, step, FOLDED, LOCAL)
        bits, call = await_tiles(
            call, network, (word + step * slot,), lanes, (active,), other, 0, step + EARLIER, PARTS, 1, WORLD
        )
        value = added_by_leaf(value, value_of(bits, 0, PARTS), place, step)
        if step + 1 < DOUBLINGS:
            next_word = word + (step + 1) * slot
            put_tiles(call, network, targets[step + 1], next_word, lanes, bits_of(value, PARTS), active, PARTS)
    words = rounded(value, DTYPE)
    if FOLDED:
        last = (DOUBLINGS + 1) * slot + start
        words, call = unfold(
            call, network, targets[DOUBLINGS], place, last, lanes, words, count, DOUBLINGS + EARLIER, LOCAL, WORLD
        )
    return words, call


# -- pairs ------------------------------------------------------------------------------------------------------------


@triton.jit
def slot_of(node, other):
    """Return the slot of a node's partial sum at another one: each has those of all but itself, in their order."""
    return node - (other < node).to(tl.int32)


@triton.jit
def begin_pairs(
    call, network, targets, place, start, slice_words, lanes, bits, count, NODES: tl.constexpr, PARTS: tl.constexpr
):
    """Send the partial sum, as PARTS tiles of 32 bits, to all other nodes."""
    for i in tl.static_range(1, NODES):
        slot = slot_of(place.node, (place.node + i) % NODES)
        put_tiles(call, network, targets[i - 1], (slot * slice_words + start) * PARTS, lanes, bits, count, PARTS)


@triton.jit
def await_pairs(
    call,
    network,
    place,
    start,
    slice_words,
    lanes,
    count,
    NODES: tl.constexpr,
    LOCAL: tl.constexpr,
    PARTS: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Wait for the partial sums of all other nodes. Returns (PARTS tiles of 32 bits for each node, call)."""
    firsts = ()
    counts = ()
    for node in tl.static_range(NODES):
        firsts = firsts + ((slot_of(node, place.node) * slice_words + start) * PARTS,)
        counts = counts + (tl.where(place.node == node, 0, count),)
    return await_tiles(call, network, firsts, lanes, counts, place.local, LOCAL, LOCAL > 1, PARTS, NODES, WORLD)


@triton.jit
def summed_by_tree(partial, NODES: tl.constexpr, FOLDED: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Add up the values of all nodes in the order of the tree. Returns a tuple of the sum alone."""
    sums = ()
    for leaf in tl.static_range(NODES - FOLDED):
        if leaf < FOLDED:
            sums = sums + (added(partial[2 * leaf], partial[2 * leaf + 1]),)
        else:
            sums = sums + (partial[leaf + FOLDED],)
    for level in tl.static_range(DOUBLINGS):
        upper = ()
        for i in tl.static_range(2 ** (DOUBLINGS - 1 - level)):
            upper = upper + (added(sums[2 * i], sums[2 * i + 1]),)
        sums = upper
    return sums


@triton.jit
def finish_pairs(
    call,
    network,
    place,
    start,
    slice_words,
    lanes,
    value,
    count,
    NODES: tl.constexpr,
    FOLDED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    LOCAL: tl.constexpr,
    DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Wait for the partial sums of all other nodes, and add up the tree. Returns (words, call)."""
    bits, call = await_pairs(call, network, place, start, slice_words, lanes, count, NODES, LOCAL, PARTS, WORLD)
    partial = ()
    for node in tl.static_range(NODES):
        partial = partial + (either(place.node == node, value, value_of(bits, node * PARTS, PARTS)),)
    (total,) = summed_by_tree(partial, NODES, FOLDED, DOUBLINGS)
    return rounded(total, DTYPE), call


# -- in 16 bits -------------------------------------------------------------------------------------------------------


@triton.jit
def summed_rounded(
    words, bits, place, NODES: tl.constexpr, FOLDED: tl.constexpr, DOUBLINGS: tl.constexpr, DTYPE: tl.constexpr
):
    """Add up the rounded partial sums of all nodes, this node's being ``words``. Returns the words of the result.

    (None of them is -0.0: partial sums are multiples of the least subnormal, so none rounds to zero.)
    """
    partial = ()
    for node in tl.static_range(NODES):
        partial = partial + (unpack(tl.where(place.node == node, words, bits[node]), DTYPE),)
    (total,) = summed_by_tree(partial, NODES, FOLDED, DOUBLINGS)
    return rounded(total, DTYPE)


@triton.jit
def finish_pairs_16bit(
    call,
    network,
    place,
    start,
    slice_words,
    lanes,
    words,
    count,
    NODES: tl.constexpr,
    FOLDED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    LOCAL: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Wait for the rounded partial sums of all other nodes, and add up the tree. Returns (words, call)."""
    bits, call = await_pairs(call, network, place, start, slice_words, lanes, count, NODES, LOCAL, 1, WORLD)
    return summed_rounded(words, bits, place, NODES, FOLDED, DOUBLINGS, DTYPE), call


@triton.jit
def owns(place, tile, NODES: tl.constexpr):
    """Return 1 in a rank of the node that adds up a tile, else 0."""
    return (tile % NODES == place.node).to(tl.int32)


@triton.jit
def begin_two_shot_16bit(
    call, network, targets, place, tile, start, slice_words, lanes, words, count, NODES: tl.constexpr
):
    """Send the words of the rounded partial sum to the owner of the tile."""
    owner = tile % NODES
    address = targets[0][0]
    pe = targets[0][1]
    for i in tl.static_range(1, NODES - 1):
        chosen = (place.node + 1 + i) % NODES == owner
        address = tl.where(chosen, targets[i][0], address)
        pe = tl.where(chosen, targets[i][1], pe)
    word = slot_of(place.node, owner) * slice_words + start
    put_tiles(call, network, (address, pe), word, lanes, (words,), count * (1 - owns(place, tile, NODES)), 1)


@triton.jit
def finish_two_shot_16bit(
    call,
    network,
    targets,
    place,
    tile,
    start,
    slice_words,
    lanes,
    words,
    count,
    NODES: tl.constexpr,
    FOLDED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    LOCAL: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Add up a tile in its owner, and send the words of the result to all. Theirs have a slot. Returns (words, call)"""
    owned = count * owns(place, tile, NODES)
    bits, call = await_pairs(call, network, place, start, slice_words, lanes, owned, NODES, LOCAL, 1, WORLD)
    words = summed_rounded(words, bits, place, NODES, FOLDED, DOUBLINGS, DTYPE)
    last = (NODES - 1) * slice_words + start
    for i in tl.static_range(NODES - 1):
        put_tiles(call, network, targets[i], last, lanes, (words,), owned, 1)
    owner = tile % NODES * LOCAL + place.local
    came, call = await_tiles(call, network, (last,), lanes, (count - owned,), owner, 0, 1 + (LOCAL > 1), 1, 1, WORLD)
    return tl.where(owns(place, tile, NODES) != 0, words, came[0]), call


# -- halving ----------------------------------------------------------------------------------------------------------


@triton.jit
def still_has(place, tile, step):
    """Return 1 if a rank has a tile before a step of halving, else 0: the lower bits of the leaf are the tile's."""
    return ((place.leaf ^ tile) & ((1 << step) - 1) == 0).to(tl.int32) * (1 - place.extra)


@triton.jit
def gives_away(place, tile, step):
    """Return 1 if a rank that has a tile sends it to its partner in a step, 0 if it gets the partner's."""
    return ((place.leaf ^ tile) >> step) & 1


@triton.jit
def begin_halving(
    call,
    network,
    targets,
    place,
    tile,
    start,
    slice_words,
    lanes,
    value,
    count,
    FOLDED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Send the partial sum of an extra to its pivot, and what any other rank but a pivot gives away in step 0."""
    if FOLDED:
        begin_folded(call, network, targets, place, start, slice_words, lanes, value, count, DOUBLINGS, PARTS)
        count = count * (1 - place.extra - place.pivot)
    count = count * gives_away(place, tile, 0)
    put_tiles(call, network, targets[0], start * PARTS, lanes, bits_of(value, PARTS), count, PARTS)


@triton.jit
def finish_halving(
    call,
    network,
    targets,
    place,
    tile,
    start,
    slice_words,
    lanes,
    value,
    count,
    FOLDED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    LOCAL: tl.constexpr,
    DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Add up a tile in the rank whose leaf has the lowest bits of its number, and spread the words from there.

    A rank that has given a tile away in step s gets its words from the same partner, and passes them on to those that
    gave it theirs in the steps before. It gets them once, so all steps, and folding, share a slot. Returns
    (words, call).
    """
    EARLIER: tl.constexpr = (FOLDED > 0) + (LOCAL > 1)
    slot = slice_words * PARTS
    word = start * PARTS
    if FOLDED:
        value, call = await_folded(
            call, network, place, start, slice_words, lanes, value, count, DOUBLINGS, LOCAL, PARTS, WORLD
        )
        sent = count * place.pivot * gives_away(place, tile, 0)
        put_tiles(call, network, targets[0], word, lanes, bits_of(value, PARTS), sent, PARTS)
    for step in tl.static_range(DOUBLINGS):
        had = count * still_has(place, tile, step)
        away = gives_away(place, tile, step)
        if step > 0:
            put_tiles(call, network, targets[step], word + step * slot, lanes, bits_of(value, PARTS), had * away, PARTS)
        other = partner(place, step, FOLDED, LOCAL)
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
            WORLD,
        )
        value = added_by_leaf(value, value_of(bits, 0, PARTS), place, step)
    words = rounded(value, DTYPE)
    last = (DOUBLINGS + (FOLDED > 0)) * slot + start
    for back in tl.static_range(DOUBLINGS):
        step = DOUBLINGS - 1 - back
        had = count * still_has(place, tile, step)
        away = gives_away(place, tile, step)
        other = partner(place, step, FOLDED, LOCAL)
        came, call = await_tiles(
            call, network, (last,), lanes, (had * away,), other, 0, DOUBLINGS + back + EARLIER, 1, 1, WORLD
        )
        words = tl.where(had * away != 0, came[0], words)
        put_tiles(call, network, targets[DOUBLINGS - 1 - back], last, lanes, (words,), had * (1 - away), 1)
    if FOLDED:
        words, call = unfold(
            call, network, targets[DOUBLINGS], place, last, lanes, words, count, 2 * DOUBLINGS + EARLIER, LOCAL, WORLD
        )
    return words, call
