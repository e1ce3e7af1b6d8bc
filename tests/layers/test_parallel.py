"""The norm in FP8 is the norm, rounded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from parallel_targets import norms, norms_after_copy_engines

import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.collectives.registry import registered
from shotcast.layers.parallel import Parallel


@pytest.mark.parametrize(
    ("ranks", "algorithm", "quantized"), [(1, "auto", True), (2, "auto", True), (2, "ring", False)]
)
def test_the_same_norm(ranks: int, algorithm: str, quantized: bool) -> None:
    for in_fp8, off in shotcast.spawn(norms, ranks, algorithm, timeout_s=300):
        assert in_fp8 == quantized
        assert off <= 1 if quantized else off == 0


@pytest.mark.full
def test_sums_of_copy_engines_keep_the_bits_of_the_norm() -> None:
    """The norm is a kernel of its own then; compiled CPU ranks have no copy engines."""
    for env in ({}, GPU_COLLECTIVES):
        for equal in interpret(norms_after_copy_engines, 2, env=env):
            assert equal == [True] * 7


def test_a_named_algorithm_serves_what_it_can() -> None:
    class Ranks:
        """A communicator whose one-shot serves up to 4 rows."""

        rank, world_size = 0, 2
        topology = SimpleNamespace(algorithms=registered())
        asked = 0

        def candidates(self, x: torch.Tensor, op: str) -> list[str]:
            self.asked += 1
            return ["two_shot"] + ["one_shot"] * (x.shape[0] <= 4)

    ranks = Ranks()
    parallel = Parallel(ranks, algorithm="one_shot")  # type: ignore[arg-type]
    for _ in range(2):
        taken = [parallel._algorithm("all_reduce_rms_norm", torch.zeros(rows, 8)) for rows in (1, 4, 5)]
        assert taken == ["one_shot", "one_shot", "auto"]
    assert ranks.asked == 3
