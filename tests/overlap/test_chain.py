"""Chains on CPU ranks: the same bits in every way, and errors where they belong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import overlap_targets as targets
import pytest
import torch

import shotcast
from shotcast.errors import ConfigError
from shotcast.launcher.spawn import spawn
from shotcast.overlap import chains
from shotcast.overlap.lanes import ThreadLanes


def test_every_way_gives_the_bits_of_the_contract() -> None:
    ranks = 2
    results = spawn(targets.all_ways, ranks, timeout_s=300)
    assert results[0]["decision"] == results[1]["decision"]
    for found in results:
        for number in range(len(targets.SIZES)):
            expected = targets.expected_sum(ranks, number)
            for way in ("sequential", "plain", "library", "auto", "plain again", "library again", "auto again"):
                assert torch.equal(found[way][number], expected), way
            gathered = torch.cat([targets.inputs(rank, number) for rank in range(ranks)])
            assert torch.equal(found["gathered"][number], gathered)
        decision = found["decision"]
        assert set(decision.median_us) == {"sequential", "plain", "library"}
        best = min(decision.median_us.values())
        assert decision.median_us[decision.way] <= 1.02 * best


@pytest.mark.full
def test_the_library_sums_in_a_chain() -> None:
    assert spawn(targets.served_by_the_library, 3, timeout_s=300) == [(["sequential", "plain"], ["vendor"] * 4)] * 3


def test_any_rank_may_be_late_in_any_step() -> None:
    assert spawn(targets.late_ranks, 2, 0.02, timeout_s=300) == [[3.0, 30.0, 300.0, 3000.0]] * 2


def test_ranks_with_other_schedules_are_refused() -> None:
    for error in spawn(targets.different_chains, 2, timeout_s=300):
        assert (
            error == "ranks [1] overlap by another schedule than rank 0; steps, their order, way and sms must be equal"
        )


@pytest.mark.parametrize(
    ("step", "expected"),
    [("compute", ["CollectiveTimeout", "ValueError"]), ("communicate", ["CollectiveMismatch", "CollectiveMismatch"])],
)
def test_an_error_reaches_the_caller(step: str, expected: list[str]) -> None:
    assert spawn(targets.failing, 2, step, timeout_s=300) == expected


def test_a_number_of_sms_reaches_products_and_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes are threads here, as there is no GPU."""
    device = torch.device("cuda", 0)
    seen: list[object] = []

    class Rank:
        def __init__(self) -> None:
            self.device = device

    @contextlib.contextmanager
    def leave_sms(sms: int, on: torch.device) -> Iterator[None]:
        assert on == device
        seen.append(f"leave {sms}")
        yield
        seen.append("leave none")

    monkeypatch.setattr(chains, "lanes_of", lambda comm, priority: ThreadLanes([comm]))
    monkeypatch.setattr(chains, "StreamLanes", lambda comm, priority: ThreadLanes([comm]))
    monkeypatch.setattr(chains, "leave_sms", leave_sms)
    monkeypatch.setattr(chains, "agree_on", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def communicate(comm: object, x: int, **arguments: int) -> None:
        seen.append((x, arguments))

    for way in ("24 SMs", "copy engines", "plain"):
        one = chains.chain(Rank(), [lambda: 7], communicate, way, (0, 24))  # type: ignore[arg-type]
        assert [known.name for known in one.ways()] == ["sequential", "plain", "priority", "copy engines", "24 SMs"]
        one()
        one.close()
    one = chains.chain(Rank(), [lambda: 7])  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="decided on at its first call"):
        one()
    one.close()
    wanted = ((24, {"sms": 24}), (0, {"sms": 0}), (0, {}))
    assert seen == [each for left, given in wanted for each in (f"leave {left}", "leave none", (7, given))]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlap needs a communicator"):
        shotcast.overlap.chain((), [lambda: torch.ones(1)])
    with shotcast.Communicator() as comm, pytest.raises(ConfigError, match="called without arguments; 1 cannot be"):
        shotcast.overlap.chain(comm, [1])  # type: ignore[list-item]


def test_chains_that_run_otherwise_on_some_ranks_are_refused() -> None:
    for error in spawn(targets.chain_by_another_way, 2, timeout_s=300):
        assert "overlap by another schedule than rank 0" in error


def test_a_way_that_does_not_exist_is_refused() -> None:
    class Rank:
        device = torch.device("cpu")

    with pytest.raises(ConfigError, match="a chain runs by one of auto, sequential, plain, library, not 'fast'"):
        chains.chain([Rank()], [lambda: torch.ones(1)], way="fast")  # type: ignore[arg-type]
