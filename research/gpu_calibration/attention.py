"""Attention on a GPU, alone: of sequences that decode, and of parts of prompts.

Caches are paged, with blocks in random order, and no cache of the GPU holds their keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_calibration.case import Case, copies_beyond_caches, off_by

from shotcast.engine.input_batch import InputBatch, attention_tiles
from shotcast.layers.attention import Attention, KVCache
from shotcast.layers.batch import Batch

SEQUENCES = (1, 4, 16, 64, 128, 256, 512)
CONTEXTS = (128, 576, 2048, 8192)
HEADS = ((32, 8), (64, 8), (128, 8), (64, 4), (16, 2), (8, 2), (8, 1), (16, 1))
"""Query heads and key-value heads of a rank: of Llama 3.1 8B, 70B and 405B, divided between 1 to 8 ranks."""
PROMPTS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((128, 0),),
    ((512, 0),),
    ((2048, 0),),
    ((512, 0),) * 4,
    ((128, 0),) * 16,
    ((512, 8192),),
    ((2048, 8192),),
)
"""Steps by the parts of prompts in them: tokens, and those before them."""
PROMPT_HEADS = ((32, 8), (64, 8), (128, 8), (16, 2), (8, 2), (8, 1))
HEAD_DIM = 128
BLOCK = 16
MOST_BYTES = 4_000_000_000
"""The most bytes of keys and values of a step."""
_ITEM = 2
_APART = 0.02
"""The accepted difference of results: means of values of about 1, rounded to 16 bits at other points."""


class DecodeShape(NamedTuple):
    """Attention of sequences that decode, by a layer of the engine: rotation and entry into the cache included.

    Attributes:
        heads, kv_heads: of the rank.
        steps: sequences, and the tokens of each, of which the last is new.
    """

    heads: int
    kv_heads: int
    steps: tuple[tuple[int, int], ...]

    def cases(self, device: torch.device, filled: bool) -> Iterator[Case]:
        """Yield the attention of each step; unless ``filled``, over few keys."""
        longest, most = max(context for _, context in self.steps), max(sequences for sequences, _ in self.steps)
        # no rotation, so that a reference needs none
        cosines = torch.ones(longest, HEAD_DIM // 2, device=device)
        kv_head_of = tuple(head // (self.heads // self.kv_heads) for head in range(self.heads))
        attention = Attention(self.heads, HEAD_DIM, kv_head_of, cosines, torch.zeros_like(cosines), most)
        for sequences, context in self.steps:
            nbytes = 2 * sequences * context * self.kv_heads * HEAD_DIM * _ITEM
            copies = -(-copies_beyond_caches(nbytes) // 2) if filled else 1  # large ones follow themselves
            kept = context if filled else BLOCK
            blocks = -(-kept // BLOCK)
            caches = [_cache(sequences * blocks, self.kv_heads, device, filled) for _ in range(copies)]
            tables = torch.randperm(sequences * blocks, device=device).int().view(sequences, blocks)
            batch = _decoding(tables, kept)
            qkv = _normal((sequences, (self.heads + 2 * self.kv_heads) * HEAD_DIM), device)
            row = {"kernel": "decode_attention", "sequences": sequences, "context": context}
            row |= {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": HEAD_DIM}

            def call(
                turn: int, qkv: torch.Tensor = qkv, caches: list[KVCache] = caches, batch: Batch = batch
            ) -> torch.Tensor:
                return attention(qkv, caches[turn], batch)

            def check(
                qkv: torch.Tensor = qkv, cache: KVCache = caches[0], tables: torch.Tensor = tables, kept: int = kept
            ) -> None:
                out = attention(qkv, cache, _decoding(tables, kept)).view(-1, self.heads, HEAD_DIM)
                queries = qkv[:, : self.heads * HEAD_DIM].view(-1, self.heads, HEAD_DIM)
                for sequence in {0, len(out) // 2, len(out) - 1}:
                    exact = _reference(queries[sequence], cache, tables[sequence], kept)
                    off_by(f"attention of {len(out)} x {kept}", out[sequence], exact, _APART, 2.0**-7)

            yield Case(row, copies, call, check)


class PromptShape(NamedTuple):
    """Attention of steps with prompts, by the engine's kernel; rotation is a separate kernel.

    Attributes:
        heads, kv_heads: of the rank.
        steps: the parts of each step, as in :data:`PROMPTS`.
    """

    heads: int
    kv_heads: int
    steps: tuple[tuple[tuple[int, int], ...], ...]

    def cases(self, device: torch.device, filled: bool) -> Iterator[Case]:
        """Yield the attention of each step. All have random keys and values, also where nothing is measured."""
        from shotcast.device.triton.intrinsics import is_hopper, num_sms
        from shotcast.kernels.triton import prompt_attention

        group = self.heads // self.kv_heads
        first_heads = torch.arange(0, self.heads + 1, group, dtype=torch.int32, device=device)
        sms = num_sms(device)
        for parts in self.steps:
            new, before = (np.array(each, np.int32) for each in zip(*parts, strict=True))
            tokens, lengths = int(new.sum()), before + new
            blocks = -(-lengths // BLOCK)
            cache = _cache(int(blocks.sum()), self.kv_heads, device, True)
            tables = torch.zeros(len(new), int(blocks.max()), dtype=torch.int32, device=device)
            order = torch.randperm(int(blocks.sum()), device=device).int()
            for number, part in enumerate(order.split(blocks.tolist())):
                tables[number, : len(part)] = part
            shape = group, self.kv_heads, HEAD_DIM
            most = prompt_attention.tile_tokens(tokens, *shape, cache.keys.dtype, sms, is_hopper(device))
            tiles = torch.from_numpy(attention_tiles(_inputs(new, before), most)).to(device)
            queries = _normal((tokens, self.heads, HEAD_DIM), device)
            out = torch.empty_like(queries)
            row: dict[str, Any] = {
                "kernel": "prompt_attention",
                "tokens": tokens,
                "parts": [list(part) for part in parts],
            }
            row |= {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": HEAD_DIM}
            arguments = queries, cache.keys, cache.values, tables, tiles, most, first_heads, group, BLOCK, 0, out

            def call(turn: int, arguments: tuple = arguments) -> None:
                prompt_attention.attend(*arguments)

            def check(
                ends: Sequence[int] = np.cumsum(new).tolist(),
                lengths: Sequence[int] = lengths.tolist(),
                arguments: tuple = arguments,
                cache: KVCache = cache,
            ) -> None:
                prompt_attention.attend(*arguments)
                queries, tables, out = arguments[0], arguments[3], arguments[-1]
                for sequence in {0, len(ends) // 2, len(ends) - 1}:
                    last = ends[sequence] - 1
                    exact = _reference(queries[last], cache, tables[sequence], lengths[sequence])
                    off_by(f"attention of {len(queries)} tokens", out[last], exact, _APART, 2.0**-7)

            yield Case(row, 1, call, check)


def decode_shapes() -> list[DecodeShape]:
    """Return the shapes of sequences that decode."""
    return [
        DecodeShape(
            heads,
            kv_heads,
            tuple(
                (sequences, context)
                for sequences in SEQUENCES
                for context in CONTEXTS
                if 2 * sequences * context * kv_heads * HEAD_DIM * _ITEM <= MOST_BYTES
            ),
        )
        for heads, kv_heads in HEADS
    ]


def prompt_shapes() -> list[PromptShape]:
    """Return the shapes of steps with prompts."""
    return [PromptShape(heads, kv_heads, PROMPTS) for heads, kv_heads in PROMPT_HEADS]


def _normal(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=_dtype(device))


def _dtype(device: torch.device) -> torch.dtype:
    """Return the type of caches: on a CPU, where nothing is measured, attention takes no other than float32."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _cache(blocks: int, kv_heads: int, device: torch.device, filled: bool) -> KVCache:
    cache = KVCache(blocks, BLOCK, kv_heads, HEAD_DIM, _dtype(device), device)
    if filled:
        cache.keys.normal_()
        cache.values.normal_()
    return cache


def _decoding(tables: torch.Tensor, context: int) -> Batch:
    """Return a step in which each sequence has ``context`` tokens, of which the last is new."""
    sequences, device = len(tables), tables.device
    rows = torch.arange(sequences, device=device)
    positions = torch.full((sequences,), context - 1, device=device)
    slots = tables[:, (context - 1) // BLOCK].long() * BLOCK + (context - 1) % BLOCK
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)
    return Batch(rows, positions, slots, sequences, rows, lengths, None, None, tables, None)


def _inputs(new: np.ndarray, before: np.ndarray) -> InputBatch:
    """Return a step of sequences in the order of the rows of their block tables."""
    firsts, nothing = np.cumsum(new, dtype=np.int32) - new, np.zeros(0, np.int32)
    rows = np.arange(len(new), dtype=np.int32)
    tokens = np.zeros(int(new.sum()), np.int32)
    return InputBatch(tokens, nothing, nothing, rows, before, new, firsts, nothing)


def _reference(query: torch.Tensor, cache: KVCache, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the attention of a query of each head, [heads, head_dim], to the first keys of a sequence, in float32."""
    heads, head_dim = query.shape
    slots = (table.long()[:, None] * BLOCK + torch.arange(BLOCK, device=table.device)).flatten()[:length]
    group = heads // cache.keys.shape[1]
    keys, values = (
        kept[slots].float().repeat_interleave(group, dim=1).transpose(0, 1) for kept in (cache.keys, cache.values)
    )
    scores = (keys @ query.float()[:, :, None]).squeeze(2) * head_dim**-0.5
    return (scores.softmax(1)[:, None] @ values).squeeze(1)
