"""Compiled attention of CPU ranks, against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.kernels.cpu import attention
from shotcast.kernels.cpu.attention import decode, rotate_into_cache


@pytest.mark.parametrize("threads", [1, 2, 3])
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    kv_head_of=st.sampled_from([(0,), (0, 0, 1), (0, 0, 0, 1, 1), (0, 1, 2, 3)]),
    head_dim=st.sampled_from([2, 8, 64, 96]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 1, 7]),
    scale=st.sampled_from([None, 0.2]),
    cap=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 1000),
)
def test_decode(
    threads: int,
    lengths: list[int],
    kv_head_of: tuple[int, ...],
    head_dim: int,
    block_size: int,
    window: int,
    scale: float | None,
    cap: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(blocks_of) + 3, generator=generator)
    kv_heads = max(kv_head_of) + 1
    keys, values = (torch.randn(len(blocks) * block_size, kv_heads, head_dim, generator=generator) for _ in range(2))
    tables = torch.zeros(len(lengths), max(blocks_of), dtype=torch.int32)
    taken = 0
    for sequence, count in enumerate(blocks_of):
        tables[sequence, :count] = blocks[taken : taken + count]
        taken += count
    queries = torch.randn(len(lengths), len(kv_head_of), head_dim, generator=generator)
    out = torch.full_like(queries, float("nan"))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    attention._THREADS_FROM, kept = 0, attention._THREADS_FROM
    try:
        decode(
            queries,
            keys,
            values,
            torch.cat((torch.full_like(tables[:1], 1 << 20), tables.flip(0))),
            torch.arange(len(lengths), 0, -1),
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(kv_head_of),
            block_size,
            window,
            out,
            scale,
            cap,
        )
    finally:
        torch.set_num_threads(before)
        attention._THREADS_FROM = kept
    for sequence, length in enumerate(lengths):
        seen = torch.arange(max(0, length - window) if window else 0, length)
        slots = tables[sequence].long()[seen // block_size] * block_size + seen % block_size
        for head, kv in enumerate(kv_head_of):
            scores = keys[slots, kv].double() @ queries[sequence, head].double() * (scale or head_dim**-0.5)
            scores = cap * torch.tanh(scores / cap) if cap else scores
            wanted = scores.softmax(0) @ values[slots, kv].double()
            torch.testing.assert_close(out[sequence, head].double(), wanted, rtol=1e-4, atol=1e-5)


def test_scores_that_overflow_without_their_maximum() -> None:
    keys = torch.full((4, 1, 8), 100.0)
    keys[2] = 101.0
    values = torch.arange(4.0).view(4, 1, 1).expand(4, 1, 8).contiguous()
    queries, out = torch.full((1, 1, 8), 100.0), torch.empty(1, 1, 8)
    tables, lengths = torch.tensor([[0]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    decode(queries, keys, values, tables, torch.tensor([0]), lengths, torch.tensor([0]), 4, 0, out)
    assert torch.equal(out, torch.full_like(out, 2.0))


@pytest.mark.parametrize("place", [0, 17, 99])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_shows(place: int, bad: float) -> None:
    keys, values = torch.randn(112, 1, 16), torch.randn(112, 1, 16)
    keys[place] = bad
    queries, out = torch.rand(1, 1, 16) + 0.1, torch.empty(1, 1, 16)
    tables, lengths = torch.arange(7, dtype=torch.int32)[None], torch.tensor([100], dtype=torch.int32)
    decode(queries, keys, values, tables, torch.tensor([0]), lengths, torch.tensor([0]), 16, 0, out)
    assert out.isnan().all()


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 6),
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8, 64]),
    seed=st.integers(0, 1000),
)
def test_rotation_goes_to_the_right_places(tokens: int, heads: int, kv_heads: int, head_dim: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator)
    angles = torch.rand(50, head_dim // 2, generator=generator, dtype=torch.float64) * 6
    positions = torch.randint(50, (tokens,), generator=generator)
    slots = torch.randperm(20, generator=generator)[:tokens]
    keys, values = (torch.full((20, kv_heads, head_dim), 7.0) for _ in range(2))
    queries = torch.empty(tokens, heads, head_dim)
    rotate_into_cache(x, angles.cos().float(), angles.sin().float(), positions, slots, keys, values, queries)

    pairs = x.double().view(tokens, heads + 2 * kv_heads, 2, head_dim // 2)
    turned = torch.polar(torch.ones(tokens, head_dim // 2, dtype=torch.float64), angles[positions])[:, None]
    rotated = torch.complex(pairs[:, :, 0], pairs[:, :, 1]) * turned
    rotated = torch.cat((rotated.real, rotated.imag), dim=-1)
    torch.testing.assert_close(queries.double(), rotated[:, :heads], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys[slots].double(), rotated[:, heads : heads + kv_heads], rtol=1e-5, atol=1e-5)
    assert torch.equal(values[slots].flatten(1), x[:, (heads + kv_heads) * head_dim :])
    untouched = torch.ones(20, dtype=torch.bool).index_fill(0, slots, False)
    assert (keys[untouched] == 7).all()
    assert (values[untouched] == 7).all()


_BITS = """
import hashlib, torch
from shotcast.kernels.cpu import attention, gemv
x = torch.randn(256, 8, 24, generator=torch.Generator().manual_seed(0))
out = torch.empty(3, 8, 24)
tables, rows = torch.arange(64, dtype=torch.int32).view(4, 16), torch.arange(3)
lengths = torch.tensor([37, 5, 64], dtype=torch.int32)
attention.decode(x[:3], x, x, tables, rows, lengths, torch.arange(8), 4, 0, out)
found = [out, gemv.linear(x[0], x[:, 0].contiguous())]
print(hashlib.sha256(b"".join(one.numpy().tobytes() for one in found)).hexdigest())
"""


@pytest.mark.full
def test_machine_code_that_was_kept_has_the_bits_of_what_was_compiled(tmp_path: Path) -> None:
    """Sums may be added in any order within a function, so each must be compiled in one place."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    compiled, kept = (subprocess.check_output([sys.executable, "-c", _BITS], env=environment) for _ in range(2))
    assert compiled == kept
