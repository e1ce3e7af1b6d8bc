"""A function that a rank of test_sampler.py runs: sampling by the GPU kernels under Triton's interpreter."""

from __future__ import annotations

import torch

from shotcast.engine.sampler import Sampler
from shotcast.engine.sampling_params import SamplingParams
from shotcast.kernels.triton import sampling


def token_counts(
    row: torch.Tensor, kinds: list[SamplingParams], count: int, output: tuple[int, ...]
) -> list[list[int]]:
    """Return how often ``count`` requests of each of ``kinds`` sample each token from ``row``, all in one step."""
    vocab, rows = len(row), len(kinds) * count
    sampling.TILE = sampling.BLOCK = vocab
    sampler = Sampler(rows, vocab, "cpu", salt=1, kernels=True)
    for slot in range(rows):
        sampler.assign(slot, kinds[slot // count], f"request {slot}", output)
    best = torch.stack((row.argmax(), torch.tensor(1))).expand(rows, -1).contiguous()
    logits = row.expand(rows, -1).contiguous()
    tokens = sampler.sample(logits, range(rows), best, torch.zeros(rows, dtype=torch.int64), False).tokens
    return [part.bincount(minlength=vocab).tolist() for part in tokens[:, 0].split(count)]
