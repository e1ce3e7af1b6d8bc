"""The policy takes the fastest way, falls back where nothing pays, and says why."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shotcast.errors import ConfigError
from shotcast.hardware.nodes import NodeLayout
from shotcast.overlap import policy
from shotcast.overlap.policy import Decision, Way


class Topology:
    layout = NodeLayout.of_keys(["host"] * 2)


class Rank:
    """A stand-in for a communicator of two ranks, of which the other one has ``others`` numbers more or less."""

    device, world_size, rank, topology = torch.device("cpu"), 2, 0, Topology()

    def __init__(self, factor: float = 1.0):
        self._factor = factor

    def barrier(self) -> None: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x * self._factor])


def decided(
    monkeypatch: pytest.MonkeyPatch,
    times: Mapping[str, Sequence[float]],
    factor: float = 1.0,
) -> tuple[Decision, list[str]]:
    """Decide between ways whose runs take ``times`` in turn, and return the order in which they were timed."""
    ran: list[str] = []
    clocks = {name: itertools.cycle(each) for name, each in times.items()}
    current = [""]

    def time_us(comm: Any, run: Any) -> float:
        run()
        ran.append(current[0])
        return next(clocks[current[0]])

    monkeypatch.setattr(policy, "_time_us", time_us)

    def way(name: str) -> Way:
        def run() -> None:
            current[0] = name

        return Way(name, run)

    return policy.decide(Rank(factor), [way(name) for name in times]), ran  # type: ignore[arg-type]


def test_the_fastest_by_the_median_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"sequential": [100.0], "plain": [80, 80, 80, 500, 500], "other": [90, 90, 90, 1, 1]}
    decision, ran = decided(monkeypatch, times)
    assert decision.way == "plain"
    assert decision.median_us == {"sequential": 100, "plain": 80, "other": 90}
    assert decision.why == "20% less time than one after the other"
    assert sorted(ran) == sorted([*times] * policy.ROUNDS)
    assert ran[:6] == ["sequential", "plain", "other", "plain", "other", "sequential"]


def test_nothing_pays_on_busy_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "available_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    decision, _ = decided(monkeypatch, {"sequential": [100.0], "plain": [130.0]})
    assert decision.way == "sequential"
    assert decision.why == ("no overlap pays; 2 ranks on this node compute with 1 threads each, and there are 2 cores")
    monkeypatch.setattr(policy, "available_cores", lambda: 8)
    decision, _ = decided(monkeypatch, {"sequential": [100.0], "plain": [130.0]})
    assert decision.why == "no overlap pays"


def test_a_gain_within_the_noise_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    decision, _ = decided(monkeypatch, {"sequential": [100.0], "plain": [99.5]})
    assert decision.way == "sequential"
    assert "overlap gains 0.5% at most" in decision.why


def test_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    decision, _ = decided(monkeypatch, {"sequential": [100.0], "plain": [50.0]}, factor=3.0)
    assert decision.median_us == {"sequential": 300, "plain": 150}


@given(st.lists(st.floats(1, 1e6), min_size=2, max_size=6))
def test_the_choice_is_never_much_slower_than_the_best(times: list[float]) -> None:
    names = ["sequential", "plain", *(f"way {number}" for number in range(4))][: len(times)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        decision, _ = decided(monkeypatch, {name: [one] for name, one in zip(names, times, strict=True)})
    assert decision.median_us[decision.way] <= 1.02 * min(times)


def test_the_first_way_is_the_sequential_one() -> None:
    with pytest.raises(ConfigError, match="first way is the sequential"):
        policy.decide(Rank(), [Way("plain", lambda: None)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ([1.0, float("nan"), -0.0], True), ([1.0, float("nan"), 0.0], False), ([1.0, float("nan")], False),
        ([[1.0, float("nan"), -0.0]], False),
    ],
    ids=["equal", "another zero", "another size", "another shape"],
)  # fmt: skip
def test_a_way_with_other_results_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: list[Any], taken: bool
) -> None:
    times = {"sequential": 10.0, "fused": 5.0, "wild": 6.0}
    current = [""]
    monkeypatch.setattr(policy, "_time_us", lambda comm, run: (run(), times[current[0]])[1])

    def way(name: str, result: Any) -> Way:
        def run() -> Any:
            current[0] = name
            return result

        return Way(name, run)

    right = [torch.tensor([1.0, float("nan"), -0.0]), (torch.ones(2, 2).t(),)]
    ways = [way("sequential", right), way("fused", [torch.tensor(given), (torch.ones(2, 2),)]), way("wild", None)]
    comm: Any = Rank()
    decision = policy.decide(comm, ways, checked=["fused"])
    assert decision.way == ("fused" if taken else "wild"), "nobody asked for a comparison of the last one"
    assert ("fused" in decision.left_out) is not taken
    assert ("results differ" in caplog.text) is not taken


def test_a_way_with_other_results_on_another_rank_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Rank):
        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, torch.ones_like(x)])

    monkeypatch.setattr(policy, "_time_us", lambda comm, run: 5.0)
    comm: Any = Other()
    ways = [Way("sequential", lambda: torch.ones(2)), Way("fused", lambda: torch.ones(2))]
    assert policy.decide(comm, ways, checked=["fused"]).left_out.keys() == {"fused"}
