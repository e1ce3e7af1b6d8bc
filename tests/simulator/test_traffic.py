"""Traffic: idle engines answer as planned, crowded ones give what they can, and wrong traces are refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from shotcast.cli import app
from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.models.presets import preset
from shotcast.planner.calibration import load
from shotcast.planner.plan import Plan, Point, Query, Target, plan
from shotcast.planner.step import Layout
from shotcast.simulator.serving import Arrival, percentile
from shotcast.simulator.traffic import Traffic, poisson, read_trace, simulate


def planned() -> Plan:
    spec = cluster.load("h200x8")
    query = Query(preset("llama-3.1-8b"), "8b", "", spec, 4, 512, 64, Target("throughput", tpot_ms=30.0))
    return plan(query, load("NVIDIA H200"))


def point_of(found: Plan, layout: Layout, engines: int, sequences: int) -> Point:
    wanted = layout, engines, sequences
    return next(point for point in found.points if (point.layout, point.engines, point.sequences) == wanted)


def met(found: Plan, point: Point, arrivals: list[Arrival]) -> Traffic:
    return simulate(found.query, point, load("NVIDIA H200"), arrivals)


def test_an_idle_engine_answers_as_planned() -> None:
    found = planned()
    alone = point_of(found, Layout(4, 1), 1, 1)
    arrivals = poisson(0.5, 20, 512, 64)
    traffic = met(found, alone, arrivals)
    assert traffic.ttft_ms(50) == pytest.approx(alone.ttft_ms, rel=0.02)
    assert traffic.tpot_ms(50) == pytest.approx(alone.tpot_ms, rel=0.02)
    assert traffic.preemptions == 0


@pytest.mark.parametrize(("layout", "engines"), [(Layout(4, 1), 1), (Layout(1, 2), 2)])
def test_a_crowded_engine_gives_its_throughput(layout: Layout, engines: int) -> None:
    found = planned()
    point = point_of(found, layout, engines, 16)
    traffic = met(found, point, poisson(1e4, 16 * engines * 6, 512, 64))
    # the last requests have the engine for themselves
    assert traffic.tokens_per_s == pytest.approx(point.tokens_per_s, rel=0.15)
    assert traffic.ttft_ms(99) > 4 * traffic.ttft_ms(1)
    assert [len(service.requests) for service in traffic.services] == [96] * engines


def test_arrivals_have_the_rate() -> None:
    arrivals = poisson(4.0, 2000, 10, 5, seed=3)
    gaps = [later.time_s - earlier.time_s for earlier, later in itertools.pairwise(arrivals)]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.1)
    assert fmean(gap**2 for gap in gaps) == pytest.approx(2 * 0.25**2, rel=0.2)
    assert arrivals == poisson(4.0, 2000, 10, 5, seed=3)


def test_percentiles() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0"),
        ("x", "line 1: a request is"),
        ('{"time_s": 0, "prompt": 5}', "line 1: a request is"),
        ('{"time_s": 0, "prompt": 5, "output": 1}\n[]', "line 2: a request is"),
        ('{"time_s": -1, "prompt": 5, "output": 1}', "time_s must be at least 0"),
        ('{"time_s": 0, "prompt": 0, "output": 1}', "prompt and output must be at least 1, not 0"),
        ('{"time_s": 0, "prompt": Infinity, "output": 1}', "line 1: a request is"),
        ('{"time_s": 0, "prompt": 1.5, "output": 1}', "line 1: a request is"),
        ('{"time_s": true, "prompt": 1, "output": 1}', "line 1: a request is"),
        ('{"time_s": NaN, "prompt": 1, "output": 1}', "time_s must be at least 0 and at most"),
        ('{"time_s": 1e300, "prompt": 1, "output": 1}', "time_s must be at least 0 and at most"),
        ('{"time_s": 0, "prompt": 5, "output": 1}\n\n\n[]', "line 4: a request is"),
        ('{"time_s": 0, "prompt": 5, "prompt": 6, "output": 1}', "each once"),
        ('{"time_s": 0, "prompt": 5, "output": 1, "prefix": 2}', "each once"),
        ('[["time_s", 0], ["prompt", 5], ["output", 1]]', "each once"),
        ("[" * 100_000, "line 1: a request is"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(file)


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rate must be above 0"):
        poisson(0.0, 5, 10, 10)
    with pytest.raises(ConfigError, match=r"5 requests at .* a second take longer than"):
        poisson(1e-320, 5, 10, 10)
    with pytest.raises(ConfigError, match="requests must be from 1 to 100000, not 0"):
        poisson(1.0, 0, 10, 10)
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "no.jsonl")
    found = planned()
    with pytest.raises(ConfigError, match="takes 131072 tokens of a sequence, and one has 200001"):
        met(found, found.points[0], [Arrival(0.0, 200_000, 1)])


def test_the_command(tmp_path: Path) -> None:
    trace, result = tmp_path / "trace.jsonl", tmp_path / "plan.json"
    lines = [{"time_s": number / 10, "prompt": 50 + number, "output": 5} for number in range(30)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    question = ["plan", "llama-3.1-8b", "-g", "2", "--target", "tpot=20"]
    done = CliRunner().invoke(app, [*question, "--trace", str(trace), "--json", str(result)])
    assert done.exit_code == 0, done.output
    assert "Simulated, 30 requests: first token " in done.output
    assert "--max-model-len 2176 " in done.output
    simulated = json.loads(result.read_text())["simulated"]
    assert simulated["requests"] == 30
    assert simulated["p99_ttft"] >= simulated["median_ttft"] > 0
    # the server has to take the longest request; one token has none after it
    trace.write_text('{"time_s": 0, "prompt": 5000, "output": 1}')
    done = CliRunner().invoke(app, [*question, "--trace", str(trace), "--json", str(result)])
    assert "--max-model-len 5001 " in done.output
    assert "Simulated, 1 request: " in done.output
    assert ", no later tokens, " in done.output
    value = json.loads(result.read_text())
    assert "--max-model-len 5001 " in value["command"]
    assert value["simulated"]["median_tpot"] is None
    done = CliRunner().invoke(app, [*question[:-1], "tpot=0.001", "--rate", "1"])
    assert (done.exit_code, "No request was simulated" in done.output) == (1, True)
    both = CliRunner().invoke(app, [*question, "--trace", str(trace), "--rate", "1"])
    assert both.exit_code == 2
    assert "give one of them" in both.output + (both.stderr if both.stderr_bytes else "")
