"""Serve a trace of requests by the engine in real time, and hold the simulated engine against it.

    python research/served_trace.py --record benchmarks/data/cpu/served_trace.json [--layouts 1x1,2x1,1x2]
    python research/served_trace.py [--fill research/reports/planner_accuracy.md]

For each layout, all requests of the trace at once show the capacity, in requests a second. Then the trace is served at
parts of that rate: arrivals are random (Poisson), prompts and outputs of varied lengths, and outputs end by length
only. The client that sends a request notes when it came, and when its first and its last token were there. After each
step, the engine's counters are noted: how many steps there were, and what they took by its own timer.

The second command predicts the same requests, with steps by the calibration of the same machine (``shotcast
calibrate``), which measured kernels alone, and prints the table or puts it into a document.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import served_runs
from forecast import filled

from shotcast.bench import kernels
from shotcast.engine.async_llm import AsyncLLM
from shotcast.engine.config import parse_layout
from shotcast.engine.outputs import RequestOutput
from shotcast.engine.sampling_params import SamplingParams
from shotcast.hardware.detect import detect
from shotcast.models.source import open_checkpoint
from shotcast.planner import calibration as calibrations
from shotcast.planner.step import Layout
from shotcast.simulator.serving import Arrival

BEGIN, END = "<!-- research/served_trace.py -->", "<!-- end of served trace -->"
MODEL = "smollm2"
PROMPTS, OUTPUTS = (16, 96), (8, 40)
LIMITS = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
LOADS = (0.5, 0.9, 1.2)
WARM_UP = 8


def trace(requests: int, prompts: tuple[int, int], outputs: tuple[int, int], seed: int) -> list[Arrival]:
    """Return requests that arrive independently of each other, one a second on average, with lengths in two ranges."""
    numbers, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(requests):
        now += numbers.expovariate(1.0)
        arrivals.append(Arrival(round(now, 4), numbers.randint(*prompts), numbers.randint(*outputs)))
    return arrivals


class Served:
    """One run: when requests came, when their tokens were there, and the steps, in seconds from the start."""

    def __init__(self, llm: AsyncLLM, arrivals: Sequence[Arrival], vocab: int, seed: int):
        self._llm, self._arrivals, self._vocab = llm, arrivals, vocab
        self._numbers = random.Random(seed)
        self.requests: list[list[float]] = [[] for _ in arrivals]
        self.steps: list[list[float]] = []
        self._last = llm.stats()

    async def run(self) -> None:
        """Send each request at its time, and wait for all."""
        count = len(self._arrivals)
        prompts = [[self._numbers.randrange(self._vocab) for _ in range(each.prompt)] for each in self._arrivals]
        left, done = count, asyncio.Event()
        started = time.perf_counter()

        def callback(number: int) -> Any:
            def on_output(output: RequestOutput | Exception) -> None:
                nonlocal left
                if isinstance(output, Exception):
                    raise output
                self._note_step(time.perf_counter() - started)
                if output.finished:
                    sent = self.requests[number][0]
                    first, last = (sent + output.times_s[index] for index in (0, -1))
                    assert len(output.tokens) == self._arrivals[number].output, output.finish_reason
                    self.requests[number] += [round(first, 5), round(last, 5)]
                    left -= 1
                    if not left:
                        done.set()

            return on_output

        for number, (arrival, prompt) in enumerate(zip(self._arrivals, prompts, strict=True)):
            wait_s = arrival.time_s - (time.perf_counter() - started)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            params = SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True)
            self.requests[number].append(round(time.perf_counter() - started, 5))
            self._llm.start(prompt, params, f"{id(self)}-{number}", callback(number))
        await done.wait()

    def _note_step(self, now: float) -> None:
        stats, last = self._llm.stats(), self._last
        if stats.steps != last.steps:
            self.steps.append(
                [
                    round(now, 4),
                    stats.steps - last.steps,
                    stats.output_tokens - last.output_tokens,
                    stats.prompt_tokens - last.prompt_tokens,
                    round(1e3 * (stats.step_s - last.step_s), 3),
                ]
            )
            self._last = stats

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(last for _, _, last in self.requests) - min(sent for sent, _, _ in self.requests)


def record(layout: Layout, arrivals: Sequence[Arrival], loads: Sequence[float], seed: int) -> list[dict[str, Any]]:
    """Return the runs of a layout: all requests at once, then each load."""
    checkpoint = open_checkpoint(MODEL)
    vocab = checkpoint.config.vocab
    checkpoint.close()
    llm = AsyncLLM(
        MODEL,
        device="cpu",
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
        **LIMITS,
    )
    found: list[dict[str, Any]] = []

    async def all_runs() -> None:
        numbers = iter(range(seed + 1, sys.maxsize))
        at_once = [arrival._replace(time_s=0.0) for arrival in arrivals]
        await Served(llm, at_once[:WARM_UP], vocab, next(numbers)).run()
        capacity = 0.0
        for load in (None, *loads):
            times = at_once
            if load is not None:
                times = [arrival._replace(time_s=arrival.time_s / load / capacity) for arrival in arrivals]
            run, before = Served(llm, times, vocab, next(numbers)), _busy_s(llm)
            await run.run()
            all_s, own_s = (after - begin for begin, after in zip(before, _busy_s(llm), strict=True))
            capacity = capacity or len(arrivals) / run.seconds
            one = {
                "layout": str(layout),
                "load": load,
                "capacity": round(capacity, 4),
                "seconds": round(run.seconds, 3),
                "others_cores": round((all_s - own_s) / run.seconds, 3),
            }
            print(one, flush=True)
            found.append(one | {"requests": run.requests, "steps": run.steps})
        await llm.close()

    asyncio.run(all_runs())
    return found


def _busy_s(llm: AsyncLLM) -> tuple[float, float]:
    """Return the seconds that this machine's cores were busy, and those of them with this process and the ranks."""
    ticks = os.sysconf("SC_CLK_TCK")
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    own = 0
    for pid in (os.getpid(), *llm.pids):
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own += int(stat[11]) + int(stat[12])
    return (sum(fields) - idle) / ticks, own / ticks


def table(json_file: Path, calibration: Path) -> str:
    """Return the served and predicted figures as a Markdown table, and that of the errors."""
    constants = calibrations.load("", calibration)
    lines = [
        "| ranks | load | tokens/s | | first token, median ms | | 99% | | each later token, median ms | | 99% | |",
        "|" + "---|" * 12,
    ]
    shown = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
    for run in served_runs.read(json_file):
        service = served_runs.predict(run, constants)
        predicted, errors = served_runs.metrics(served_runs.answers_of(service)), served_runs.errors(run, service)
        load_text = "all at once" if run.load is None else f"{run.load:.0%}"
        cells = [str(run.layout), load_text]
        for name in shown:
            digits = 0 if name.startswith("ttft") else 1
            cells += [f"{run.metrics[name]:.{digits}f}", f"{predicted[name]:.{digits}f} ({errors[name]:+.0%})"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def options() -> argparse.ArgumentParser:
    data = Path(__file__).parents[1] / "benchmarks" / "data" / "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="serve the trace, and write what was recorded")
    parser.add_argument("--layouts", default="1x1")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=data / "served_trace.json", help="what was recorded")
    parser.add_argument("--calibration", type=Path, default=data / "calibration_x1.json")
    parser.add_argument("--fill", type=Path, help="the document")
    return parser


def main() -> None:
    asked = options().parse_args()
    if asked.record is None:
        found = table(asked.json, asked.calibration)
        if asked.fill is None:
            print(found, end="")
        else:
            asked.fill.write_text(filled(asked.fill.read_text(), found, BEGIN, END))
        return
    arrivals = trace(asked.requests, PROMPTS, OUTPUTS, asked.seed)
    layouts = [Layout(*parse_layout(text)) for text in asked.layouts.split(",")]
    runs = [run for layout in layouts for run in record(layout, arrivals, LOADS, asked.seed)]
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python research/served_trace.py --layouts {asked.layouts} --requests {asked.requests} "
        f"--seed {asked.seed} --record {asked.record.name}",
        "environment": detect().as_json(),
        "kernels": kernels.of_layout("cpu", max(layout.ranks for layout in layouts)),
        "model": MODEL,
        "limits": LIMITS,
        "trace": [list(arrival) for arrival in arrivals],
        "served": runs,
    }
    text = json.dumps(document, indent=1)
    # a request or a step is a line
    asked.record.write_text(re.sub(r"\[[-\d.,\s]*\]", lambda row: " ".join(row[0].split()), text) + "\n")


if __name__ == "__main__":
    main()
