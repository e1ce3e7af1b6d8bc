"""Long measurements say what they measure, how long it has taken and how long it will, on a terminal and in a log."""

from __future__ import annotations

import io
import re
import sys

import pytest

from shotcast.bench import cpu_calibration, cpu_host, cpu_kernels, engine_bench
from shotcast.bench import progress as module
from shotcast.bench.progress import progress
from shotcast.engine.config import parse_layout
from shotcast.planner.step import Layout


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that have passed."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_lines_of_a_log(clock: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    with progress(4) as advance:
        for part in ("a", "a", "b", "c"):
            advance(part)
            clock[0] += 6
    assert capfd.readouterr().err.splitlines() == [
        "[1/4] a (0 s)",
        "[3/4] b (12 s, about 12 s left)",
        "[4/4] c (18 s, about 6 s left)",
        "c: done after 24 s",
    ]


def test_a_long_part_is_repeated_now_and_then(clock: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    with progress(100) as advance:
        for _ in range(100):
            advance("kernels")
            clock[0] += 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[1] == "[11/100] kernels (10 s, about 90 s left)"


def test_nothing_is_shown_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    with progress(2, shown=False) as advance:
        advance("a")
    assert capfd.readouterr().err == ""


def test_a_bar_on_a_terminal_begins_at_none_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress(3) as advance:
        for part in ("first", "second", "third"):
            advance(part)
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    counts = re.findall(r"(-?\d+)/3", drawn)
    assert counts[0] == "0"
    assert set(counts) <= {"0", "1", "2"}
    assert "third" in drawn
    assert "left" in drawn


def test_the_kernels_of_a_calibration_are_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With one layer and few rows, in a world of one."""
    monkeypatch.setattr(cpu_kernels, "MODELS", ("random:smollm2-135m:1",))
    monkeypatch.setattr(cpu_kernels, "FEW", (1,))
    monkeypatch.setattr(cpu_kernels, "MANY_SEQUENCES", (2,))
    monkeypatch.setattr(cpu_kernels, "WINDOWS", ((2,),))
    points = cpu_kernels.measure(shown=True)
    assert {point.kind for point in points} >= {"head", "norm", "decode_attention", "prompt_attention"}
    lines = capfd.readouterr().err.splitlines()
    steps = len(list(cpu_kernels._steps()))
    assert lines[0].startswith(f"[1/{steps}] kernels of smollm2-135m:1 (")
    assert lines[-1].startswith("kernels of smollm2-135m:1: done after ")


def test_the_bench_of_an_engine_names_each_point(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Engine:
        def __enter__(self) -> None:
            return None

        def __exit__(self, *error: object) -> None:
            return None

    monkeypatch.setattr(engine_bench, "spawn", lambda function, ranks, *rest: [10.0] * ranks)
    monkeypatch.setattr(engine_bench, "open_engine", lambda *arguments: Engine())
    monkeypatch.setattr(engine_bench, "point", lambda *arguments: _row(arguments[2], arguments[3]))
    layouts = tuple(Layout(*parse_layout(name)) for name in ("1x1", "2x1"))
    config = engine_bench.EngineBenchConfig("random:x", layouts, (1, 4), ("auto", "ring"), 8, 2, 1, "cpu")
    assert len(list(engine_bench.measure(config, shown=True))) == 6
    parts = [re.sub(r" \(.*", "", line) for line in capfd.readouterr().err.splitlines()]
    names = ("1x1 auto", "2x1 auto", "2x1 ring")
    expected = [f"{name}, {batch}" for name in names for batch in ("1 request", "4 requests")]
    assert parts == [*(f"[{n}/6] {name}" for n, name in enumerate(expected, 1)), f"{expected[-1]}: done after 0 s"]


def _row(algorithm: str, batch: int) -> engine_bench.EngineRow:
    facts = ("random:x", "cpu", "float32", "1x1", algorithm, batch, 8, 2)
    return engine_bench.EngineRow(*facts, *(1.0,) * 8)


def test_every_part_of_a_calibration_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that run on ranks are told to show what they do."""
    told = []

    def spawn(function: object, ranks: int, *arguments: object) -> list[object]:
        told.append((function, arguments))
        if function is cpu_host.measure:
            raise InterruptedError
        return [[]]

    monkeypatch.setattr(cpu_calibration, "spawn", spawn)
    with pytest.raises(InterruptedError):
        cpu_calibration.calibrate(1, shown=True)
    assert told == [(cpu_kernels.measure, (True,)), (cpu_host.measure, (True,))]
