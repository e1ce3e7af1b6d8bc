"""Calls on tensors that peers map, beside the same calls on ordinary ones, between CPU ranks.

    python research/mapped_tensors.py --world-size 2 --json benchmarks/data/cpu/mapped_tensors.json

One row for each operation and size: the median, over rounds in which both take turns, of the time with mapped tensors
over the time with ordinary ones, the slower rank's. Results are compared bit for bit before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import write

import shotcast
from shotcast.bench import kernels
from shotcast.units import format_size

SIZES = (64 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20)
ROUNDS = 11
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def calls(comm: shotcast.Communicator, op: str, x: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
    if op == "all_reduce":
        return lambda: comm.all_reduce(x, out=x, algorithm="two_shot")
    if op == "broadcast":
        return lambda: comm.broadcast(x, 0)
    return lambda: getattr(comm, op)(x, out=out)


def seconds(comm: shotcast.Communicator, call: Callable[[], Any], repeats: int) -> float:
    comm.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def rows() -> list[dict[str, Any]]:
    """Measure all of it; as one rank."""
    found = []
    torch.set_num_threads(1)
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        for op in OPS:
            for nbytes in SIZES:
                values = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(comm.rank))
                parts = {"reduce_scatter": 1 / comm.world_size, "all_gather": comm.world_size}.get(op, 1)
                made = {}
                for name, make in (("ordinary", torch.empty), ("mapped", comm.empty)):
                    x, out = make(values.numel()), make(int(values.numel() * parts))
                    x.copy_(values)
                    made[name] = calls(comm, op, x, out)
                same = torch.equal(made["ordinary"](), made["mapped"]())
                assert all(comm._host.all_gather(same)), (op, nbytes)
                repeats = max(1, min(50, (16 << 20) // nbytes))
                times: dict[str, list[float]] = {name: [] for name in made}
                for number in range(ROUNDS):
                    for name in sorted(made, reverse=bool(number % 2)):
                        times[name].append(max(comm._host.all_gather(seconds(comm, made[name], repeats))))
                ratio = statistics.median(m / o for m, o in zip(times["mapped"], times["ordinary"], strict=True))
                found.append({"op": op, "bytes": nbytes, "mapped_over_ordinary": round(ratio, 3)})
    return found


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


def main() -> None:
    asked = options().parse_args()
    found = shotcast.spawn(rows, asked.world_size, timeout_s=570)[0]
    for row in found:
        print(f"{row['op']:15} {format_size(row['bytes']):>8} {row['mapped_over_ordinary']:.2f}")
    if asked.json:
        write(asked.json, found, kernels.of_collectives("cpu"), world_size=asked.world_size)


if __name__ == "__main__":
    main()
