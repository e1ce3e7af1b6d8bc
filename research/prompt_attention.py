"""Attention of prompts on one GPU: ``shotcast.kernels.triton.prompt_attention`` against PyTorch's ``varlen_attn``.

    python research/prompt_attention.py [--heads 8] [--kv-heads 2] [--head-dim 128] [--json FILE]

A time is that of one call in a captured graph of many. By default the numbers of heads are those of Llama 3.1 8B on
four ranks. PyTorch is given keys and values that are already gathered from the cache. TFLOP/s counts the part that a
causal mask leaves.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_times import seconds_each
from gpu_timing import write
from rich.console import Console
from rich.table import Table
from torch.nn.attention.varlen import varlen_attn

from shotcast.bench import kernels
from shotcast.device.triton.intrinsics import is_hopper, num_sms
from shotcast.engine.input_batch import InputBatch, attention_tiles
from shotcast.kernels.triton import prompt_attention

BLOCK = 16
CALLS = 20
STEPS = {
    "32": ((0, 32),),
    "128": ((0, 128),),
    "512": ((0, 512),),
    "2048": ((0, 2048),),
    "4 x 512": ((0, 512),) * 4,
    "16 x 128": ((0, 128),) * 16,
    "512 after 8K": ((8192, 512),),
    "2048 after 8K": ((8192, 2048),),
    "2048 after 30K": ((30720, 2048),),
    "16K": ((0, 16384),),
    "63 that decode at 1K, 1985": ((1024, 1),) * 63 + ((0, 1985),),
}


def measure(name: str, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    before, new = (np.array(each, np.int32) for each in zip(*STEPS[name], strict=True))
    lengths, tokens, group = before + new, int(new.sum()), heads // kv_heads
    blocks = -(-lengths // BLOCK)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    queries = normal(tokens, heads, head_dim)
    keys, values = (normal(int(blocks.sum()) * BLOCK, kv_heads, head_dim) for _ in range(2))
    order = torch.randperm(int(blocks.sum()), generator=generator, device="cuda").int()
    tables = torch.zeros(len(new), int(blocks.max()), dtype=torch.int32, device="cuda")
    for row, part in enumerate(order.split(blocks.tolist())):
        tables[row, : len(part)] = part
    rows, firsts = np.arange(len(new), dtype=np.int32), np.cumsum(new, dtype=np.int32) - new
    nothing = np.zeros(0, np.int32)
    batch = InputBatch(np.zeros(tokens, np.int32), nothing, nothing, rows, before, new, firsts, nothing.astype(bool))
    device = queries.device
    most = prompt_attention.tile_tokens(
        tokens, group, kv_heads, head_dim, queries.dtype, num_sms(device), is_hopper(device)
    )
    tiles = torch.from_numpy(attention_tiles(batch, most)).cuda()
    first_heads = torch.arange(0, heads + 1, group, dtype=torch.int32, device="cuda")
    out = torch.empty_like(queries)

    def own() -> None:
        shape = first_heads, group, BLOCK, 0
        prompt_attention.attend(queries, keys, values, tables, tiles, most, *shape, out)

    slots = torch.cat(
        [
            (tables[row, : -(-length // BLOCK), None].long() * BLOCK + torch.arange(BLOCK, device="cuda")).view(-1)[
                :length
            ]
            for row, length in enumerate(lengths.tolist())
        ]
    )
    wide = [kept[slots].repeat_interleave(group, dim=1) for kept in (keys, values)]
    starts = [torch.tensor([0, *np.cumsum(each)], dtype=torch.int32, device="cuda") for each in (new, lengths)]

    def library() -> Any:
        longest = int(new.max()), int(lengths.max())
        return varlen_attn(queries, *wide, *starts, *longest, window_size=(-1, 0))

    own()
    apart = (out.float() - library().float()).abs().max().item()
    pairs = float((new.astype(np.float64) * before + new * (new + 1.0) / 2).sum())
    row = {"step": name, "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "apart": apart}
    for implementation, call in (("own", own), ("library", library)):
        taken = seconds_each(lambda _, call=call: call(), 1, CALLS)
        row |= {
            f"{implementation}_us": taken * 1e6,
            f"{implementation}_tflops": 4 * pairs * heads * head_dim / taken / 1e12,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    view = Table("step", "own us", "TFLOP/s", "PyTorch us", "TFLOP/s", "apart")
    for name in STEPS:
        row = measure(name, options.heads, options.kv_heads, options.head_dim)
        rows.append(row)
        figures = (
            row[f"{implementation}_{unit}"] for implementation in ("own", "library") for unit in ("us", "tflops")
        )
        view.add_row(name, *(f"{figure:.1f}" for figure in figures), f"{row['apart']:.1e}")
    Console(width=150).print(view)
    if options.json:
        write(
            options.json,
            rows,
            kernels.of_modules("kernels.triton.prompt_attention", "kernels.triton.hopper_prompt_attention"),
        )


if __name__ == "__main__":
    main()
