"""Engines take their steps in turns, and a load arrives at the same moments at each."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import engine_turns
import pytest
import vllm_engines
from engine_turns import Answered, Steps

FAKE = """
import asyncio, sys
import engine_turns

class Engine:
    def __init__(self, asked):
        pass

    async def answer(self, prompt, tokens):
        with open(LOG, "a") as log:
            print(NAME, len(prompt), tokens, file=log)
        if len(prompt) == 13:
            raise SystemExit("enough")
        await asyncio.sleep(DELAY_S)
        return engine_turns.Answered(DELAY_S, DELAY_S + 0.127)

    async def close(self):
        pass

engine_turns.ENGINES[NAME] = Engine
engine_turns.serve(engine_turns.options().parse_args([f"--engines={NAME}", "--serve", sys.argv[1]]))
"""
ASKED = ["--sequences", "1", "--tokens", "4", "--prompts", "7", "--requests", "2", "--load", "0.5", "--arrivals", "3"]


class Engine:
    """An engine that takes a millisecond more for each request."""

    def __init__(self) -> None:
        self._count = 0

    async def answer(self, prompt: list[int], tokens: int) -> Answered:
        self._count += 1
        return Answered(0.001 * self._count, 0.001 * self._count + 0.127)


def children_of(tmp_path: Path, delays: dict[str, float]) -> dict[str, vllm_engines.Child]:
    """Start fake engines that log their requests."""
    children = {}
    for name, delay_s in delays.items():
        script = tmp_path / f"{name}.py"
        script.write_text(f"NAME, DELAY_S, LOG = {name!r}, {delay_s}, {str(tmp_path / 'log')!r}\n{FAKE}")
        more = {"PYTHONPATH": str(Path(engine_turns.__file__).parent)}
        children[name] = vllm_engines.Child([sys.executable, str(script)], more, tmp_path / f"{name}.log")
    return children


@pytest.mark.full
def test_engines_take_turns(tmp_path: Path) -> None:
    children, rows = children_of(tmp_path, {"one": 0.05, "two": 0.2}), []
    asked = engine_turns.options().parse_args(ASKED)
    try:
        engine_turns.in_turns(children, asked, rows)
    finally:
        for child in children.values():
            child.end()
    steps = ("ready_s", "ms_a_token", "first_ms", "tokens_per_s", "load")
    assert [(row["step"], row["by"]) for row in rows] == [(step, name) for step in steps for name in ("one", "two")]
    firsts = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines() if line.split()[1:] == ["7", "1"]]
    assert firsts == ["one", "two", "two", "one"] * 3, "the order turns"
    tokens_per_s = {row["by"]: row["value"] for row in rows if row["step"] == "tokens_per_s"}
    assert 800 < tokens_per_s["two"] <= 1280, "two requests of 128 tokens in 0.2 s"
    (rate,) = {row["rate"] for row in rows if row["step"] == "load"}
    assert rate == pytest.approx(0.5 * tokens_per_s["two"] / 128, rel=0.01), "of what the slower one answers"
    table = engine_turns.table_of(rows)
    labels, ratios = (list(column.cells) for column in (table.columns[0], table.columns[-1]))
    assert labels[2] == "first_ms tokens 7"
    assert 0.2 < float(ratios[2]) < 0.4
    assert labels[-1] == f"load requests 3 rate {rate} later_ms p99"


@pytest.mark.full
def test_an_engine_that_ends_is_named(tmp_path: Path) -> None:
    children = children_of(tmp_path, {"one": 0.0})
    asked = engine_turns.options().parse_args(["--sequences", "", "--prompts", "13"])
    try:
        with pytest.raises(RuntimeError, match=r"one ended at first_ms \{'tokens': 13, 'turn': 0\}: see its log"):
            engine_turns.in_turns(children, asked, [])
    finally:
        for child in children.values():
            child.end()


def test_percentiles_of_a_load() -> None:
    found = asyncio.run(Steps(Engine(), 1000).load(1e4, 200, 7))
    assert found == {"first_ms": {"p50": 101.0, "p99": 199.0}, "later_ms": {"p50": 1.0, "p99": 1.0}}


def test_arrivals_are_the_same_for_all_and_as_many_as_asked() -> None:
    moments = engine_turns.arrivals(50.0, 10_000, 7)
    assert moments == sorted(engine_turns.arrivals(50.0, 10_000, 7))
    assert moments[-1] == pytest.approx(200, rel=0.03)


def test_prompts_differ_and_fit_the_vocabulary() -> None:
    steps = Steps(None, 1000)
    prompts = [tuple(steps._prompt(number, 40)) for number in range(100)]
    assert len(set(prompts)) == 100
    assert all(100 <= token < 900 for prompt in prompts for token in prompt)
