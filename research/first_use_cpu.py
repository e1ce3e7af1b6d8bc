"""Processor time of a CPU rank until its first all-reduce is done, with and without compiled code on disk.

    python research/first_use_cpu.py --world-size 2 --json first_use.json

Ranks are started by torchrun, as users start them. The first run finds an empty cache, the others what it has kept.
``import_s`` is PyTorch's import, ``communicator_s`` that of the communicator and its construction, ``call_s`` the first
call. A row is a rank of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_timing import write
from rich.console import Console
from rich.table import Table

from shotcast.bench import kernels

TIMES = ("import_s", "communicator_s", "call_s")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="with compiled code on disk")
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


PROGRAM = """
import json, os, sys, time
times = [time.process_time()]
import torch, torch.distributed
times.append(time.process_time())
import shotcast
with shotcast.Communicator(device="cpu") as comm:
    times.append(time.process_time())
    x = torch.ones(1024)
    assert comm.all_reduce(x)[0] == comm.world_size
    times.append(time.process_time())
    names = ("import_s", "communicator_s", "call_s")
    row = {"rank": comm.rank} | {name: b - a for name, a, b in zip(names, times, times[1:])}
    row["imports_numba"] = "numba" in sys.modules
    with open(f"{os.environ['RESULTS']}/{comm.rank}.json", "w") as file:
        json.dump(row, file)
"""


def rows_of_run(world_size: int, cache: Path, name: str) -> list[dict[str, Any]]:
    """Start the ranks, and return the row of each; ``name`` says what the cache has."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text(PROGRAM)
        environment = os.environ | {
            "PYTHONDONTWRITEBYTECODE": "",
            "NUMBA_CACHE_DIR": str(cache),
            "RESULTS": folder,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        subprocess.run([*command, str(script)], env=environment, check=True)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]
    return [{"world_size": world_size, "cache": name} | row for row in found]


def main() -> None:
    asked = options().parse_args()
    with tempfile.TemporaryDirectory() as cache:
        found = rows_of_run(asked.world_size, Path(cache), "empty")
        for _ in range(asked.runs):
            found += rows_of_run(asked.world_size, Path(cache), "filled")
    table = Table("cache", "rank", *TIMES, "numba")
    for row in found:
        cells = [f"{row[name]:.3f}" for name in TIMES]
        table.add_row(row["cache"], str(row["rank"]), *cells, "imported" if row["imports_numba"] else "")
    Console(width=100).print(table)
    if asked.json:
        write(asked.json, found, kernels.of_collectives("cpu"))


if __name__ == "__main__":
    main()
