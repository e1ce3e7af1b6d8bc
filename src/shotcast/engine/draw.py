"""Tokens drawn from logits on a CPU, by PyTorch; on a GPU, ``kernels/triton/sampling.py`` does the same.

A draw is a race: each token has a time, exponentially distributed with its probability as rate, and the first wins.
The times come from a hash of key and token.
"""

from __future__ import annotations

import torch

from shotcast.engine.requests import SamplingParams

FEW = 1024
"""Tokens among which top_p is looked for first."""

LEAST_TEMPERATURE = 1e-30
"""Lower ones, which float32 may not hold, draw the same."""

CACHED = 2**16
"""Logits that are worked on at once: no more than a CPU's caches hold."""


def inverse_temperature(params: SamplingParams) -> float:
    """What logits are multiplied with; 0 for greedy rows."""
    return 0.0 if params.greedy else 1 / max(params.temperature, LEAST_TEMPERATURE)


def scramble(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A hash of 32 bits to 32 bits, one to one for each key; in place.

    Two rounds of multiply and shift with the constants of Chris Wellons' lowbias32, half of the key before each.

    Args:
        x: int32 [rows, columns].
        key: int32 [rows, 2].
    """
    # Shifts of int32 bring the sign in: the mask takes it out.
    x ^= key[:, :1]
    x ^= (x >> 16) & 0xFFFF
    x *= 0x21F0AAAD
    x ^= (x >> 15) & 0x1FFFF
    x ^= key[:, 1:]
    x *= 0xD35A2D97 - 2**32
    x ^= (x >> 15) & 0x1FFFF
    return x


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """float32 times, exponentially distributed with rate 1, of int32 bits that are uniform; never 0, never infinite.

    The race is won by small times, so those are the ones that float32 tells apart best: 2^-32 is the smallest.
    """
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row, largest first, of equal ones the lower place first; and their places.

    Args:
        logits: float32 [rows, vocab].
    """
    vocab = logits.shape[1]
    if count == vocab:
        return logits.sort(dim=1, descending=True, stable=True)
    # topk leaves open which of equal ones it takes, so make them differ: integers in the order of the floats (-0.0
    # becomes 0.0 first), and below them the place.
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys |= torch.arange(vocab - 1, -1, -1, device=logits.device)
    tokens = vocab - 1 - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    return logits.gather(1, tokens), tokens


def nucleus(
    values: torch.Tensor, total: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the likeliest tokens top_k and top_p keep.

    top_k keeps exactly k; top_p, of what that leaves, the likeliest until their probabilities reach p.

    Args:
        values: float32 [rows, count], the largest logits of each row, at least top_k, largest first; the first is 0.
        total: float64 [rows], sums of exp(logit) over whole rows.
        top_k: int64 [rows], 0 keeps all.
        top_p: float64 [rows].

    Returns:
        What is kept, bool [rows, count], and whether no token beyond these would be, bool [rows].
    """
    weights = values.exp()
    upto = weights.cumsum(1, dtype=torch.float64)
    last = (top_k - 1).clamp(min=0)[:, None]
    reach = top_p * torch.where(top_k > 0, upto.gather(1, last)[:, 0], total)
    places = torch.arange(values.shape[1], device=values.device)
    keep = (places <= last) | (top_k == 0)[:, None]
    # Rounding must not cut off what top_p = 1 keeps.
    keep &= (upto - weights < reach[:, None]) | (top_p == 1)[:, None]
    return keep, (upto[:, -1] >= reach) | (top_k > 0)


def noise_of(vocab: int) -> torch.Tensor:
    """int32 [1, vocab]: neighbours in the vocabulary, made unlike each other once instead of at every draw."""
    return scramble(torch.arange(vocab, dtype=torch.int32)[None], torch.zeros(1, 2, dtype=torch.int32))


def penalise(logits: torch.Tensor, rows: list[int], params: list[SamplingParams], counts: torch.Tensor) -> torch.Tensor:
    """Logits after presence and frequency penalties, in a new tensor.

    Args:
        logits: float32 [rows, vocab].
        rows: those that have penalties.
        params: of all rows.
        counts: int32 [rows that have penalties, vocab], of each token in their outputs.
    """
    presence = torch.tensor([params[row].presence_penalty for row in rows])[:, None]
    frequency = torch.tensor([params[row].frequency_penalty for row in rows])[:, None]
    return logits.index_add(0, torch.tensor(rows), (counts > 0) * presence + counts * frequency, alpha=-1)


def draw(
    logits: torch.Tensor, best: torch.Tensor, params: list[SamplingParams], keys: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """A token for each row, whatever it asks for: int64 [rows].

    Args:
        logits: float32 [rows, vocab], after penalties.
        best: int64 [rows], the token of the largest logit of each greedy row.
        params: of the rows.
        keys: int32 [rows, 2], of the noise.
        noise: :func:`noise_of` the vocabulary.
    """
    tokens = best.clone()
    cut = [row for row, p in enumerate(params) if p.cuts]
    whole = [row for row, p in enumerate(params) if not p.greedy and not p.cuts]
    for rows, race in ((cut, _race_cut), (whole, _race_whole)):
        most = max(1, CACHED // logits.shape[1])
        for part in (rows[first : first + most] for first in range(0, len(rows), most)):
            index, of = torch.tensor(part), [params[row] for row in part]
            chosen = logits[index]
            # The largest becomes 0, so that no temperature, however low, makes infinities of it.
            inverse = torch.tensor([inverse_temperature(p) for p in of])
            shifted = (chosen - chosen.amax(1, keepdim=True)).mul_(inverse[:, None])
            tokens.index_copy_(0, index, race(shifted, keys[index], of, noise))
    return tokens


def _race_whole(
    logits: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams], noise: torch.Tensor
) -> torch.Tensor:
    """Of all tokens; ``logits``, whose largest is 0, are changed."""
    if any(p.min_p for p in params):
        logits.masked_fill_(logits < _floors(params), -torch.inf)
    time = exponential(scramble(noise.expand(len(params), -1).clone(), keys))
    # The smallest of time / probability.
    return (logits - time.log_()).argmax(1)


def _race_cut(
    logits: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams], noise: torch.Tensor
) -> torch.Tensor:
    """Of what top_k and top_p keep; the largest of ``logits`` is 0."""
    vocab = logits.shape[1]
    ks = [min(p.top_k, vocab) for p in params]
    top_k = torch.tensor(ks)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)
    total = logits.exp().sum(1, dtype=torch.float64)
    most = max(k or vocab for k in ks)
    # Mostly few tokens make up top_p.
    few = max(FEW, *ks)
    for count in (few, most) if few < most else (most,):
        values, tokens = likeliest(logits, count)
        keep, complete = nucleus(values, total, top_k, top_p)
        if count == most or complete.all():
            break
    keep &= values >= _floors(params)
    time = exponential(scramble(noise[0, tokens], keys))
    scores = (values - time.log_()).masked_fill_(~keep, -torch.inf)
    return tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0]


def _floors(params: list[SamplingParams]) -> torch.Tensor:
    return torch.tensor([p.floor for p in params])[:, None]
