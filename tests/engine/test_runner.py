"""A rank's part of a step, with a model that only says what is likely."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shotcast.engine.plan import SequenceStep, StepPlan
from shotcast.engine.requests import SamplingParams
from shotcast.engine.runner import Drawn, Runner
from shotcast.engine.sampler import Sampler


class FixedModel:
    """Its next token is 3, whatever came before."""

    config = SimpleNamespace(vocab=5)
    parallel = SimpleNamespace(communication_s=0.0)

    def caches(self, blocks: int, block_size: int) -> list[Any]:
        return [SimpleNamespace(keys=torch.empty(blocks, block_size))]

    def __call__(self, batch: Any, caches: Any) -> torch.Tensor:
        return torch.eye(5)[3].repeat(len(batch.drawn), 1)


def runner(draws: bool) -> Runner:
    return Runner(FixedModel(), 4, 4, 2, 16, 0, draws)  # type: ignore[arg-type]


def step() -> StepPlan:
    prompt = SequenceStep(0, 0, (1, 2), (0,), True, True, SamplingParams(temperature=0.0), "first", ())
    return StepPlan(7, (prompt,))


def test_a_rank_that_draws_says_what() -> None:
    assert runner(True).execute(step()) == Drawn(7, (3,), (None,))


def test_a_rank_that_nobody_asks_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(*args: Any) -> None:
        raise AssertionError("it drew")

    monkeypatch.setattr(Sampler, "sample", sample)
    assert runner(False).execute(step()) is None
    with pytest.raises(AssertionError, match="it drew"):
        runner(True).execute(step())
