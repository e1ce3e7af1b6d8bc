"""Ranks of test_decoding_kernels.py: the small kernels of a decoding step, under the interpreter."""

from __future__ import annotations

import time

import torch

from shotcast.kernels.triton import embedding, logits, step_inputs
from shotcast.kernels.triton.timestamps import SpanTimers


def unpacked(
    packed: torch.Tensor, last_tokens: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, ...]:
    """Return everything that is derived, and the tables afterwards."""
    count = packed.shape[0]
    tokens, positions, slots, rows = (torch.full([count], -9) for _ in range(4))
    lengths = torch.full([count], -9, dtype=torch.int32)
    batch = step_inputs.BatchTensors(tokens, positions, slots, lengths, rows)
    step_inputs.unpack(packed, last_tokens, tables, block_size, batch)
    return tokens, positions, slots, lengths, rows, tables


def unpacked_prompts(
    ids: torch.Tensor,
    sampled_rows: torch.Tensor,
    updates: torch.Tensor,
    last_tokens: torch.Tensor,
    tables: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return everything that is filled, and the tables afterwards. Positions are 1000 + index, slots 2000 + index."""
    count = ids.shape[0]
    tokens, positions, slots = (torch.full([count], -9) for _ in range(3))
    rows = torch.full(sampled_rows.shape, -9)
    position_ids = torch.arange(count, dtype=torch.int32)
    num_updates = torch.tensor([updates.shape[0]], dtype=torch.int32)
    more = torch.cat((updates.reshape(-1), torch.full([9], 3, dtype=torch.int32)))  # left over from earlier steps
    packed = step_inputs.PackedPrompts(ids, position_ids + 1000, position_ids + 2000, sampled_rows, num_updates, more)
    step_inputs.unpack_prompts(packed, last_tokens, tables, tokens, positions, slots, rows)
    return tokens, positions, slots, rows, tables


def joined(parts: list[torch.Tensor], cap: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    rows, widths = parts[0].shape[0], [part.shape[1] for part in parts]
    starts = torch.tensor([0, *widths]).cumsum(0).int()
    values = torch.full([rows, sum(widths)], 7.0)
    best = torch.full([rows, 2], -9)
    logits.concat_columns(torch.cat([part.reshape(-1) for part in parts]), widths, starts, values, best, cap)
    return values, best


def embedded(tokens: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
    return embedding.embed(tokens, weight, start)


def stamped(spans: int, pause_s: float) -> tuple[torch.Tensor, float]:
    """Return the totals of two timers, and the time taken; the second is stopped in the middle of each span of the
    first."""
    stamps = SpanTimers(2, torch.device("cpu"))
    started = time.monotonic()
    for _ in range(spans):
        stamps.start(0)
        stamps.start(1)
        time.sleep(pause_s)
        stamps.stop(1)
        time.sleep(pause_s)
        stamps.stop(0)
    return stamps.totals, time.monotonic() - started
