"""Chains on CPU ranks: the same bits in every way, and errors where they belong."""

from __future__ import annotations

import overlap_targets as targets
import pytest
import torch

import shotcast
from shotcast.errors import ConfigError
from shotcast.launcher.spawn import spawn


def test_every_way_gives_the_bits_of_the_contract() -> None:
    ranks = 2
    results = spawn(targets.all_ways, ranks, timeout_s=100)
    assert results[0]["decision"] == results[1]["decision"]
    for found in results:
        for number in range(len(targets.SIZES)):
            expected = targets.expected_sum(ranks, number)
            for way in ("sequential", "plain", "auto", "plain again", "auto again"):
                assert torch.equal(found[way][number], expected), way
            gathered = torch.cat([targets.inputs(rank, number) for rank in range(ranks)])
            assert torch.equal(found["gathered"][number], gathered)
        decision = found["decision"]
        assert set(decision.median_us) == {"sequential", "plain"}
        best = min(decision.median_us.values())
        assert decision.median_us[decision.way] <= 1.02 * best


def test_any_rank_may_be_late_in_any_step() -> None:
    assert spawn(targets.late_ranks, 2, 0.02, timeout_s=60) == [[3.0, 30.0, 300.0, 3000.0]] * 2


@pytest.mark.parametrize(
    ("step", "expected"),
    [("compute", ["CollectiveTimeout", "ValueError"]), ("communicate", ["CollectiveMismatch", "CollectiveMismatch"])],
)
def test_an_error_reaches_the_caller(step: str, expected: list[str]) -> None:
    assert spawn(targets.failing, 2, step, timeout_s=60) == expected


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlap needs a communicator"):
        shotcast.overlap.chain((), [lambda: torch.ones(1)])
