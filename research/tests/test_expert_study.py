"""The tables of the note about Mixture of Experts, and the error bars that it gives reasons for."""

from __future__ import annotations

import math
from pathlib import Path

import expert_study
import pytest
from experts.latent_attention import LATENT_STAND_IN
from experts.layer import STAND_IN, STAND_IN_OF_GROUPS

from shotcast.planner.calibration import load

NOTE = Path(__file__).parent.parent.parent / "research" / "reports" / "mixture_of_experts.md"


@pytest.mark.full
def test_the_note_has_these_tables() -> None:
    page = NOTE.read_text()
    assert expert_study.filled(page, expert_study.tables()) == page


def test_error_bars_are_the_distances_from_published_tables() -> None:
    calibration = load("NVIDIA H200")
    for has_groups, bar in ((False, STAND_IN), (True, STAND_IN_OF_GROUPS)):
        errors = [
            expert_study.grouped_us(row, int(tokens), calibration) / us - 1
            for row in expert_study.external()["grouped"]
            if (row["groups"] > 1) == has_groups
            for tokens, us in row["us"].items()
        ]
        assert math.sqrt(sum(error**2 for error in errors) / len(errors)) == pytest.approx(bar, rel=0.2)
        assert sum(error < 0 for error in errors) > 0.9 * len(errors), "nearly all have one sign"


def test_latent_attention_is_near_published_tables() -> None:
    calibration = load("NVIDIA H200")
    errors = [expert_study.latent_us(row, calibration) / row["us"] - 1 for row in expert_study.external()["latent"]]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) == pytest.approx(LATENT_STAND_IN, rel=0.2)


def test_mixtral_beside_dense_models_is_as_measured() -> None:
    """By vLLM's own builds, 8 sequences of Mixtral 8x7B on two ranks take 2.3 times as long as those of 8B on one."""
    table = expert_study.latency_table(load("NVIDIA H200"))
    ratios = [float(row.split("|")[-2]) / float(row.split("|")[-3]) for row in table.splitlines() if "mixtral" in row]
    assert ratios == pytest.approx([1, 1], rel=0.2)
