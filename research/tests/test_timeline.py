"""research/overlap_bench/timeline.py: when the steps of a schedule ran, on CPU ranks and on a GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from overlap_bench.timeline import timed

import shotcast
from shotcast.overlap import schedule
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import lanes_of


def test_a_timeline_has_the_times_of_all_steps() -> None:
    plan = schedule.chain(2)

    def sleep(*comm: Any) -> None:
        time.sleep(0.02)

    works = {step.name: sleep for step in plan.steps}
    for _ in range(20):
        with shotcast.Communicator(device="cpu") as comm:
            lanes = lanes_of(comm)
            timeline = timed(Controller(lanes), plan, works, works)
            lanes.close()
        spans = {span.name: span for span in timeline.spans}
        together = timeline.compute_us + timeline.communication_us - timeline.hidden_us
        total = max(span.end_us for span in timeline.spans) - min(span.begin_us for span in timeline.spans)
        if spans["communicate 0"].begin_us < spans["compute 1"].end_us and total <= together + 20_000:
            break  # a busy machine may keep a lane from beginning, and leave gaps between steps
    else:
        pytest.fail("no step of communication ran beside one of computation, or there were gaps")
    assert {span.lane for span in timeline.spans} == {0, 1}
    assert all(span.us >= 19_000 for span in spans.values())
    assert spans["communicate 0"].begin_us >= spans["compute 0"].end_us
    assert min(span.begin_us for span in timeline.spans) == 0
    assert timeline.compute_us >= 38_000
    assert 0 < timeline.hidden_us <= timeline.communication_us


@pytest.mark.gpu
def test_a_timeline_shows_both_lanes_at_once() -> None:
    def sleep(*comm: Any) -> None:
        torch.cuda._sleep(20_000_000)

    plan = schedule.beside()
    works = {step.name: sleep for step in plan.steps}
    with shotcast.Communicator(device="cuda") as comm:
        controller = Controller(lanes_of(comm))
        controller.run(plan, works, works)
        timeline = timed(controller, plan, works, works)
    assert timeline.hidden_us > 0.8 * timeline.communication_us
