"""Ranks of test_prompt_attention.py: the kernel under the interpreter, compared with attention in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.kernels.step_fields import TILE_FIELDS
from shotcast.kernels.triton.prompt_attention import attend

CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Accepted errors, relative to the largest result of their head. (The interpreter truncates bfloat16 weights.)"""


@dataclass(frozen=True, slots=True)
class Case:
    """A step, and the shape of a layer.

    Attributes:
        sequences: the number of tokens before this step and in it, for each sequence.
        padding: queries after these that belong to no sequence.
        unused: the number of empty tiles.
        tokens: the largest number of tokens of a tile.
    """

    sequences: tuple[tuple[int, int], ...]
    kv_head_of: tuple[int, ...]
    head_dim: int
    block_size: int
    window: int
    dtype: torch.dtype
    padding: int
    unused: int
    tokens: int
    seed: int
    scale: float | None = None
    cap: float = 0.0
    fp8: bool = False


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    kv_head_of = tuple(kv for kv, group in enumerate(groups) for _ in range(group))
    dtype = draw(st.sampled_from(list(CLOSE)))
    several = draw(st.integers(1, 4))
    sequences = [
        (draw(st.sampled_from([0, 1, 15, 64, 130]) | st.integers(0, 200)), draw(st.just(1) | st.integers(1, 70)))
        for _ in range(several)
    ]
    rows = 16 if dtype == torch.float32 else draw(st.sampled_from([64, 128]))
    return Case(
        tuple(sequences),
        kv_head_of,
        draw(st.sampled_from([64, 80, 128])),
        draw(st.sampled_from([4, 16, 20, 128])),
        draw(st.sampled_from([0, 0, 1, 7, 64, 100, 1000])),
        dtype,
        draw(st.integers(0, 9)),
        draw(st.integers(0, 3)),
        max(1, rows // max(groups)),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from([None, 0.2])),
        draw(st.sampled_from([0.0, 1.5])),
        draw(st.booleans()),
    )


def attended(case: Case, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's results, and the exact ones: [tokens with padding, heads, head_dim], float64."""
    generator = torch.Generator().manual_seed(case.seed)
    heads, kv_heads, size = len(case.kv_head_of), max(case.kv_head_of) + 1, case.block_size
    lengths = [before + new for before, new in case.sequences]
    blocks_of = [-(-length // size) for length in lengths]
    blocks = torch.randperm(sum(blocks_of), generator=generator).int()
    # Slots that no sequence holds may contain anything; rows of the tables are in another order than the sequences.
    keys, values = (
        torch.full([sum(blocks_of) * size, kv_heads, case.head_dim], float("nan"), dtype=case.dtype) for _ in range(2)
    )
    scales = torch.ones(2, *keys.shape[:2])
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    tables = torch.full([len(lengths) + 2, max(blocks_of) + 1], 1 << 20, dtype=torch.int32)
    tokens = sum(new for _, new in case.sequences)
    queries = torch.randn(tokens + case.padding, heads, case.head_dim, generator=generator).to(case.dtype)
    queries[tokens:] = float("nan")
    wanted = torch.zeros(queries.shape, dtype=torch.float64)
    tiles = []
    first = taken = 0
    for number, (before, new) in enumerate(case.sequences):
        row, length = int(rows[number]), before + new
        mine = blocks[taken : taken + blocks_of[number]]
        tables[row, : len(mine)] = mine
        taken += len(mine)
        position = torch.arange(length)
        slots = mine[position // size].long() * size + position % size
        for kept, scale in ((keys, scales[0]), (values, scales[1])):
            rows_of = torch.randn(length, kv_heads, case.head_dim, generator=generator)
            if case.fp8:  # exact in the cache, and dequantized in the reference
                scale[slots] = torch.rand(length, kv_heads, generator=generator) + 0.5
                rows_of = rows_of.to(torch.float8_e4m3fn).float()
            kept[slots] = rows_of.to(case.dtype)
        kv_head_of = torch.tensor(case.kv_head_of)
        key, value = (
            (kept[slots].double() * scale[slots].double()[:, :, None])[:, kv_head_of]
            for kept, scale in ((keys, scales[0]), (values, scales[1]))
        )
        scores = torch.einsum("qhd,khd->hqk", queries[first : first + new].double(), key)
        scores *= case.scale or case.head_dim**-0.5
        scores = case.cap * torch.tanh(scores / case.cap) if case.cap else scores
        ages = position[before:, None] - position
        seen = (ages >= 0) & ((ages < case.window) if case.window else True)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        wanted[first : first + new] = torch.einsum("hqk,khd->qhd", weights, value)
        for start in range(0, new, case.tokens):
            tiles.append((row, first + start, min(case.tokens, new - start), before + start))
        first += new
    for start in range(0, case.padding, case.tokens):
        tiles.append((0, first + start, min(case.tokens, case.padding - start), -1))
    tiles += [(0, 0, 0, -1)] * case.unused
    starts = [case.kv_head_of.index(kv) for kv in range(kv_heads)] + [heads]
    out = torch.full_like(queries, float("nan"), device=device)
    stored = torch.float8_e4m3fn if case.fp8 else case.dtype
    attend(
        queries.to(device),
        keys.to(device, stored),
        values.to(device, stored),
        tables.to(device),
        torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, TILE_FIELDS),
        case.tokens,
        torch.tensor(starts, dtype=torch.int32, device=device),
        max(stop - start for start, stop in itertools.pairwise(starts)),
        case.block_size,
        case.window,
        out,
        case.scale,
        case.cap,
        (scales[0].to(device), scales[1].to(device)) if case.fp8 else None,
    )
    return out.cpu().double(), wanted


def is_right(case: Case, device: str) -> bool:
    found, wanted = attended(case, device)
    return bool(((found - wanted).abs() <= CLOSE[case.dtype] * wanted.abs().amax(-1, keepdim=True)).all())


def any_step_is_attended_to(examples: int, device: str = "cpu") -> None:
    """Raise AssertionError for a step whose attention is wrong."""

    @settings(max_examples=examples, deadline=None, database=None)
    @given(cases())
    def check(case: Case) -> None:
        assert is_right(case, device)

    check()
