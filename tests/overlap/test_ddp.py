"""The DDP hook averages gradients in the order of the numerics contract, and errors end the backward."""

from __future__ import annotations

import expected_results
import overlap_targets as targets
import pytest
import torch

from shotcast.launcher.spawn import spawn


@pytest.mark.full
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_gradients_are_those_of_the_contract(lanes: int) -> None:
    ranks = 2
    results = spawn(targets.trained, ranks, lanes, timeout_s=300)
    for found in results:
        assert found["buckets"] > 6, "there are several buckets"
        for step, averaged in enumerate(found["averaged"]):
            for number, gradient in enumerate(averaged):
                own = [result["own"][step][number] for result in results]
                assert torch.equal(gradient, expected_results.all_reduce(own, "one_shot") / ranks)


def test_an_error_ends_the_backward() -> None:
    first, second = spawn(targets.failing_bucket, 2, timeout_s=300)[0]
    assert "rank 0" in second
    assert second in first
