"""Stress: mixed calls on all ranks, each result compared with plain PyTorch.

Sizes, dtypes, operations, algorithms, alignments, communicators and who is late are drawn from a seed; on GPUs, the
streams and the replays of graphs too. A run ends after a number of calls or minutes, whichever is first, and is added
to a file of runs with its seed, its counts, the fingerprints of the kernels and whatever went wrong::

    python research/stress.py --device cpu --world-size 3 --minutes 20 --json benchmarks/data/cpu/stress.json

To look for what went wrong in call 123456 of a run: ``--seed SEED --first 123000 --calls 1000``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from stress_calls import LEAST, Plan, run

import shotcast
from shotcast.bench import kernels
from shotcast.errors import ShotcastError
from shotcast.hardware.detect import detect

LARGEST = {"cpu": 1 << 18, "cuda": 1 << 22}


def one_run(plan: Plan, world_size: int) -> dict[str, Any]:
    """Make a run. Return its record, also if a rank failed."""
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        failed = ""
        plan = dataclasses.replace(plan, progress=str(progress))
        try:
            shotcast.spawn(run, world_size, plan, timeout_s=plan.seconds + 2 * plan.timeout_s + 60)
        except ShotcastError as error:
            failed = str(error)
        states = {file.suffix[1:]: json.loads(file.read_text()) for file in Path(folder).glob("progress.*")}
    state = states.get("0", {"calls": 0, "seconds": 0.0})
    wrong = [one for _, other in sorted(states.items()) for one in other["wrong"]]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": plan.device,
        "world_size": world_size,
        "seed": plan.seed,
        "first": plan.first,
        "largest": plan.largest,
        **state,
        "wrong": wrong,
        "failed": failed,
        "environment": detect().as_json(),
        "kernels": kernels.of_collectives(plan.device),
    }


def totals(runs: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the sums over the runs of each number of ranks; a run that failed counts as a wrong call."""
    found: dict[str, dict[str, int]] = {}
    for one in runs:
        total = found.setdefault(f"{one['device']} x{one['world_size']}", dict.fromkeys(("runs", "calls", "wrong"), 0))
        total["runs"] += 1
        total["calls"] += one["calls"]
        total["wrong"] += len({wrong["call"] for wrong in one["wrong"]}) + bool(one["failed"])
    return dict(sorted(found.items()))


def add(file: Path, record: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Add a run to a file of runs. Return the new totals."""
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    runs.append(record)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"totals": totals(runs), "runs": runs}, indent=1) + "\n")
    return totals(runs)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--calls", type=int, default=1 << 40, help="the most calls")
    parser.add_argument("--minutes", type=float, default=20.0, help="the most minutes")
    parser.add_argument("--seed", type=int, help="a random one if it is not given")
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--largest", type=int, help="the most elements of a message")
    parser.add_argument("--replays", type=int, default=0, help="on GPUs: of every 500 calls, as one graph")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a call waits for late ranks")
    parser.add_argument("--json", type=Path, help="the file that the run is added to")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    asked = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 31) if asked.seed is None else asked.seed
    largest = asked.largest or LARGEST[asked.device]
    if largest < LEAST:
        parser.error(f"--largest is at least {LEAST}, not {largest}")
    if asked.replays and asked.device == "cpu":
        parser.error("--replays needs --device cuda: CPU ranks have no graphs")
    plan = Plan(
        asked.device, seed, asked.first, asked.calls, asked.minutes * 60, largest, asked.timeout, "", asked.replays
    )
    record = one_run(plan, asked.world_size)
    screen = Console(soft_wrap=True)
    screen.print(
        f"seed {seed}: {record['calls']} calls and {record.get('replayed', 0)} replayed ones in {record['seconds']} s, "
        f"{len(record['wrong'])} wrong results"
    )
    for one in record["wrong"]:
        screen.print(f"  call {one['call']} at rank {one['rank']}: {one['case']}", markup=False)
    if record["failed"]:
        screen.print(record["failed"], markup=False)
    if asked.json is not None:
        for ranks, total in add(asked.json, record).items():
            screen.print(f"{ranks}: {total['calls']} calls in {total['runs']} runs, {total['wrong']} wrong")
    return 1 if record["wrong"] or record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
