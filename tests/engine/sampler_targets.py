"""Functions that a rank of test_sampler.py runs: sampling by the GPU kernels under Triton's interpreter."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import torch

from shotcast.engine.sampler import Sampler
from shotcast.engine.sampling_params import SamplingParams


def token_counts(
    row: torch.Tensor, kinds: list[SamplingParams], count: int, output: tuple[int, ...]
) -> list[list[int]]:
    """Return how often ``count`` requests of each of ``kinds`` sample each token from ``row``, all in one step."""
    from shotcast.kernels.triton import sampling

    vocab, rows = len(row), len(kinds) * count
    sampling.TILE = sampling.BLOCK = vocab
    sampler = Sampler(rows, vocab, "cpu", salt=1, kernels=True)
    for slot in range(rows):
        sampler.assign(slot, kinds[slot // count], f"request {slot}", output)
    best = torch.stack((row.argmax(), torch.tensor(1))).expand(rows, -1).contiguous()
    logits = row.expand(rows, -1).contiguous()
    tokens = sampler.sample(logits, range(rows), best, torch.zeros(rows, dtype=torch.int64), False).tokens
    return [part.bincount(minlength=vocab).tolist() for part in tokens[:, 0].split(count)]


PROMPT, END = (7, 8, 7), 3
"""The prompt of every request, and the token that would end its output."""


def logits_after(output: Sequence[int], vocab: int) -> torch.Tensor:
    """Return the logits of a model that has seen ``output``."""
    numbers = torch.Generator().manual_seed(zlib.crc32(bytes(output)))
    return torch.randn(vocab, generator=numbers) * 2


def outputs_of(
    kinds: list[SamplingParams], vocab: int, length: int, kernels: bool, known: list[list[int]] | None = None
) -> tuple[list[list[int]], list[list[float]], int]:
    """Return the outputs of requests of all kinds, the log-probabilities of their tokens, and the number of steps.

    Args:
        length: tokens of an output at least.
        kernels: as of the sampler.
        known: their outputs, from which proposals are made, right or wrong by chance.
    """
    if kernels:
        from shotcast.kernels.triton import sampling

        sampling.TILE = sampling.BLOCK = vocab
    sampler = Sampler(len(kinds) + 1, vocab, "cpu", salt=1, kernels=kernels)
    slots = list(range(len(kinds), 0, -1))
    for slot, params in zip(slots, kinds, strict=True):
        sampler.assign(slot, params, f"request {slot}", (), PROMPT, (END,))
    outputs: list[list[int]] = [[] for _ in kinds]
    logprobs: list[list[float]] = [[] for _ in kinds]
    last_tokens = torch.full([len(kinds) + 2], -1)
    draw, steps = random.Random(1), 0
    while min(map(len, outputs)) < length:
        drafts: list[tuple[int, ...]] = [()] * len(kinds)
        if known is not None:
            for number, output in enumerate(outputs):
                right = known[number][len(output) : len(output) + draw.randrange(4)]
                drafts[number] = tuple(token if draw.random() < 0.7 else draw.randrange(vocab) for token in right)
        rows = [
            logits_after([*output, *proposals[:count]], vocab)
            for output, proposals in zip(outputs, drafts, strict=True)
            for count in range(len(proposals) + 1)
        ]
        logits = torch.stack(rows)
        best = torch.stack((logits.argmax(1), torch.ones(len(rows), dtype=torch.int64)), dim=1)
        before = logits.clone()
        made = sampler.sample(logits, slots, best, last_tokens, False, drafts if known is not None else ())
        assert logits.equal(before)
        row, steps = 0, steps + 1
        for number, (output, proposals) in enumerate(zip(outputs, drafts, strict=True)):
            sampled = made.tokens[row : row + len(proposals) + 1, 0].tolist()
            count = 0
            while count < len(proposals) and sampled[count] == proposals[count]:
                count += 1
            output += sampled[: count + 1]
            for place in range(row, row + count + 1):
                if kinds[number].logprobs is not None:
                    index = [found for found, _ in made.logprob_rows].index(place)
                    logprobs[number].append(float(made.logprobs[0][index]))
            sampler.advance(slots[number], count)
            assert last_tokens[slots[number]] == output[-1]
            row += len(proposals) + 1
        assert last_tokens[0] == last_tokens[-1] == -1
    return [output[:length] for output in outputs], [values[:length] for values in logprobs], steps
