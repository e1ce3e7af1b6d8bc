"""A trace that the engine served in real time, and the simulated engine on the same requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import served_runs
import served_trace
from served_runs import METRICS, ServedRun

from shotcast.errors import ConfigError
from shotcast.planner import calibration as calibrations

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "cpu"
FILE = DATA / "served_trace.json"
RUNS = served_runs.read(FILE)
BOUNDS = {"tokens_per_s": 0.10, "p50": 0.15, "p99": 0.25}
"""The largest errors that are accepted: of throughput, and of both latencies at the median and at 99%."""


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.layout}-{run.load}")
def test_predicted_within_bounds(run: ServedRun) -> None:
    found = served_runs.errors(run, served_runs.predict(run, calibrations.load("", DATA / "calibration_x1.json")))
    for name in METRICS:
        bound = next((bound for part, bound in BOUNDS.items() if part in name), None)
        if bound is not None:
            assert abs(found[name]) <= bound, (name, found[name])


def test_loads_are_parts_of_the_capacity() -> None:
    loads = [run.load for run in RUNS if str(run.layout) == "1x1"]
    assert loads == [None, 0.5, 0.9, 1.2]
    at_once = next(run for run in RUNS if run.load is None)
    capacity = len(at_once.answers) / (max(a.last_s for a in at_once.answers) - min(a.sent_s for a in at_once.answers))
    for run in RUNS:
        if run.load is not None and run.layout == at_once.layout:
            sent = [answer.sent_s for answer in run.answers]
            assert len(sent) / (sent[-1] - sent[0]) == pytest.approx(run.load * capacity, rel=0.25)


def test_nothing_else_ran() -> None:
    """The recording is of a machine that had nothing else to do."""
    assert all(run.others_cores < 0.5 for run in RUNS)


def test_all_tokens_are_in_the_steps() -> None:
    for run in RUNS:
        assert sum(step.outputs for step in run.steps) == sum(arrival.output for arrival in run.arrivals)
        assert sum(step.prompt for step in run.steps) == sum(arrival.prompt for arrival in run.arrivals)
        assert all(answer.sent_s < answer.first_s <= answer.last_s for answer in run.answers)


def test_a_calibration_of_the_same_kernels() -> None:
    constants = calibrations.load("", DATA / "calibration_x1.json")
    for name, version in constants.kernels.items():
        assert all(run.kernels[name] == version for run in RUNS)


def test_the_page_has_these_figures() -> None:
    page = (Path(__file__).parents[2] / "research" / "reports" / "planner_accuracy.md").read_text()
    made = served_trace.table(FILE, DATA / "calibration_x1.json")
    assert served_trace.filled(page, made, served_trace.BEGIN, served_trace.END) == page


def test_another_file(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"served": [{"layout": "1x1"}]}))
    with pytest.raises(ConfigError, match=r"other\.json is no result of research/served_trace\.py"):
        served_runs.read(path)
