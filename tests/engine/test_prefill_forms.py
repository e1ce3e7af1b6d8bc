"""The choice of forms of steps with prompts: which are compared, what is taken, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from shotcast.engine import prefill_forms
from shotcast.engine.prefill_forms import BESIDE_OWN, BY_COPIES, FORMS, HALVES, WHOLE, PrefillForm, PrefillForms
from shotcast.overlap.policy import Decision, Way

SIZE = 1024


class Comm:
    """Ranks on GPUs whose sums of more than 512 tokens take the two-shot."""

    device = SimpleNamespace(type="cuda")
    able = "few_sms", "copy_engines"

    def candidates(self, x: Any, op: str, sms: int | None) -> list[str]:
        return [name for name in (*self.able, "vendor") if name == "vendor" or (name == "few_sms") == bool(sms)]

    def explain(self, x: Any, op: str) -> Any:
        return SimpleNamespace(algorithm="two_shot" if x.shape[0] > 512 else "one_shot")


def forms_of(
    monkeypatch: pytest.MonkeyPatch,
    overlap: str,
    decisions: dict[int, Decision] | None = None,
    ranks: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    **others: Any,
) -> PrefillForms:
    monkeypatch.setattr(prefill_forms, "lanes_of", mock.Mock())
    monkeypatch.setattr(prefill_forms, "_share_gpus", lambda comm: False)
    monkeypatch.setattr(PrefillForms, "_message", lambda self, tokens: torch.empty(tokens, 1))
    parallel = SimpleNamespace(comm=Comm(), size=ranks, stages=1, algorithm="auto")
    for name, value in others.items():
        setattr(parallel, name, value)
    block = SimpleNamespace(qkv=SimpleNamespace(takes_float8=lambda rows: False))
    model: Any = SimpleNamespace(
        parallel=parallel, dtype=dtype, blocks=[block], overlap_unsupported_reason=others.get("unsupported_reason", "")
    )
    return PrefillForms(model, overlap, {} if decisions is None else decisions)


def measured(monkeypatch: pytest.MonkeyPatch, forms: PrefillForms, fastest: str) -> list[str]:
    """Let a form be the fastest of those that are compared. Return the compared ones, in their order."""
    asked: list[str] = []

    def measure(comm: Any, ways: Sequence[Way], rounds: int = 5) -> dict[str, float]:
        asked.extend(way.name for way in ways)
        assert [way.run() for way in ways] == asked
        return {name: 50.0 if name == fastest else 100.0 for name in asked}

    def run_of(form: PrefillForm) -> Callable[[], str]:
        return lambda: form.name

    monkeypatch.setattr(prefill_forms, "measure", measure)
    monkeypatch.setattr("shotcast.overlap.policy.measure", measure)
    monkeypatch.setattr("shotcast.overlap.policy._predictions", lambda comm, ways: {})
    assert forms.undecided(SIZE)
    forms.decide(SIZE, run_of)
    assert not forms.undecided(SIZE)
    return asked


@pytest.mark.parametrize("fastest", FORMS)
def test_auto_takes_the_fastest_form_and_says_why(monkeypatch: pytest.MonkeyPatch, fastest: str) -> None:
    forms = forms_of(monkeypatch, "auto")
    assert measured(monkeypatch, forms, fastest) == list(FORMS)
    assert forms.form(SIZE) == FORMS[fastest]
    why = forms.decisions[SIZE].why
    assert ("no overlap pays" in why) == (fastest == WHOLE.name)
    assert "the sum of a half takes one_shot, that of the whole two_shot" in why


@pytest.mark.parametrize(
    ("overlap", "compared"),
    [("on", [HALVES, BY_COPIES, BESIDE_OWN]), ("shaped", [BY_COPIES, BESIDE_OWN])],
)
def test_named_forms_are_compared_without_the_sequential_one(
    monkeypatch: pytest.MonkeyPatch, overlap: str, compared: list[PrefillForm]
) -> None:
    forms = forms_of(monkeypatch, overlap)
    assert measured(monkeypatch, forms, BESIDE_OWN.name) == [form.name for form in compared]
    assert forms.form(SIZE) == BESIDE_OWN


def test_what_is_decided_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine measures with one runner and computes with another, on all sizes alike."""
    decisions: dict[int, Decision] = {}
    measured(monkeypatch, forms_of(monkeypatch, "auto", decisions), HALVES.name)
    again = forms_of(monkeypatch, "auto", decisions)
    assert not again.undecided(SIZE)
    assert again.form(SIZE) == HALVES
    assert again.undecided(2 * SIZE)


@pytest.mark.parametrize(
    ("overlap", "others", "why"),
    [
        ("off", {}, "overlap is off"),
        ("auto", {"size": 1}, "one stage of several ranks"),
        ("on", {"stages": 2}, "one stage of several ranks"),
        ("plain", {"unsupported_reason": "the family has other norms"}, "other norms"),
    ],
)
def test_steps_that_are_never_divided(
    monkeypatch: pytest.MonkeyPatch, overlap: str, others: dict[str, Any], why: str
) -> None:
    forms = forms_of(monkeypatch, overlap, **others)
    assert not forms.undecided(SIZE)
    assert forms.form(SIZE) == WHOLE
    assert why in forms.decisions[SIZE].why
    assert forms.controller is None


def test_short_steps_and_the_plain_form_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = forms_of(monkeypatch, "plain")
    assert not forms.undecided(SIZE)
    assert not forms.undecided(511)
    assert (forms.form(SIZE), forms.form(511), forms.form(512)) == (HALVES, WHOLE, WHOLE)
    assert "fewer than 512 tokens" in forms.decisions[511].why


def test_ranks_that_take_turns_on_a_gpu_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forms, named = forms_of(monkeypatch, "auto"), forms_of(monkeypatch, "on")
    monkeypatch.setattr(prefill_forms, "_share_gpus", lambda comm: True)
    assert not forms.undecided(SIZE)
    assert "take turns" in forms.decisions[SIZE].why
    assert named.undecided(SIZE)


@pytest.mark.parametrize(
    ("options", "compared", "left_out"),
    [
        ({"dtype": torch.float32}, [WHOLE, HALVES, BY_COPIES], {BESIDE_OWN.name: "16 bits"}),
        ({"algorithm": "vendor"}, [WHOLE, HALVES], {BY_COPIES.name: "vendor was named"}),
        ({"able": ["few_sms"]}, [WHOLE, HALVES, BESIDE_OWN], {BY_COPIES.name: "copy_engines does not serve"}),
        ({"able": ["copy_engines"]}, [WHOLE, HALVES, BY_COPIES], {BESIDE_OWN.name: "few_sms does not serve"}),
    ],
)
def test_forms_that_cannot_serve_are_left_out(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], compared: list[PrefillForm], left_out: dict[str, str]
) -> None:
    monkeypatch.setattr(Comm, "able", options.pop("able", Comm.able))
    forms = forms_of(monkeypatch, "auto", **options)
    assert measured(monkeypatch, forms, WHOLE.name) == [form.name for form in compared]
    for name, why in left_out.items():
        assert why in forms.decisions[SIZE].left_out[name]


def test_shaped_falls_back_where_neither_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comm, "able", ())
    forms = forms_of(monkeypatch, "shaped")
    assert measured(monkeypatch, forms, HALVES.name) == []
    assert forms.form(SIZE) == WHOLE
    assert "no form takes few SMs" in forms.decisions[SIZE].why
