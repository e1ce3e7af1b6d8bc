"""What a rank of test_sampler.py runs: draws by the kernels of GPUs, under Triton's interpreter."""

from __future__ import annotations

import torch

from shotcast.engine.sampler import Sampler
from shotcast.engine.sampling_params import SamplingParams
from shotcast.kernels.triton import sampling


def drawn(row: torch.Tensor, kinds: list[SamplingParams], count: int, output: tuple[int, ...]) -> list[list[int]]:
    """For each of ``kinds`` how often ``count`` requests draw each token from ``row``; all in one step."""
    vocab, rows = len(row), len(kinds) * count
    sampling.TILE = sampling.BLOCK = vocab
    sampler = Sampler(rows, vocab, "cpu", salt=1, kernels=True)
    for slot in range(rows):
        sampler.assign(slot, kinds[slot // count], f"request {slot}", output)
    best = torch.stack((row.argmax(), torch.tensor(1))).expand(rows, -1).contiguous()
    logits = row.expand(rows, -1).contiguous()
    told = sampler.sample(logits, range(rows), best, torch.zeros(rows, dtype=torch.int64), False).tokens
    return [part.bincount(minlength=vocab).tolist() for part in told[:, 0].split(count)]
