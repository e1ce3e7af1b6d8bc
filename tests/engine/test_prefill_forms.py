"""The choice between whole steps with prompts and halves: when both are compared, what is taken, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from shotcast.engine import prefill_forms
from shotcast.engine.prefill_forms import BY_COPIES, HALVES, WHOLE, PrefillForms
from shotcast.overlap.policy import PLAIN, SEQUENTIAL, Decision, Way

SIZE = 1024


class Comm:
    """Ranks on GPUs, or ranks on CPUs of several nodes."""

    served = "copy_engines", "vendor"

    def __init__(self, device: str, network: str):
        self.device, self.topology = (
            SimpleNamespace(type=device),
            SimpleNamespace(network=SimpleNamespace(name=network)),
        )

    def candidates(self, x: Any, op: str) -> tuple[str, ...]:
        return self.served


def forms_of(
    monkeypatch: pytest.MonkeyPatch,
    overlap: str = "auto",
    decisions: dict[int, Decision] | None = None,
    static: bool = True,
    **others: Any,
) -> PrefillForms:
    monkeypatch.setattr(prefill_forms, "lanes_of", mock.Mock())
    monkeypatch.setattr(prefill_forms, "_share_gpus", lambda comm: False)
    monkeypatch.setattr(PrefillForms, "_half", lambda self, size: None)
    reason = others.pop("unsupported_reason", "")
    comm = Comm("cuda" if static else "cpu", others.pop("network", "" if static else "tcp"))
    parallel = SimpleNamespace(**{"comm": comm, "size": 2, "stages": 1, "algorithm": "auto"} | others)
    model: Any = SimpleNamespace(parallel=parallel, overlap_unsupported_reason=reason)
    return PrefillForms(model, overlap, {} if decisions is None else decisions, static)


def measured(monkeypatch: pytest.MonkeyPatch, forms: PrefillForms, fastest: int) -> list[str]:
    """Let a number of parts be the faster one. Return the compared ways, in their order."""
    asked: list[str] = []

    def measure(comm: Any, ways: Sequence[Way], rounds: int = 5) -> dict[str, float]:
        asked.extend(way.name for way in ways)
        return {way.name: 50.0 if way.run() == fastest else 100.0 for way in ways}

    def run_of(parts: int) -> Callable[[], int]:
        return lambda: parts

    monkeypatch.setattr("shotcast.overlap.policy.measure", measure)
    monkeypatch.setattr("shotcast.overlap.policy._reason_against_overlap", lambda comm: "")
    assert forms.undecided(SIZE)
    forms.decide(SIZE, run_of)
    assert not forms.undecided(SIZE)
    return asked


@pytest.mark.parametrize(
    ("others", "halves"),
    [
        ({}, BY_COPIES),
        ({"network": "nvshmem"}, PLAIN),
        ({"network": "nvshmem", "algorithm": "nvrar"}, PLAIN),
        ({"static": False}, PLAIN),
    ],
)
@pytest.mark.parametrize("fastest", [WHOLE, HALVES])
def test_the_faster_one_is_taken_and_the_decision_says_why(
    monkeypatch: pytest.MonkeyPatch, fastest: int, others: dict[str, Any], halves: str
) -> None:
    forms = forms_of(monkeypatch, **others)
    assert forms.by_copies == (halves == BY_COPIES)
    assert measured(monkeypatch, forms, fastest) == [SEQUENTIAL, halves]
    assert forms.parts(SIZE) == fastest
    decision = forms.decisions[SIZE]
    assert decision.way == (halves if fastest == HALVES else SEQUENTIAL)
    assert ("no overlap pays" in decision.why) == (fastest == WHOLE)


def test_what_is_decided_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine measures with one runner and computes with another, on all sizes alike."""
    decisions: dict[int, Decision] = {}
    measured(monkeypatch, forms_of(monkeypatch, decisions=decisions), HALVES)
    again = forms_of(monkeypatch, decisions=decisions)
    assert not again.undecided(SIZE)
    assert again.parts(SIZE) == HALVES
    assert again.undecided(2 * SIZE)


@pytest.mark.parametrize(
    ("overlap", "others", "why"),
    [
        ("off", {}, "overlap is off"),
        ("auto", {"size": 1}, "one stage of several ranks"),
        ("auto", {"stages": 2}, "one stage of several ranks"),
        ("auto", {"unsupported_reason": "the family has other norms"}, "other norms"),
        ("auto", {"algorithm": "vendor"}, "algorithm vendor was named"),
        ("auto", {"static": False, "network": ""}, "wait for no network"),
    ],
)
def test_steps_that_are_never_divided(
    monkeypatch: pytest.MonkeyPatch, overlap: str, others: dict[str, Any], why: str
) -> None:
    forms = forms_of(monkeypatch, overlap, **others)
    assert not forms.undecided(SIZE)
    assert forms.parts(SIZE) == WHOLE
    assert why in forms.decisions[SIZE].why
    assert forms.controller is None


@pytest.mark.parametrize(("static", "least"), [(True, 512), (False, 64)])
def test_short_steps_are_not_measured(monkeypatch: pytest.MonkeyPatch, static: bool, least: int) -> None:
    forms = forms_of(monkeypatch, static=static)
    assert not forms.undecided(least - 1)
    assert forms.parts(least - 1) == WHOLE
    assert f"fewer than {least} tokens" in forms.decisions[least - 1].why
    assert forms.undecided(least)


def test_ranks_that_take_turns_on_a_gpu_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = forms_of(monkeypatch)
    monkeypatch.setattr(prefill_forms, "_share_gpus", lambda comm: True)
    assert not forms.undecided(SIZE)
    assert "take turns" in forms.decisions[SIZE].why


def test_steps_whose_sums_copy_engines_do_not_serve_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comm, "served", ("vendor",))
    forms = forms_of(monkeypatch)
    assert not forms.undecided(SIZE)
    assert forms.parts(SIZE) == WHOLE
    assert "copy engines do not serve" in forms.decisions[SIZE].why
    assert forms_of(monkeypatch, static=False).undecided(SIZE), "threads need no copy engines"
