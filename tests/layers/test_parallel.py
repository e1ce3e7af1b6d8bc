"""A norm in FP8 is the norm, rounded; on ranks that add up whole residuals or parts of them."""

from __future__ import annotations

import pytest
from parallel_targets import norms

import shotcast


@pytest.mark.parametrize(
    ("ranks", "algorithm", "sequence_parallel", "quantized"),
    [(1, "auto", 0, True), (2, "auto", 0, True), (2, "auto", 4, True), (2, "ring", 0, False)],
)
def test_the_same_norm(ranks: int, algorithm: str, sequence_parallel: int, quantized: bool) -> None:
    for in_fp8, off in shotcast.spawn(norms, ranks, algorithm, sequence_parallel, timeout_s=60):
        assert in_fp8 == quantized
        assert off <= 1 if quantized else off == 0
