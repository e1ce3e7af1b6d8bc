"""Step inputs on the device: one small copy from the host, from which the device derives everything else.

A captured graph can therefore begin with it, and a token that is still being sampled never passes through the host.

These kernels do not use programmatic dependent launch: they run after all earlier kernels and before all later ones,
because attention reads the tables and lengths that they write before it waits for the previous kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from shotcast.kernels.step_fields import FIELDS

_TOKENS = 128
"""Tokens per program in steps with prompts."""


class BatchTensors(NamedTuple):
    """The tensors of a :class:`~shotcast.layers.batch.Batch` that a step without prompts fills, one value a
    sequence."""

    tokens: Any  # int64, like the next two
    positions: Any
    slots: Any
    lengths: Any  # int32
    rows: Any  # int64


class PackedPrompts(NamedTuple):
    """A step with prompts as the host sends it, in int32."""

    ids: Any  # [tokens]; a value below 0 is -1 - the row whose last sampled token it stands for
    position_ids: Any  # [tokens]
    slot_ids: Any  # [tokens]
    sampled_rows: Any  # [sequences]
    num_updates: Any  # [1], the number of cells of the tables to update
    updates: Any  # [2 * num_updates], the index and the block of each cell


@dataclass(frozen=True, slots=True)
class UnpackShape:
    """The SHAPE argument of :func:`unpack_kernel`."""

    FIELDS: int
    BLOCK_SIZE: int
    TILE: int


@triton.jit
def unpack_kernel(packed, last_tokens, tables, batch, count, blocks, SHAPE: tl.constexpr):
    """Program: process TILE sequences. ``batch`` is a :class:`BatchTensors`, and SHAPE an :class:`UnpackShape`."""
    FIELDS: tl.constexpr = SHAPE.FIELDS
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    sequence = tl.program_id(0) * SHAPE.TILE + tl.arange(0, SHAPE.TILE)
    valid = sequence < count
    row = tl.load(packed + sequence * FIELDS, mask=valid, other=0).to(tl.int64)
    position = tl.load(packed + sequence * FIELDS + 1, mask=valid, other=0)
    token = tl.load(packed + sequence * FIELDS + 2, mask=valid, other=0).to(tl.int64)
    new_block = tl.load(packed + sequence * FIELDS + 3, mask=valid, other=0)
    token = tl.where(token < 0, tl.load(last_tokens + row, mask=valid & (token < 0), other=0), token)
    cell = tables + row * blocks + position // BLOCK_SIZE
    current_block = tl.load(cell, mask=valid & (new_block < 0), other=0)
    tl.store(cell, new_block, mask=valid & (new_block >= 0))
    block = tl.where(new_block < 0, current_block, new_block).to(tl.int64)
    tl.store(batch.tokens + sequence, token, mask=valid)
    tl.store(batch.positions + sequence, position.to(tl.int64), mask=valid)
    tl.store(batch.slots + sequence, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=valid)
    tl.store(batch.lengths + sequence, position + 1, mask=valid)
    tl.store(batch.rows + sequence, row, mask=valid)


def unpack(
    packed: torch.Tensor, last_tokens: torch.Tensor, tables: torch.Tensor, block_size: int, batch: BatchTensors
) -> None:
    """Enter new blocks into the tables, and fill the tensors of ``batch``.

    Args:
        packed: int32 [sequences, FIELDS]; no table row occurs twice, unless it gets no block.
        last_tokens: int64 [rows], the last sampled token of each row.
        tables: int32 [rows, blocks].
    """
    count, blocks = packed.shape[0], tables.shape[1]
    tile = min(128, triton.next_power_of_2(count))
    shape = UnpackShape(FIELDS, block_size, tile)
    grid = (triton.cdiv(count, tile),)
    unpack_kernel[grid](packed, last_tokens, tables, batch, count, blocks, shape, num_warps=1)


@triton.jit
def unpack_prompts_kernel(
    packed, last_tokens, tables, tokens, positions, slots, rows, count, sequences, TILE: tl.constexpr
):
    """Program: process TILE tokens, TILE sequences that sample, and a part of the table updates.

    ``packed`` is a :class:`PackedPrompts`.
    """
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = i < count
    token = tl.load(packed.ids + i, mask=valid, other=0).to(tl.int64)
    token = tl.where(token < 0, tl.load(last_tokens - 1 - token, mask=valid & (token < 0), other=0), token)
    tl.store(tokens + i, token, mask=valid)
    tl.store(positions + i, tl.load(packed.position_ids + i, mask=valid, other=0).to(tl.int64), mask=valid)
    tl.store(slots + i, tl.load(packed.slot_ids + i, mask=valid, other=0).to(tl.int64), mask=valid)
    samples = i < sequences
    tl.store(rows + i, tl.load(packed.sampled_rows + i, mask=samples, other=0).to(tl.int64), mask=samples)
    count_updates = tl.load(packed.num_updates)
    for start in range(tl.program_id(0) * TILE, count_updates, tl.num_programs(0) * TILE):
        update = start + tl.arange(0, TILE)
        inside = update < count_updates
        cell = tl.load(packed.updates + update * 2, mask=inside, other=0)
        tl.store(tables + cell, tl.load(packed.updates + update * 2 + 1, mask=inside, other=0), mask=inside)


def unpack_prompts(
    packed: PackedPrompts,
    last_tokens: torch.Tensor,
    tables: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Update the tables, and fill the tensors of a :class:`~shotcast.layers.batch.Batch`, for a step with prompts.

    Args:
        last_tokens: int64 [rows], the last sampled token of each row.
        tables: int32 [rows, blocks].
        tokens, positions, slots: int64 [tokens], outputs.
        rows: int64 [sequences], output: ``sampled_rows``.
    """
    count, sequences = packed.ids.shape[0], packed.sampled_rows.shape[0]
    outputs = tokens, positions, slots, rows
    grid = (triton.cdiv(max(count, sequences), _TOKENS),)
    unpack_prompts_kernel[grid](packed, last_tokens, tables, *outputs, count, sequences, _TOKENS, num_warps=4)
