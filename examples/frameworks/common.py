"""The scripts of this folder share these: a small model with its data, a loop of training, and what a rank prints."""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

TEXT = "the quick brown fox jumps over the lazy dog and the lazy dog sleeps under the quick brown fox. "
LETTERS = sorted(set(TEXT))
BATCH, CONTEXT, WIDTH = 32, 3, 64


def arguments(description: str | None, **more: object) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="shotcast", help="as init_process_group takes it")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until a missing rank is an error")
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser


def join(options: argparse.Namespace) -> torch.device:
    """Join the job that torchrun started, and return the device of this rank."""
    device = torch.device("cpu")
    if options.backend != "gloo" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend, timeout=timedelta(seconds=options.timeout))
    return device


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class NextLetter(nn.Module):
    """Predicts a letter from the letters before it; the weights are the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(len(LETTERS), WIDTH)
        self.join = nn.Linear(CONTEXT * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.join(self.embed(letters).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(
    model: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, steps: int, seed: int
) -> tuple[list[float], float]:
    """Train on the batches of a seed; return the losses, averaged over ranks, and the milliseconds of a step."""
    device = next(iter(optimizer.param_groups[0]["params"])).device
    data = torch.tensor([LETTERS.index(letter) for letter in TEXT * 2], device=device)
    batches = torch.Generator().manual_seed(seed)
    losses, times_ms = [], []
    for _ in range(steps):
        start = time.perf_counter()
        at = torch.randint(len(TEXT), (BATCH, 1), generator=batches) + torch.arange(CONTEXT + 1)
        letters = data[at.to(device)]
        loss = nn.functional.cross_entropy(model(letters[:, :-1]), letters[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        times_ms.append(1e3 * (time.perf_counter() - start))
    return losses, statistics.median(times_ms)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a short hash of the bits of tensors."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def say(**results: object) -> None:
    """Print results in one line, as lines of ranks may mix."""
    line = ", ".join(f"{name} {shown(value)}" for name, value in results.items())
    print(f"rank {dist.get_rank()}: {line}\n", end="")


def shown(value: object) -> str:
    """Return numbers with all their digits, those of a list separated by spaces."""
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return f"{value:.9g}" if isinstance(value, float) else str(value)
