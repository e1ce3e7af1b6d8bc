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

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import num_sms
from shotcast.kernels.triton.sampling_scores import (
    INTEGERS,
    NOBODY,
    REALS,
    STATE,
    distances,
    entry,
    has_penalties,
    highest,
    keys_of,
    largest_of,
    noise,
    penalised,
    race,
    source_of,
    token_of,
    value_of,
    weight_of,
)
from shotcast.kernels.triton.top_k_top_p import (
    BINS,
    NOTHING,
    bin_of,
    bracket,
    cuts_of,
    element,
    elements,
    find_cut,
    reach_of,
    weight_up_to,
)

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


@triton.jit
def span(VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The first of the tokens that program (row, part) has, and the end: whole tiles."""
    tiles: tl.constexpr = (VOCAB + TILE - 1) // TILE
    width = tl.cdiv(tiles, tl.num_programs(1)) * TILE
    first = tl.program_id(1) * width
    return first, tl.minimum(first + width, VOCAB)


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
    parts = min(triton.cdiv(vocab, TILE), triton.cdiv(PROGRAMS * num_sms(logits.device), count))
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
