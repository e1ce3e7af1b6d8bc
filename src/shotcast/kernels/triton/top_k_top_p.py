"""The threshold up to which top_k and top_p keep a row's tokens, in the order of (distance, token), without sorting.

A histogram of distances tells which bins hold the threshold. The tokens in these bins are put in a list, and the
threshold is found in the list digit by digit, as in radix selection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shotcast.kernels.triton.sampling_scores import INTEGERS, distances, weight_of

BINS = tl.constexpr(2048)
"""Number of distance bins: 64 from each power of two to the next, from 2^-9 to 2^23; the first bin also holds smaller
distances."""
BIN_SHIFT = tl.constexpr(17)
BIN_FIRST = tl.constexpr((127 - 9) << 6)
RADIX = tl.constexpr(16)
"""Values per digit of the threshold."""
LAST_SORT_KEY = tl.constexpr(2**63 - 1)
"""A sort key after all others."""


@triton.jit
def sort_key(distance, token, BITS: tl.constexpr):
    """Build an int64 that orders by distance, then by token; tokens have BITS bits."""
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << BITS) | token.to(tl.int64)


@triton.jit
def bin_of(distance):
    """Compute the histogram bin of each distance."""
    index = (distance.to(tl.int32, bitcast=True) >> BIN_SHIFT) - BIN_FIRST
    return tl.minimum(tl.maximum(index, 0), BINS - 1)


@triton.jit
def top_p_weight(total, top_p):
    """Compute the weight at which top_p is reached."""
    return tl.maximum((total.to(tl.float64) * top_p).to(tl.int64), 1)


@triton.jit
def load_top_k_top_p(metadata, row):
    """Load a row's top_k and top_p, and determine whether they can remove any token."""
    k = tl.load(metadata.integers + row * INTEGERS + 1)
    p = tl.load(metadata.top_p + row)
    return k, p, (k > 0) | (p < 1)


@triton.jit
def threshold_bins(bins, row, k, p):
    """Find the bins that may hold the threshold.

    Returns these bins, ``first`` to ``last`` (BINS if no token is removed); the number and weight of the tokens in the
    bins before them; the weight of the row; and whether top_k removes tokens.
    """
    bin = tl.arange(0, BINS)
    counts = tl.load(bins + row * (2 * BINS) + bin)
    weights = tl.load(bins + row * (2 * BINS) + BINS + bin)
    last = tl.sum((tl.cumsum(counts, axis=0) < k).to(tl.int32), axis=0)
    by_count = (k > 0) & (last < BINS)
    first = tl.where(by_count, last, BINS)
    last = first
    if p < 1:
        # The tokens that top_k keeps weigh at least as much as the bins before its own.
        least = top_p_weight(tl.sum(tl.where(bin < first, weights, 0), axis=0), p)
        first = tl.minimum(first, tl.sum((tl.cumsum(weights, axis=0) < least).to(tl.int32), axis=0))
        last = tl.where(by_count, last, first)
    count_before = tl.sum(tl.where(bin < first, counts, 0), axis=0)
    weight_before = tl.sum(tl.where(bin < first, weights, 0), axis=0)
    return first, last, count_before, weight_before, tl.sum(weights, axis=0), by_count


@triton.jit
def load_sort_keys(row_data, largest, listed, start, SHAPE: tl.constexpr):
    """Load SHAPE.BLOCK sort keys of the threshold bins, starting at ``start``, and their distances.

    They come from the list, or from the row itself if the list overflowed.
    """
    list, length, first, last = listed
    i = start + tl.arange(0, SHAPE.BLOCK)
    if length <= SHAPE.CAPACITY:
        keys = tl.load(list + i, mask=i < length, other=LAST_SORT_KEY)
    else:
        distance = distances(row_data, largest, i, i < SHAPE.VOCAB)
        in_bins = (distance < float("inf")) & (bin_of(distance) >= first) & (bin_of(distance) <= last)
        keys = tl.where(in_bins, sort_key(distance, i, SHAPE.BITS), LAST_SORT_KEY)
    bits = tl.where(keys == LAST_SORT_KEY, 0x7F800000, (keys >> SHAPE.BITS).to(tl.int32))
    return keys, bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_up_to(row_data, largest, listed, end, threshold, SHAPE: tl.constexpr):
    """Compute the weight of the listed tokens up to ``threshold``."""
    BLOCK: tl.constexpr = SHAPE.BLOCK
    weight = tl.zeros([BLOCK], tl.int64)
    for start in range(0, end, BLOCK):
        keys, distance = load_sort_keys(row_data, largest, listed, start, SHAPE)
        weight += tl.where(keys <= threshold, weight_of(distance), 0)
    return tl.sum(weight, axis=0)


@triton.jit
def amounts_of(distance, BY_WEIGHT: tl.constexpr):
    """Return each token's weight with BY_WEIGHT, else 1."""
    return weight_of(distance) if BY_WEIGHT else tl.full(distance.shape, 1, tl.int64)


@triton.jit
def amounts_below(keys, amounts, bounds):
    """Sum the amounts of the keys below each bound."""
    return tl.sum(tl.where(keys[:, None] < bounds[None, :], amounts[:, None], 0), axis=0)


@triton.jit
def find_threshold(row_data, largest, listed, end, wanted, BY_WEIGHT: tl.constexpr, SHAPE: tl.constexpr):
    """Find the first sort key up to which the list has ``wanted`` tokens or, with BY_WEIGHT, that weight (at least
    1)."""
    BITS: tl.constexpr = SHAPE.BITS
    BLOCK: tl.constexpr = SHAPE.BLOCK
    DIGITS: tl.constexpr = (31 + BITS + 3) // 4
    DIGITS_IN_BIN: tl.constexpr = (BIN_SHIFT + BITS + 3) // 4
    _, _, first, last = listed
    # The keys of one bin begin with the bits of that bin; the bins at the ends, which have no bounds, are exceptions.
    same_prefix = (first == last) & (first > 0) & (first < BINS - 1)
    threshold = tl.where(same_prefix, (first + BIN_FIRST).to(tl.int64) << (BIN_SHIFT + BITS), 0)
    digits = tl.where(same_prefix, DIGITS_IN_BIN, DIGITS)
    if end <= BLOCK:  # the list stays in registers
        keys, distance = load_sort_keys(row_data, largest, listed, 0, SHAPE)
        amounts = amounts_of(distance, BY_WEIGHT)
        for digit in range(digits):
            shift = (digits - 1 - digit) * 4
            bounds = threshold + (tl.arange(0, RADIX).to(tl.int64) << shift)
            below = amounts_below(keys, amounts, bounds)
            threshold += (tl.sum((below < wanted).to(tl.int64), axis=0) - 1) << shift
    else:
        for digit in range(digits):
            shift = (digits - 1 - digit) * 4
            bounds = threshold + (tl.arange(0, RADIX).to(tl.int64) << shift)
            below = tl.zeros([RADIX], tl.int64)
            for start in range(0, end, BLOCK):
                keys, distance = load_sort_keys(row_data, largest, listed, start, SHAPE)
                below += amounts_below(keys, amounts_of(distance, BY_WEIGHT), bounds)
            threshold += (tl.sum((below < wanted).to(tl.int64), axis=0) - 1) << shift
    return threshold
