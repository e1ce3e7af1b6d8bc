"""The tables of the note about layouts and strong scaling."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import scaling_study

from shotcast.cost import nccl
from shotcast.errors import ConfigError
from shotcast.planner.calibration import load

NOTE = Path(__file__).parent.parent.parent / "docs" / "design" / "strong_scaling.md"


def test_eight_gpus_by_constants_of_two_and_four() -> None:
    """NCCL's published 18.4 us of 64 KiB on 8 H200 is an external figure: nothing was fitted to it."""
    link = scaling_study.nccl_link()
    assert nccl.ring_us(64 << 10, 8, link) == pytest.approx(18.4, rel=0.2)
    assert math.isclose(link.step_us, 0.74, rel_tol=0.05)


@pytest.mark.full
def test_the_note_has_these_tables() -> None:
    page = NOTE.read_text()
    assert scaling_study.filled(page, scaling_study.tables()) == page


def test_tables_of_eight_gpus_are_those_of_the_note() -> None:
    calibration = load("NVIDIA H200")
    page = NOTE.read_text()
    made = {"layouts": scaling_study.layouts_table(calibration), "tokens": scaling_study.tokens_table(calibration)}
    assert scaling_study.filled(page, made) == page
    with pytest.raises(ConfigError, match=r"the page has no .*scaling_study\.py layouts"):
        scaling_study.filled("a page", made)
