"""Sampling of one token per row of logits, with separate parameters for each row.

Two launches; three if a row has top_k or top_p, and one more if a row has penalties or is constrained.

    distance = (largest logit - logit) * (1 / temperature)
    weight   = exp(-distance)
    score    = -distance - log(time), where the time is a hash of key and token, exponentially distributed
    token    = argmax of the scores of the tokens that top_k, top_p and min_p keep

This is the Gumbel-max trick. Nothing is sorted. In the order of (distance, token), top_k and top_p keep the tokens up
to a threshold:

1. :func:`penalised_max_kernel`, with penalties or constraints: finds the largest logit after applying them.
2. :func:`histogram_kernel`, with top_k or top_p: sums the number and the weight of the tokens in each of BINS ranges of
   distances.
3. :func:`candidates_kernel`: the histogram tells which bins may hold the threshold. Tokens in the bins before these
   compete by their scores; tokens in these bins go to a list.
4. :func:`finish_kernel`: finds the threshold in the list, compares the listed tokens up to it with the best so far, and
   writes the sampled token.

Programs combine their results by sums and maxima of integers, which do not depend on the order, so the results do not
either. Weights are summed in units of 2^-44 of the largest, each rounded down: the sum over 2^18 tokens is off by less
than 2^-26. The sampled tokens can differ from the CPU's only through the rounding of exp and log, a few parts in 2^23:
two scores, or a score and a threshold, must be that close. A row that holds NaN or plus infinity gets an arbitrary
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import num_sms
from shotcast.kernels.triton.sampling_scores import (
    INTEGERS,
    LOWEST_KEY,
    REALS,
    STATE,
    argmax_key,
    distances,
    has_penalties,
    is_adjusted,
    key_token,
    key_value,
    load_largest,
    load_row,
    noise,
    noise_keys,
    penalised_logits,
    score_bound,
    score_key,
    weight_of,
)
from shotcast.kernels.triton.top_k_top_p import (
    BINS,
    LAST_SORT_KEY,
    bin_of,
    find_threshold,
    load_sort_keys,
    load_top_k_top_p,
    sort_key,
    threshold_bins,
    top_p_weight,
    weight_up_to,
)

TILE = 512
"""Tokens that a program processes at once."""
BLOCK = 512
"""List elements that a program processes at once."""
CAPACITY = 8192
"""Capacity of a list in elements; if there are more, the row itself is searched. With normally distributed logits, a
bin holds at most 4%: 5000 of 128K."""
PROGRAMS_PER_SM = 8
"""Programs launched per SM, if rows can be divided among that many."""
WARPS, FINISH_WARPS = 4, 16
"""Warps of the programs that process tiles, and of the program that finishes a row."""
OPTIONS = {"enable_fp_fusion": False}
"""Compiler options: every product is rounded before it is added, as on the CPU."""


class SamplingMetadata(NamedTuple):
    """The sampling parameters of each row. A greedy row has ``top_k`` 0 and ``top_p`` 1."""

    # int32 [rows, 5]: slot; top_k, 0 for all tokens; two words that key the noise; the row of the masks, -1 for a row
    # without constraints
    integers: torch.Tensor
    # float32 [rows, 6]: 1 / temperature, 0 for greedy; the distance beyond which min_p drops tokens; presence and
    # frequency penalty; the distance beyond which top_p keeps no token; repetition penalty
    reals: torch.Tensor
    top_p: torch.Tensor  # float64 [rows]
    # int64 [rows, 3], INITIAL_STATE in each row: the :func:`argmax_key` of the largest logit and of the best score so
    # far, and the length of the list
    state: torch.Tensor


INITIAL_STATE = LOWEST_KEY.value, LOWEST_KEY.value, 0


@dataclass(frozen=True, slots=True)
class SamplingShape:
    """The SHAPE argument of these kernels, whose ``metadata`` is a :class:`SamplingMetadata`.

    BITS: the bits of a token number. CAPACITY, TILE, BLOCK: the constants of this module.
    """

    VOCAB: int
    BITS: int
    CAPACITY: int
    TILE: int
    BLOCK: int


@triton.jit
def token_range(SHAPE: tl.constexpr):
    """Compute the first token of program (row, part) and the end of its tokens, in whole tiles."""
    tiles: tl.constexpr = (SHAPE.VOCAB + SHAPE.TILE - 1) // SHAPE.TILE
    width = tl.cdiv(tiles, tl.num_programs(1)) * SHAPE.TILE
    first = tl.program_id(1) * width
    return first, tl.minimum(first + width, SHAPE.VOCAB)


@triton.jit
def penalised_max_kernel(logits, counts, masks, metadata, SHAPE: tl.constexpr):
    """Program (row, part): find the :func:`argmax_key` of the largest logit of an adjusted row."""
    row = tl.program_id(0).to(tl.int64)
    row_data = load_row(logits, counts, masks, metadata, row, SHAPE.VOCAB)
    if is_adjusted(row_data):
        TILE: tl.constexpr = SHAPE.TILE
        first, end = token_range(SHAPE)
        largest = tl.full([TILE], LOWEST_KEY, tl.int64)
        for start in range(first, end, TILE):
            token = start + tl.arange(0, TILE)
            value = penalised_logits(row_data, token, token < end)
            value = tl.where(value == 0, 0.0, value)
            largest = tl.maximum(largest, tl.where(token < end, argmax_key(value, token), LOWEST_KEY))
        tl.atomic_max(metadata.state + row * STATE, tl.max(largest, axis=0), sem="relaxed")


@triton.jit
def histogram_kernel(logits, best, counts, masks, metadata, bins, SHAPE: tl.constexpr):
    """Program (row, part): add the tokens of a row with top_k or top_p to its bins, [2, BINS]: numbers and weights.

    Weights past the distance at which top_p keeps no token are summed and go to the last bin.
    """
    row = tl.program_id(0).to(tl.int64)
    k, p, truncates = load_top_k_top_p(metadata, row)
    if truncates:
        row_data = load_row(logits, counts, masks, metadata, row, SHAPE.VOCAB)
        largest, _ = load_largest(row_data, best, metadata.state, row)
        top_p_distance = tl.load(metadata.reals + row * REALS + 4)
        row_bins = bins + row * (2 * BINS)
        TILE: tl.constexpr = SHAPE.TILE
        rest = tl.zeros([TILE], tl.int64)
        first, end = token_range(SHAPE)
        for start in range(first, end, TILE):
            token = start + tl.arange(0, TILE)
            distance = distances(row_data, largest, token, token < end)
            valid = distance < float("inf")
            if k > 0:
                tl.atomic_add(row_bins + bin_of(distance), tl.full([TILE], 1, tl.int64), mask=valid, sem="relaxed")
            if p < 1:
                weight = tl.where(valid, weight_of(distance), 0)
                near = valid & (distance <= top_p_distance)
                tl.atomic_add(row_bins + BINS + bin_of(distance), weight, mask=near, sem="relaxed")
                rest += tl.where(near, 0, weight)
        if p < 1:
            tl.atomic_add(row_bins + 2 * BINS - 1, tl.sum(rest, axis=0), sem="relaxed")


@triton.jit
def candidates_kernel(logits, best, counts, masks, metadata, bins, lists, SHAPE: tl.constexpr):
    """Program (row, part): find the best score before the threshold bins, and list the tokens in these bins."""
    row = tl.program_id(0).to(tl.int64)
    row_data = load_row(logits, counts, masks, metadata, row, SHAPE.VOCAB)
    if row_data[4] > 0:
        k, p, truncates = load_top_k_top_p(metadata, row)
        first_bin, last_bin = tl.full([], BINS, tl.int32), tl.full([], BINS, tl.int32)
        if truncates:
            first_bin, last_bin, _, _, _, _ = threshold_bins(bins, row, k, p)
        largest, likeliest = load_largest(row_data, best, metadata.state, row)
        min_p_distance = tl.load(metadata.reals + row * REALS + 1)
        keys = noise_keys(metadata.integers, row)
        # The likeliest token is always kept, so no lower score can win.
        likeliest = likeliest.to(tl.int32)
        winner = score_key((likeliest * 0).to(tl.float32), likeliest, noise(likeliest, keys))
        TILE: tl.constexpr = SHAPE.TILE
        first, end = token_range(SHAPE)
        for start in range(first, end, TILE):
            token = start + tl.arange(0, TILE)
            distance = distances(row_data, largest, token, token < end)
            valid = distance < float("inf")
            bin = bin_of(distance)
            bits = noise(token, keys)
            may_win = score_bound(distance, bits) >= key_value(winner)
            competes = valid & (bin < first_bin) & (distance <= min_p_distance) & may_win
            if tl.max(competes.to(tl.int32), axis=0) > 0:
                score_keys = tl.where(competes, score_key(distance, token, bits), LOWEST_KEY)
                winner = tl.maximum(winner, tl.max(score_keys, axis=0))
            in_bins = (valid & (bin >= first_bin) & (bin <= last_bin)).to(tl.int32)
            count = tl.sum(in_bins, axis=0)
            if count > 0:
                index = tl.atomic_add(metadata.state + row * STATE + 2, count.to(tl.int64), sem="relaxed")
                index += tl.cumsum(in_bins, axis=0) - in_bins
                mask = (in_bins > 0) & (index < SHAPE.CAPACITY)
                tl.store(lists + row * SHAPE.CAPACITY + index, sort_key(distance, token, SHAPE.BITS), mask=mask)
        tl.atomic_max(metadata.state + row * STATE + 1, winner, sem="relaxed")


@triton.jit
def finish_kernel(logits, best, counts, masks, metadata, bins, lists, out, last_tokens, SHAPE: tl.constexpr):
    """Program (row): write its token to ``out`` and ``last_tokens``, and count it if the row has penalties."""
    row = tl.program_id(0).to(tl.int64)
    row_data = load_row(logits, counts, masks, metadata, row, SHAPE.VOCAB)
    largest, token = load_largest(row_data, best, metadata.state, row)
    if row_data[4] > 0:
        winner = tl.load(metadata.state + row * STATE + 1)
        k, p, _ = load_top_k_top_p(metadata, row)
        length = tl.load(metadata.state + row * STATE + 2)
        if length > 0:
            first, last, count_before, weight_before, total, by_count = threshold_bins(bins, row, k, p)
            listed = (lists + row * SHAPE.CAPACITY, length, first, last)
            end = tl.where(length <= SHAPE.CAPACITY, length, SHAPE.VOCAB).to(tl.int32)
            threshold = tl.full([], LAST_SORT_KEY - 1, tl.int64)
            if by_count:
                threshold = find_threshold(row_data, largest, listed, end, k - count_before, False, SHAPE)
                total = weight_before + weight_up_to(row_data, largest, listed, end, threshold, SHAPE)
            if p < 1:
                wanted = top_p_weight(total, p) - weight_before
                by_weight = find_threshold(row_data, largest, listed, end, wanted, True, SHAPE)
                threshold = tl.minimum(threshold, by_weight)
            min_p_distance = tl.load(metadata.reals + row * REALS + 1)
            keys = noise_keys(metadata.integers, row)
            for start in range(0, end, SHAPE.BLOCK):
                sort_keys, distance = load_sort_keys(row_data, largest, listed, start, SHAPE)
                competes = (sort_keys <= threshold) & (distance <= min_p_distance)
                listed_token = (sort_keys & ((1 << SHAPE.BITS) - 1)).to(tl.int32)
                score_keys = score_key(distance, listed_token, noise(listed_token, keys))
                winner = tl.maximum(winner, tl.max(tl.where(competes, score_keys, LOWEST_KEY), axis=0))
        token = key_token(winner)
    tl.store(out + row * 2, token)
    tl.store(out + row * 2 + 1, tl.load(best + row * 2 + 1))
    tl.store(last_tokens + tl.load(metadata.integers + row * INTEGERS), token)
    if has_penalties(row_data):
        count = row_data[1] + token
        tl.store(count, tl.load(count) + 1)


def sample(
    logits: torch.Tensor,
    best: torch.Tensor,
    metadata: SamplingMetadata,
    counts: torch.Tensor | None,
    masks: torch.Tensor | None,
    last_tokens: torch.Tensor,
    truncates: bool,
) -> torch.Tensor:
    """Sample a token for each row, write it to ``last_tokens`` at the row's slot, and count it in rows with penalties.

    Returns int64 [rows, 2]: the sampled token, and the second column of ``best``.

    Args:
        logits: contiguous float32 [rows, vocab], vocab at most 2^18.
        best: contiguous int64 [rows, 2]: the token of the largest logit of each row, and a second column that is copied
            to the result.
        metadata: the sampling parameters of the rows, on the device; no slot occurs twice.
        counts: int32 [slots, vocab], occurrences of each token in each output, plus 2^30 for prompt tokens of rows with
            a repetition penalty; None if no row has penalties.
        masks: int32 [constrained rows, ceil(vocab / 32)]: bit ``token % 32`` of word ``token // 32`` says that the
            token is allowed; None if no row is constrained. ``best`` need not be correct for constrained rows.
        last_tokens: int64 [slots or more].
        truncates: whether any row has top_k or top_p.
    """
    rows, vocab = logits.shape
    out = torch.empty_like(best)
    parts = min(triton.cdiv(vocab, TILE), triton.cdiv(PROGRAMS_PER_SM * num_sms(logits.device), rows))
    # If no row needs these tensors, nothing reads them, but other dtypes would need other compiled kernels.
    bins = torch.zeros((rows, 2, BINS.value) if truncates else 1, dtype=torch.int64, device=logits.device)
    lists = torch.empty((rows, CAPACITY) if truncates else 1, dtype=torch.int64, device=logits.device)
    tables = tuple(metadata.integers if table is None else table for table in (counts, masks))
    shape = SamplingShape(vocab, (vocab - 1).bit_length(), CAPACITY, TILE, BLOCK)
    options = OPTIONS | {"num_warps": WARPS}
    if counts is not None or masks is not None:
        penalised_max_kernel[(rows, parts)](logits, *tables, metadata, shape, **options)
    common = logits, best, *tables, metadata, bins
    if truncates:
        histogram_kernel[(rows, parts)](*common, shape, **options)
    candidates_kernel[(rows, parts)](*common, lists, shape, **options)
    options["num_warps"] = FINISH_WARPS
    finish_kernel[(rows,)](*common, lists, out, last_tokens, shape, **options)
    return out
