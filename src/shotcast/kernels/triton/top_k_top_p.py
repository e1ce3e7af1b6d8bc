"""The element up to which top_k and top_p keep a row's tokens, in the order of (distance, token). Nothing is sorted.

Bins tell between which distances it is; what is there is in a list, where the cut is found digit by digit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast.kernels.triton.sampling_scores import INTEGERS, distances, weight_of

BINS = tl.constexpr(2048)
"""Ranges of distances: 64 from each power of two to the next, from 2^-9 (the first has less too) to 2^23."""
BIN_SHIFT = tl.constexpr(17)
BIN_FIRST = tl.constexpr((127 - 9) << 6)
FAN = tl.constexpr(16)
"""Values of a digit of the cut."""
NOTHING = tl.constexpr(2**63 - 1)
"""An element after all others."""


@triton.jit
def element(distance, token, BITS: tl.constexpr):
    """An int64 in the order of distances, and then of tokens, which have BITS bits."""
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << BITS) | token.to(tl.int64)


@triton.jit
def bin_of(distance):
    place = (distance.to(tl.int32, bitcast=True) >> BIN_SHIFT) - BIN_FIRST
    return tl.minimum(tl.maximum(place, 0), BINS - 1)


@triton.jit
def reach_of(total, top_p):
    """The weight with which top_p is reached."""
    return tl.maximum((total.to(tl.float64) * top_p).to(tl.int64), 1)


@triton.jit
def cuts_of(integers, top_p, row):
    """top_k and top_p, and whether they may cut anything."""
    k = tl.load(integers + row * INTEGERS + 1)
    p = tl.load(top_p + row)
    return k, p, (k > 0) | (p < 1)


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
