"""Decoding attention on a real GPU, against compiled host code. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
from paged_attention_targets import both_ways, in_float8

pytestmark = pytest.mark.gpu
LENGTHS = 1, 40, 65, 700, 3000, 5001
CLOSE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}


@pytest.mark.parametrize("num_sms", [1, 30, 132, 1000])
@pytest.mark.parametrize("dtype", list(CLOSE))
def test_contexts_of_any_length_in_any_number_of_parts(dtype: str, num_sms: int) -> None:
    """Cover one part of up to 79 tiles to 64 parts, some of which are empty for most sequences."""
    for kv_head_of, head_dim, window, normed in (
        ((0, 0, 0, 0, 1, 1, 1, 1), 128, 0, False),
        ((0, 0, 1), 64, 900, True),
        ((0,) * 12, 80, 0, True),
    ):
        case = kv_head_of, head_dim, 16, window, dtype, normed, num_sms, LENGTHS, "cuda"
        assert both_ways(*case) < CLOSE[dtype], case


@pytest.mark.parametrize("num_sms", [1, 132])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_caps_and_caches_in_float8(dtype: str, num_sms: int) -> None:
    case = (0, 0, 0, 0, 1, 1, 1, 1), 256, 16, 900, dtype, True, num_sms, LENGTHS, "cuda"
    assert both_ways(*case, scoring=(0.1, 5.0)) < CLOSE[dtype]
    off, same = in_float8(dtype, num_sms, "cuda")
    assert off < 3e-2
    assert same
