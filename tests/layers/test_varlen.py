"""Prompts of a step by one call, against one call each: what is passed to PyTorch, whose kernel needs a GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.attention.varlen

from shotcast.layers import varlen
from shotcast.layers.attention import Attention, KeyValueCache
from shotcast.layers.batch import Prefills

HEAD_DIM, BLOCKS, BLOCK = 8, 40, 4


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """What PyTorch's documentation says that it computes; the last query belongs to the last key."""
    out = torch.empty_like(query)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    spans = [list(itertools.pairwise(of.tolist())) for of in (cu_seq_q, cu_seq_k)]
    assert [max(stop - first for first, stop in of) for of in spans] == [max_q, max_k]
    for (first, stop), (first_key, stop_key) in zip(*spans, strict=True):
        q, k, v = query[first:stop].double(), key[first_key:stop_key].double(), value[first_key:stop_key].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        ages = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        left, right = window_size
        hidden = (ages < -right) if right >= 0 else torch.zeros_like(ages, dtype=torch.bool)
        if left >= 0:
            hidden |= ages > left
        out[first:stop] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v).float()
    return out


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("kv_of", [(0, 0, 1, 1), (0, 1, 1), (0, 1)])
def test_one_call_is_as_good_as_one_each(kv_of: tuple[int, ...], window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    heads = len(kv_of)
    angles = torch.zeros(64, HEAD_DIM // 2)
    attention = Attention(heads, HEAD_DIM, kv_of, angles.cos(), angles.sin(), 4, window)
    cache = KeyValueCache(BLOCKS, BLOCK, max(kv_of) + 1, HEAD_DIM, torch.float32, torch.device("cpu"))
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    queried, kept = (7, 2, 12), (7, 20, 30)  # a whole prompt, the end of one, a part of one
    queries, keys = ((0, *itertools.accumulate(of)) for of in (queried, kept))
    slots = torch.randperm(BLOCKS * BLOCK, generator=generator)[: sum(kept)]
    starts = [torch.tensor(of, dtype=torch.int32) for of in (queries, keys)]
    prefills = Prefills(queries, keys, *starts, slots)
    x = torch.randn(sum(queried), heads, HEAD_DIM, generator=generator)
    found = [torch.empty_like(x) for _ in range(2)]
    attention._prefill(x, cache, prefills, found[0])
    monkeypatch.setattr(varlen, "serves", lambda queries: True)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", reference)
    attention._prefill(x, cache, prefills, found[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_only_half_precision_on_a_gpu() -> None:
    assert not varlen.serves(torch.zeros(1, dtype=torch.bfloat16))
