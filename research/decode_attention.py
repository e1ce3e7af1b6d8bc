"""Attention of decoding on one GPU: ``shotcast.kernels.triton.paged_attention`` compared with PyTorch.

    python research/decode_attention.py [--heads 8,16,32] [--kv-heads 2] [--json FILE]

A time is that of one layer in a captured graph of several layers, each with a cache of its own, so that none finds its
keys and values in L2. Our time includes the rotation of queries and keys and the write of the new ones to the paged
cache. PyTorch (``scaled_dot_product_attention``) is given rotated queries, and contiguous keys and values. The numbers
of heads are those of Llama 3.1 8B, 70B and 405B on four ranks. GB/s counts keys and values; the figure of ``copy`` is
the bandwidth that copying memory reaches.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from gpu_times import seconds_each
from gpu_timing import copy_gbps, write
from rich.console import Console
from rich.table import Table

from shotcast.bench import kernels
from shotcast.device.triton.intrinsics import num_sms
from shotcast.kernels.triton.paged_attention import PagedDecoding

BLOCK = 16
HEAD_DIM = 128
STEPS = ((1, 576), (1, 8192), (1, 32768), (4, 576), (8, 2048), (16, 576), (16, 8192), (64, 576), (64, 4096), (128, 576))
"""Steps as (sequences, tokens of each sequence)."""
LEAST_BYTES = 200_000_000
"""The least size of the caches of all layers: several times the L2 cache."""
MOST_LAYERS = 48
MOST_APART = 0.02
"""The largest accepted difference between results: means of values of about 1, rounded to bfloat16 at other points."""


class Step:
    """Sequences of ``length`` tokens each, of which the last is new."""

    def __init__(self, sequences: int, length: int, heads: int, kv_heads: int):
        self.sequences, self.length, self.heads, self.kv_heads = sequences, length, heads, kv_heads
        self.nbytes = sequences * length * kv_heads * HEAD_DIM * 2 * 2
        self.layers = max(2, min(MOST_LAYERS, -(-LEAST_BYTES // self.nbytes)))
        generator = torch.Generator("cuda").manual_seed(0)
        blocks = -(-length // BLOCK)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").bfloat16()

        shape = self.layers, sequences * blocks * BLOCK, kv_heads, HEAD_DIM
        self.keys, self.values = normal(*shape), normal(*shape)
        order = torch.randperm(sequences * blocks, generator=generator, device="cuda")
        self.tables = order.int().view(sequences, blocks)
        self.rows = torch.arange(sequences, device="cuda")
        self.lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
        self.x = normal(sequences, (heads + 2 * kv_heads) * HEAD_DIM)
        self.cosines = torch.ones(length, HEAD_DIM // 2, device="cuda")
        self.sines = torch.zeros_like(self.cosines)  # so that the library needs no rotation
        kv_head_of = tuple(head // (heads // kv_heads) for head in range(heads))
        device = self.x.device
        self.decoding = PagedDecoding(heads, HEAD_DIM, kv_head_of, sequences, num_sms(device), device)
        self.out = torch.empty(sequences, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def own(self, layer: int) -> torch.Tensor:
        turns = self.cosines, self.sines
        paged = self.tables, self.rows, self.lengths, BLOCK, 0
        self.decoding(self.x, *turns, self.keys[layer], self.values[layer], *paged, self.out)
        return self.out

    def library(self) -> Callable[[int], torch.Tensor]:
        slots = (self.tables.long()[:, :, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten(1)
        queries = self.x[:, : self.heads * HEAD_DIM].view(self.sequences, self.heads, 1, HEAD_DIM)
        gathered = [
            (self.keys[layer, slots[:, : self.length]].transpose(1, 2), self.values[layer, slots[:, : self.length]])
            for layer in range(self.layers)
        ]
        pieces = [(keys.contiguous(), values.transpose(1, 2).contiguous()) for keys, values in gathered]
        return lambda layer: F.scaled_dot_product_attention(queries, *pieces[layer], enable_gqa=True)[:, :, 0]


def measure(sequences: int, length: int, heads: int, kv_heads: int) -> dict[str, Any]:
    step = Step(sequences, length, heads, kv_heads)
    own = step.own(0).clone()  # also writes the new keys and values to the cache
    library = step.library()
    apart = (own.float() - library(0).float()).abs().max().item()
    if not apart <= MOST_APART:
        raise ArithmeticError(
            f"{sequences} sequences of {length}: results differ by {apart:g}, which rounding does not explain"
        )
    row: dict[str, Any] = {"sequences": sequences, "length": length, "heads": heads, "kv_heads": kv_heads}
    row |= {"splits": step.decoding.splits(sequences), "apart": apart}
    for implementation, call in (("own", step.own), ("library", library)):
        taken = seconds_each(call, step.layers, step.layers)
        row |= {f"{implementation}_us": taken * 1e6, f"{implementation}_gbps": step.nbytes / taken / 1e9}
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", default="8,16,32")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    copied = copy_gbps()
    rows = []
    view = Table("heads", "sequences", "tokens each", "own us", "GB/s", "PyTorch us", "GB/s", "apart")
    for heads, step in itertools.product(map(int, options.heads.split(",")), STEPS):
        row = measure(*step, heads, options.kv_heads)
        rows.append(row)
        figures = (row[f"{implementation}_{unit}"] for implementation in ("own", "library") for unit in ("us", "gbps"))
        view.add_row(str(heads), *map(str, step), *(f"{figure:.1f}" for figure in figures), f"{row['apart']:.1e}")
    screen = Console(width=150)
    screen.print(view)
    screen.print(f"copy {copied:.0f} GB/s")
    if options.json:
        write(options.json, rows, kernels.of_modules("kernels.triton.paged_attention"), copy_gbps=copied)


if __name__ == "__main__":
    main()
