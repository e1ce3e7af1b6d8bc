"""Sampling on a CPU, in PyTorch. On a GPU, ``kernels/triton/sampling.py`` samples the same tokens.

Sampling is a race of exponential clocks (equivalent to the Gumbel-max trick): each token draws a time from an
exponential distribution with the token's probability as its rate, and the token with the smallest time is sampled. The
times come from a hash of a key and the token.
"""

from __future__ import annotations

import torch

from shotcast.engine.sampling_params import SamplingParams

FIRST_NUCLEUS = 1024
"""The number of likeliest tokens searched first for the top_p set."""

MIN_TEMPERATURE = 1e-30
"""Lower temperatures, which float32 may not represent, sample like this one."""

PROMPT_TOKEN = 2**30
"""Added to a token's count in an output if the prompt contains it, for the repetition penalty."""

CACHED_LOGITS = 2**16
"""Logits processed together, few enough to fit a CPU's caches."""


def inverse_temperature(params: SamplingParams) -> float:
    """Return the factor of the logits; 0 for greedy rows."""
    return 0.0 if params.greedy else 1 / max(params.temperature, MIN_TEMPERATURE)


def scramble(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Hash 32 bits to 32 bits in place, one to one for each key.

    Two rounds of multiply and shift with the constants of Chris Wellons' lowbias32, each preceded by half of the key.

    Args:
        x: int32 [rows, columns].
        key: int32 [rows, 2].
    """
    # Shifts of int32 extend the sign; the masks remove it.
    x ^= key[:, :1]
    x ^= (x >> 16) & 0xFFFF
    x *= 0x21F0AAAD
    x ^= (x >> 15) & 0x1FFFF
    x ^= key[:, 1:]
    x *= 0xD35A2D97 - 2**32
    x ^= (x >> 15) & 0x1FFFF
    return x


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """Turn uniform int32 bits into float32 times, exponentially distributed with rate 1; never 0, never infinite.

    Small times win the race, so float32 resolves those best: the smallest is 2^-32.
    """
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest logits of each row and their indices, largest first, lower indices first on ties.

    Args:
        logits: float32 [rows, vocab].
        count: at most vocab.
    """
    vocab = logits.shape[1]
    if count == vocab:
        return logits.sort(dim=1, descending=True, stable=True)
    # topk takes any of equal values, so make them differ: integers in the order of the floats (-0.0 becomes 0.0
    # first), with the index in the low bits.
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys |= torch.arange(vocab - 1, -1, -1, device=logits.device)
    tokens = vocab - 1 - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    return logits.gather(1, tokens), tokens


def nucleus(
    values: torch.Tensor, total: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the likeliest tokens top_k and top_p keep.

    top_k keeps exactly k tokens; top_p keeps the likeliest of these until their probabilities reach p.

    Returns which values are kept, bool [rows, count], and whether no token beyond these would be kept, bool [rows].

    Args:
        values: float32 [rows, count], the largest logits of each row, at least top_k of them, largest first; the first
            is 0.
        total: float64 [rows], sums of exp(logit) over whole rows.
        top_k: int64 [rows], 0 keeps all.
        top_p: float64 [rows].
    """
    weights = values.exp()
    cumulative = weights.cumsum(1, dtype=torch.float64)
    last = (top_k - 1).clamp(min=0)[:, None]
    needed = top_p * torch.where(top_k > 0, cumulative.gather(1, last)[:, 0], total)
    ranks = torch.arange(values.shape[1], device=values.device)
    keep = (ranks <= last) | (top_k == 0)[:, None]
    # Rounding must not drop tokens that top_p = 1 keeps.
    keep &= (cumulative - weights < needed[:, None]) | (top_p == 1)[:, None]
    return keep, (cumulative[:, -1] >= needed) | (top_k > 0)


def token_noise(vocab: int) -> torch.Tensor:
    """Return a hash of each token, int32 [1, vocab], computed once; neighboring tokens differ widely."""
    return scramble(torch.arange(vocab, dtype=torch.int32)[None], torch.zeros(1, 2, dtype=torch.int32))


def apply_masks(logits: torch.Tensor, rows: list[int], allowed: torch.Tensor) -> torch.Tensor:
    """Return a copy of the logits without the tokens that are not allowed.

    Args:
        logits: float32 [rows, vocab].
        rows: the constrained rows.
        allowed: bool [constrained rows, vocab].
    """
    masked = logits.clone()
    for row, mask in zip(rows, allowed, strict=True):  # one after the other: a row fits into a CPU's caches
        masked[row].masked_fill_(~mask, -torch.inf)
    return masked


def apply_penalties(
    logits: torch.Tensor, rows: list[int], params: list[SamplingParams], counts: torch.Tensor
) -> torch.Tensor:
    """Return a copy of the logits with repetition, presence and frequency penalties applied.

    Args:
        logits: float32 [rows, vocab].
        rows: the rows with penalties.
        counts: int32 [rows with penalties, vocab], how often their outputs contain each token, and PROMPT_TOKEN more
            for tokens of the prompt.
    """
    repetition = torch.tensor([params[row].repetition_penalty for row in rows])[:, None]
    if (repetition != 1).any():
        chosen = logits[rows]
        scaled = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        logits = logits.index_copy(0, torch.tensor(rows), torch.where(counts != 0, scaled, chosen))
    counts = counts & (PROMPT_TOKEN - 1)
    presence = torch.tensor([params[row].presence_penalty for row in rows])[:, None]
    frequency = torch.tensor([params[row].frequency_penalty for row in rows])[:, None]
    return logits.index_add(0, torch.tensor(rows), (counts > 0) * presence + counts * frequency, alpha=-1)


def sample(
    logits: torch.Tensor, best: torch.Tensor, params: list[SamplingParams], keys: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Sample a token for each row with its parameters: int64 [rows].

    Args:
        logits: float32 [rows, vocab], after penalties.
        best: int64 [rows], for greedy rows the token with the largest logit.
        keys: int32 [rows, 2], the keys of the noise.
        noise: :func:`token_noise` of the vocabulary.
    """
    tokens = best.clone()
    filtered = [row for row, p in enumerate(params) if p.has_top_k_or_top_p]
    unfiltered = [row for row, p in enumerate(params) if not p.greedy and not p.has_top_k_or_top_p]
    for rows, sample_rows in ((filtered, _sample_top_k_top_p), (unfiltered, _sample_vocabulary)):
        chunk_rows = max(1, CACHED_LOGITS // logits.shape[1])
        for chunk in (rows[first : first + chunk_rows] for first in range(0, len(rows), chunk_rows)):
            index, chunk_params = torch.tensor(chunk), [params[row] for row in chunk]
            chosen = logits[index]
            # The largest logit becomes 0, so that no temperature, however low, leads to infinities.
            inverse = torch.tensor([inverse_temperature(p) for p in chunk_params])
            shifted = (chosen - chosen.amax(1, keepdim=True)).mul_(inverse[:, None])
            tokens.index_copy_(0, index, sample_rows(shifted, keys[index], chunk_params, noise))
    return tokens


def _sample_vocabulary(
    logits: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams], noise: torch.Tensor
) -> torch.Tensor:
    """Sample from the whole vocabulary. ``logits``, whose largest is 0, are overwritten."""
    if any(p.min_p for p in params):
        logits.masked_fill_(logits < _min_p_logits(params), -torch.inf)
    times = exponential(scramble(noise.expand(len(params), -1).clone(), keys))
    # This is the smallest time / probability.
    return (logits - times.log_()).argmax(1)


def _sample_top_k_top_p(
    logits: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams], noise: torch.Tensor
) -> torch.Tensor:
    """Sample from the tokens that top_k and top_p keep. The largest of ``logits`` is 0."""
    vocab = logits.shape[1]
    ks = [min(p.top_k, vocab) for p in params]
    top_k = torch.tensor(ks)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)
    total = logits.exp().sum(1, dtype=torch.float64)
    max_count = max(k or vocab for k in ks)
    # A few tokens usually make up top_p.
    first_count = max(FIRST_NUCLEUS, *ks)
    for count in (first_count, max_count) if first_count < max_count else (max_count,):
        values, tokens = likeliest(logits, count)
        keep, complete = nucleus(values, total, top_k, top_p)
        if count == max_count or complete.all():
            break
    keep &= values >= _min_p_logits(params)
    times = exponential(scramble(noise[0, tokens], keys))
    scores = (values - times.log_()).masked_fill_(~keep, -torch.inf)
    return tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0]


def _min_p_logits(params: list[SamplingParams]) -> torch.Tensor:
    return torch.tensor([p.min_p_logit for p in params])[:, None]
