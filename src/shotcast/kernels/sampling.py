"""Tokens drawn from rows of logits, whatever each row asks for: two launches, three if a row has cuts (top_k or top_p),
and one more if a row has penalties.

    distance = (largest logit - logit) * (1 / temperature)
    weight   = exp(-distance)
    score    = -distance - log(time), the time a hash of key and token, exponentially distributed
    token    = argmax of the scores of what top_k, top_p and min_p keep

Nothing is sorted. In the order of (distance, token), top_k and top_p keep what comes up to one element, the cut:

1. :func:`largest_kernel`, with penalties: the largest logit that they leave.
2. :func:`bins_kernel`, with cuts: how many tokens, and what weight, is in each of BINS ranges of distances.
3. :func:`race_kernel`: the bins tell where the cut may be. Tokens before these race; tokens in these go to a list.
4. :func:`finish_kernel`: finds the cut in the list, lets the tokens up to it race the winner, and enters who wins.

Programs meet in sums and maxima of integers, which depend on no order, and so no result does. Weights are summed in
units of 2^-44 of the largest, each rounded down: those of 2^18 tokens are off by less than 2^-26. Draws differ from the
CPU's only by how exp and log are rounded, a few parts in 2^23: between two scores, or at a cut, that are as close as
that. A row that holds NaN or plus infinity is given some token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shotcast.kernels.target import processors

BINS = tl.constexpr(2048)
"""Ranges of distances: 64 from each power of two to the next, from 2^-9 (the first has less too) to 2^23."""
BIN_SHIFT = tl.constexpr(17)
BIN_FIRST = tl.constexpr((127 - 9) << 6)
FAN = tl.constexpr(16)
"""Values of a digit of the cut."""
UNIT = tl.constexpr(2.0**44)
"""Units of weight of the likeliest token."""
STEEP = tl.constexpr(2.0**-23 * math.log(2.0))
HIGHEST = tl.constexpr((127 + 31) * math.log(2.0) + 0.01)
"""Of :func:`highest`; 0.01 is more than all that is rounded."""
NOTHING = tl.constexpr(2**63 - 1)
"""An element after all others."""
NOBODY = tl.constexpr(-(2**63) + 2**31 - 1)
"""An entry below all others, of token 0."""
INTEGERS, REALS, STATE = tl.constexpr(4), tl.constexpr(5), tl.constexpr(3)
"""Columns of :class:`Rows`."""

TILE = 512
"""Tokens that a program has at once."""
BLOCK = 512
"""Elements of a list that a program has at once."""
CAPACITY = 8192
"""Elements of a list; where there are more, the row itself is searched. Of normally distributed logits, 4% are in a bin
at most: 5000 of 128K."""
PROGRAMS = 8
"""Of a processor, if rows can be divided among so many."""
WARPS, FINISH_WARPS = 4, 16
"""Of programs that have tiles, and of the one that finishes a row."""
OPTIONS = {"enable_fp_fusion": False}
"""As the CPU computes: no product is added without being rounded."""


class Rows(NamedTuple):
    """What rows ask for. Of a greedy row, cuts are not looked at: its ``top_k`` is 0 and its ``top_p`` 1.

    Attributes:
        integers: int32 [rows, 4]: slot; top_k, 0 for all; two words that key the noise.
        reals: float32 [rows, 5]: 1 / temperature, 0 for greedy; the distance beyond which min_p drops tokens; presence
            and frequency penalty; the distance beyond which top_p keeps none.
        top_p: float64 [rows].
        state: int64 [rows, 3], START in each row: entries of the largest logit and of the winner, length of the list.
    """

    integers: torch.Tensor
    reals: torch.Tensor
    top_p: torch.Tensor
    state: torch.Tensor


START = NOBODY.value, NOBODY.value, 0


# -- numbers ----------------------------------------------------------------------------------------------------------


@triton.jit
def entry(value, token):
    """An int64 in the order of float32 values; of equal ones, that of the lower token is larger."""
    bits = value.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(made):
    return 0x7FFFFFFF - (made & 0x7FFFFFFF)


@triton.jit
def value_of(made):
    order = (made >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def element(distance, token, BITS: tl.constexpr):
    """An int64 in the order of distances, and then of tokens, which have BITS bits."""
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << BITS) | token.to(tl.int64)


@triton.jit
def bin_of(distance):
    place = (distance.to(tl.int32, bitcast=True) >> BIN_SHIFT) - BIN_FIRST
    return tl.minimum(tl.maximum(place, 0), BINS - 1)


@triton.jit
def weight_of(distance):
    return (tl.exp(-distance) * UNIT).to(tl.int64)


@triton.jit
def reach_of(total, top_p):
    """The weight with which top_p is reached."""
    return tl.maximum((total.to(tl.float64) * top_p).to(tl.int64), 1)


@triton.jit
def scramble(x, first, second):
    """``engine.draw.scramble`` of uint32."""
    x ^= first
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x ^= second
    x *= 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def noise(token, keys):
    """31 bits, uniform."""
    first, second = keys
    return (scramble(scramble(token.to(tl.uint32, bitcast=True), 0, 0), first, second) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def uniform_of(bits):
    """In units of 2^-31."""
    return bits.to(tl.float32) + 0.5


@triton.jit
def highest(distance, bits):
    """What scores are no higher than, for a third of the work: a time is not below its uniform number, nor the
    logarithm of a number below the bits of its float read as a number."""
    number = uniform_of(bits).to(tl.int32, bitcast=True).to(tl.float32)
    return -distance + HIGHEST - number * STEEP


@triton.jit
def race(distance, token, bits):
    """Entries of scores; the time is ``engine.draw.exponential``'s of ``bits``, which are the token's :func:`noise`."""
    uniform = uniform_of(bits) * (2.0**-31)
    uniform = tl.minimum(uniform, 1 - 2.0**-24)
    # log1p: by what 1 - uniform is rounded, its logarithm is off in proportion
    left = 1.0 - uniform
    gone = 1.0 - left
    tiny = gone == 0
    time = tl.where(tiny, uniform, -tl.log(left) * tl.div_rn(uniform, tl.where(tiny, 1.0, gone)))
    return entry(-distance - tl.log(time), token)


# -- rows -------------------------------------------------------------------------------------------------------------


@triton.jit
def source_of(logits, counts, integers, reals, row, VOCAB: tl.constexpr):
    """Where a row's logits and counts begin; its presence and frequency penalty, and 1 / its temperature."""
    slot = tl.load(integers + row * INTEGERS).to(tl.int64)
    mine = reals + row * REALS
    return logits + row * VOCAB, counts + slot * VOCAB, tl.load(mine + 2), tl.load(mine + 3), tl.load(mine)


@triton.jit
def has_penalties(source):
    return (source[2] != 0) | (source[3] != 0)


@triton.jit
def penalised(source, token, inside):
    """Logits after penalties; minus infinity where not ``inside``."""
    logits, counts, presence, frequency, _ = source
    value = tl.load(logits + token, mask=inside, other=float("-inf"))
    if has_penalties(source):
        count = tl.load(counts + token, mask=inside, other=0)
        value = value - (tl.where(count > 0, presence, 0.0) + count.to(tl.float32) * frequency)
    return value


@triton.jit
def largest_of(source, best, state, row):
    """The row's largest logit after penalties, and its token."""
    if has_penalties(source):
        made = tl.load(state + row * STATE)
        token = token_of(made)
        value = value_of(made)
    else:
        token = tl.load(best + row * 2)
        value = tl.load(source[0] + token)
    return value, token


@triton.jit
def distances(source, largest, token, inside):
    """Infinite where not ``inside``."""
    # abs, for the sign of a zero
    return tl.abs((largest - penalised(source, token, inside)) * source[4])


@triton.jit
def span(VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The first of the tokens that program (row, part) has, and the end: whole tiles."""
    tiles: tl.constexpr = (VOCAB + TILE - 1) // TILE
    width = tl.cdiv(tiles, tl.num_programs(1)) * TILE
    first = tl.program_id(1) * width
    return first, tl.minimum(first + width, VOCAB)


@triton.jit
def cuts_of(integers, top_p, row):
    """top_k and top_p, and whether they may cut anything."""
    k = tl.load(integers + row * INTEGERS + 1)
    p = tl.load(top_p + row)
    return k, p, (k > 0) | (p < 1)


@triton.jit
def keys_of(integers, row):
    mine = integers + row * INTEGERS
    return tl.load(mine + 2).to(tl.uint32, bitcast=True), tl.load(mine + 3).to(tl.uint32, bitcast=True)


@triton.jit
def bracket(bins, row, k, p):
    """Where the cut may be: in bins ``first`` to ``last``, BINS if nothing is cut.

    Returns:
        ``first`` and ``last``; tokens and weight of the bins before; weight of the row; whether top_k cuts.
    """
    bin = tl.arange(0, BINS)
    amounts = tl.load(bins + row * (2 * BINS) + bin)
    weights = tl.load(bins + row * (2 * BINS) + BINS + bin)
    last = tl.sum((tl.cumsum(amounts, axis=0) < k).to(tl.int32), axis=0)
    by_count = (k > 0) & (last < BINS)
    first = tl.where(by_count, last, BINS)
    last = first
    if p < 1:
        # What top_k keeps weighs no less than what is before its bin.
        least = reach_of(tl.sum(tl.where(bin < first, weights, 0), axis=0), p)
        first = tl.minimum(first, tl.sum((tl.cumsum(weights, axis=0) < least).to(tl.int32), axis=0))
        last = tl.where(by_count, last, first)
    amount = tl.sum(tl.where(bin < first, amounts, 0), axis=0)
    weight = tl.sum(tl.where(bin < first, weights, 0), axis=0)
    return first, last, amount, weight, tl.sum(weights, axis=0), by_count


@triton.jit
def elements(
    source, largest, listed, start, VOCAB: tl.constexpr, BITS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK elements between bins, from ``start`` on, and their distances: of the list, or if it is full of the row."""
    list, length, first, last = listed
    i = start + tl.arange(0, BLOCK)
    if length <= CAPACITY:
        made = tl.load(list + i, mask=i < length, other=NOTHING)
    else:
        distance = distances(source, largest, i, i < VOCAB)
        between = (distance < float("inf")) & (bin_of(distance) >= first) & (bin_of(distance) <= last)
        made = tl.where(between, element(distance, i, BITS), NOTHING)
    bits = tl.where(made == NOTHING, 0x7F800000, (made >> BITS).to(tl.int32))
    return made, bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_up_to(
    source,
    largest,
    listed,
    end,
    cut,
    VOCAB: tl.constexpr,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of the elements of the list up to ``cut``."""
    weight = tl.zeros([BLOCK], tl.int64)
    for start in range(0, end, BLOCK):
        made, distance = elements(source, largest, listed, start, VOCAB, BITS, CAPACITY, BLOCK)
        weight += tl.where(made <= cut, weight_of(distance), 0)
    return tl.sum(weight, axis=0)


@triton.jit
def amounts(distance, WEIGHS: tl.constexpr):
    return weight_of(distance) if WEIGHS else tl.full(distance.shape, 1, tl.int64)


@triton.jit
def amount_before(made, each, bounds):
    """What elements before each of the bounds amount to."""
    return tl.sum(tl.where(made[:, None] < bounds[None, :], each[:, None], 0), axis=0)


@triton.jit
def find_cut(
    source,
    largest,
    listed,
    end,
    wanted,
    WEIGHS: tl.constexpr,
    VOCAB: tl.constexpr,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first element up to which the list has ``wanted`` elements, with WEIGHS that weight; at least 1."""
    DIGITS: tl.constexpr = (31 + BITS + 3) // 4
    IN_BIN: tl.constexpr = (BIN_SHIFT + BITS + 3) // 4
    _, _, first, last = listed
    # Elements of one bin, but for those at the ends, which have no bounds, begin with its bits.
    alike = (first == last) & (first > 0) & (first < BINS - 1)
    cut = tl.where(alike, (first + BIN_FIRST).to(tl.int64) << (BIN_SHIFT + BITS), 0)
    digits = tl.where(alike, IN_BIN, DIGITS)
    if end <= BLOCK:  # it stays in registers
        made, distance = elements(source, largest, listed, 0, VOCAB, BITS, CAPACITY, BLOCK)
        each = amounts(distance, WEIGHS)
        for digit in range(digits):
            shift = (digits - 1 - digit) * 4
            bounds = cut + (tl.arange(0, FAN).to(tl.int64) << shift)
            before = amount_before(made, each, bounds)
            cut += (tl.sum((before < wanted).to(tl.int64), axis=0) - 1) << shift
    else:
        for digit in range(digits):
            shift = (digits - 1 - digit) * 4
            bounds = cut + (tl.arange(0, FAN).to(tl.int64) << shift)
            before = tl.zeros([FAN], tl.int64)
            for start in range(0, end, BLOCK):
                made, distance = elements(source, largest, listed, start, VOCAB, BITS, CAPACITY, BLOCK)
                before += amount_before(made, amounts(distance, WEIGHS), bounds)
            cut += (tl.sum((before < wanted).to(tl.int64), axis=0) - 1) << shift
    return cut


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def largest_kernel(logits, counts, integers, reals, state, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Program (row, part): of a row with penalties, the entry of its largest logit."""
    row = tl.program_id(0).to(tl.int64)
    source = source_of(logits, counts, integers, reals, row, VOCAB)
    if has_penalties(source):
        first, end = span(VOCAB, TILE)
        largest = tl.full([TILE], NOBODY, tl.int64)
        for start in range(first, end, TILE):
            token = start + tl.arange(0, TILE)
            value = penalised(source, token, token < end)
            value = tl.where(value == 0, 0.0, value)
            largest = tl.maximum(largest, tl.where(token < end, entry(value, token), NOBODY))
        tl.atomic_max(state + row * STATE, tl.max(largest, axis=0), sem="relaxed")


@triton.jit
def bins_kernel(logits, best, counts, integers, reals, top_p, state, bins, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Program (row, part): adds tokens of a row with cuts to its bins, [2, BINS]: their number, and their weight.

    Weights beyond where top_p keeps none come to the last bin, together.
    """
    row = tl.program_id(0).to(tl.int64)
    k, p, cuts = cuts_of(integers, top_p, row)
    if cuts:
        source = source_of(logits, counts, integers, reals, row, VOCAB)
        largest, _ = largest_of(source, best, state, row)
        beyond = tl.load(reals + row * REALS + 4)
        mine = bins + row * (2 * BINS)
        rest = tl.zeros([TILE], tl.int64)
        first, end = span(VOCAB, TILE)
        for start in range(first, end, TILE):
            token = start + tl.arange(0, TILE)
            distance = distances(source, largest, token, token < end)
            there = distance < float("inf")
            if k > 0:
                tl.atomic_add(mine + bin_of(distance), tl.full([TILE], 1, tl.int64), mask=there, sem="relaxed")
            if p < 1:
                weight = tl.where(there, weight_of(distance), 0)
                near = there & (distance <= beyond)
                tl.atomic_add(mine + BINS + bin_of(distance), weight, mask=near, sem="relaxed")
                rest += tl.where(near, 0, weight)
        if p < 1:
            tl.atomic_add(mine + 2 * BINS - 1, tl.sum(rest, axis=0), sem="relaxed")


@triton.jit
def race_kernel(
    logits,
    best,
    counts,
    integers,
    reals,
    top_p,
    state,
    bins,
    lists,
    VOCAB: tl.constexpr,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, part): lets tokens before the bins of the cut race, and puts those in these bins into the list."""
    row = tl.program_id(0).to(tl.int64)
    source = source_of(logits, counts, integers, reals, row, VOCAB)
    if source[4] > 0:
        k, p, cuts = cuts_of(integers, top_p, row)
        first_bin, last_bin = tl.full([], BINS, tl.int32), tl.full([], BINS, tl.int32)
        if cuts:
            first_bin, last_bin, _, _, _, _ = bracket(bins, row, k, p)
        largest, likeliest = largest_of(source, best, state, row)
        farthest = tl.load(reals + row * REALS + 1)
        keys = keys_of(integers, row)
        # Nothing cuts the likeliest, so no lower score wins.
        likeliest = likeliest.to(tl.int32)
        winner = race((likeliest * 0).to(tl.float32), likeliest, noise(likeliest, keys))
        first, end = span(VOCAB, TILE)
        for start in range(first, end, TILE):
            token = start + tl.arange(0, TILE)
            distance = distances(source, largest, token, token < end)
            there = distance < float("inf")
            bin = bin_of(distance)
            bits = noise(token, keys)
            may_win = highest(distance, bits) >= value_of(winner)
            races = there & (bin < first_bin) & (distance <= farthest) & may_win
            if tl.max(races.to(tl.int32), axis=0) > 0:
                entries = tl.where(races, race(distance, token, bits), NOBODY)
                winner = tl.maximum(winner, tl.max(entries, axis=0))
            between = (there & (bin >= first_bin) & (bin <= last_bin)).to(tl.int32)
            amount = tl.sum(between, axis=0)
            if amount > 0:
                place = tl.atomic_add(state + row * STATE + 2, amount.to(tl.int64), sem="relaxed")
                place += tl.cumsum(between, axis=0) - between
                mask = (between > 0) & (place < CAPACITY)
                tl.store(lists + row * CAPACITY + place, element(distance, token, BITS), mask=mask)
        tl.atomic_max(state + row * STATE + 1, winner, sem="relaxed")


@triton.jit
def finish_kernel(
    logits,
    best,
    counts,
    integers,
    reals,
    top_p,
    state,
    bins,
    lists,
    told,
    drawn,
    VOCAB: tl.constexpr,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row): its token, to ``told`` and ``drawn``; and counts it if the row has penalties."""
    row = tl.program_id(0).to(tl.int64)
    source = source_of(logits, counts, integers, reals, row, VOCAB)
    largest, token = largest_of(source, best, state, row)
    if source[4] > 0:
        winner = tl.load(state + row * STATE + 1)
        k, p, _ = cuts_of(integers, top_p, row)
        length = tl.load(state + row * STATE + 2)
        if length > 0:
            first, last, amount, weight, total, by_count = bracket(bins, row, k, p)
            listed = (lists + row * CAPACITY, length, first, last)
            end = tl.where(length <= CAPACITY, length, VOCAB).to(tl.int32)
            cut = tl.full([], NOTHING - 1, tl.int64)
            if by_count:
                cut = find_cut(source, largest, listed, end, k - amount, False, VOCAB, BITS, CAPACITY, BLOCK)
                total = weight + weight_up_to(source, largest, listed, end, cut, VOCAB, BITS, CAPACITY, BLOCK)
            if p < 1:
                wanted = reach_of(total, p) - weight
                by_weight = find_cut(source, largest, listed, end, wanted, True, VOCAB, BITS, CAPACITY, BLOCK)
                cut = tl.minimum(cut, by_weight)
            farthest = tl.load(reals + row * REALS + 1)
            keys = keys_of(integers, row)
            for start in range(0, end, BLOCK):
                made, distance = elements(source, largest, listed, start, VOCAB, BITS, CAPACITY, BLOCK)
                races = (made <= cut) & (distance <= farthest)
                listed_token = (made & ((1 << BITS) - 1)).to(tl.int32)
                one = race(distance, listed_token, noise(listed_token, keys))
                winner = tl.maximum(winner, tl.max(tl.where(races, one, NOBODY), axis=0))
        token = token_of(winner)
    tl.store(told + row * 2, token)
    tl.store(told + row * 2 + 1, tl.load(best + row * 2 + 1))
    tl.store(drawn + tl.load(integers + row * INTEGERS), token)
    if has_penalties(source):
        place = source[1] + token
        tl.store(place, tl.load(place) + 1)


def draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    rows: Rows,
    counts: torch.Tensor | None,
    drawn: torch.Tensor,
    cuts: bool,
) -> torch.Tensor:
    """Draw a token for each row, enter it into ``drawn`` at the row's slot, and count it in rows with penalties.

    Args:
        logits: contiguous float32 [rows, vocab], vocab at most 2^18.
        best: contiguous int64 [rows, 2], the token of the largest logit of each row, and what else is known of it.
        rows: what they ask for, on the device; no slot comes twice.
        counts: int32 [slots, vocab], of each token in each output; None if no row has penalties.
        drawn: int64 [slots or more].
        cuts: whether a row has top_k or top_p.

    Returns:
        int64 [rows, 2]: the token drawn, and what ``best`` knows.
    """
    count, vocab = logits.shape
    told = torch.empty_like(best)
    parts = min(triton.cdiv(vocab, TILE), triton.cdiv(PROGRAMS * processors(logits.device), count))
    # Where nothing is cut or counted nothing is read; but kernels for other types would have to be compiled.
    bins = torch.zeros((count, 2, BINS.value) if cuts else 1, dtype=torch.int64, device=logits.device)
    lists = torch.empty((count, CAPACITY) if cuts else 1, dtype=torch.int64, device=logits.device)
    of = (rows.integers if counts is None else counts), rows.integers, rows.reals
    options = OPTIONS | {"num_warps": WARPS}
    bits = (vocab - 1).bit_length()
    if counts is not None:
        largest_kernel[(count, parts)](logits, *of, rows.state, vocab, TILE, **options)
    if cuts:
        bins_kernel[(count, parts)](logits, best, *of, rows.top_p, rows.state, bins, vocab, TILE, **options)
    common = logits, best, *of, rows.top_p, rows.state, bins, lists
    race_kernel[(count, parts)](*common, vocab, bits, CAPACITY, TILE, **options)
    options["num_warps"] = FINISH_WARPS
    finish_kernel[(count,)](*common, told, drawn, vocab, bits, CAPACITY, BLOCK, **options)
    return told
