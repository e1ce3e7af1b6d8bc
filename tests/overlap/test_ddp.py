"""The DDP hook averages gradients in the order of the numerics contract, and errors end the backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import expected_results
import overlap_targets as targets
import pytest
import torch

import shared_ranks
from shotcast.launcher.spawn import spawn
from shotcast.overlap import ddp


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


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_averages_are_rounded_once_where_kernels_divide(algorithm: str) -> None:
    """With three ranks dividing is not exact, so rounding twice gives other bits."""
    ranks = shared_ranks.run(targets.averaged, 3, algorithm, timeout_s=300)
    xs = [own for own, _ in ranks]
    total = expected_results.all_reduce(xs, "ring" if algorithm == "ring" else "one_shot")
    exact = (sum(x.float() for x in xs) / 3).to(xs[0].dtype)
    assert not torch.equal(total / 3, exact)
    for _, average in ranks:
        assert torch.equal(average, total / 3 if algorithm == "ring" else exact)


@pytest.mark.parametrize(
    ("device", "nodes", "exclusive", "algorithm", "asked", "taken"),
    [
        ("cuda", 1, True, "auto", None, ddp.SMS),
        ("cuda", 1, False, "auto", None, None),
        ("cuda", 1, False, "auto", 24, 24),
        ("cuda", 1, True, "two_shot", None, None),
        ("cuda", 2, True, "auto", None, None),
        ("cpu", 1, True, "auto", None, None),
    ],
)
def test_sums_leave_most_sms_of_a_gpu_to_the_backward(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    nodes: int,
    exclusive: bool,
    algorithm: str,
    asked: int | None,
    taken: int | None,
) -> None:
    """Copy engines leave all of them, unless the communicator is exclusive."""
    seen: list[Any] = []
    topology = SimpleNamespace(shape=SimpleNamespace(nodes=nodes), exclusive=exclusive)
    comm = SimpleNamespace(
        device=SimpleNamespace(type=device),
        topology=topology,
        world_size=2,
        all_reduce=lambda x, **given: seen.append(given["sms"]) or x,
    )
    lanes = SimpleNamespace(communicators=[comm], count=1, post=lambda lane, work: work())
    monkeypatch.setattr(ddp, "lanes_of", lambda ranks: lanes)
    comms: Any = comm
    ddp.GradientBuckets(comms, algorithm, asked).average(torch.ones(3))
    assert seen == [taken]


def test_an_error_ends_the_backward() -> None:
    first, second = spawn(targets.failing_bucket, 2, timeout_s=300)[0]
    assert "rank 0" in second
    assert second in first
