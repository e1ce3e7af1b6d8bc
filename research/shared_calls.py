"""All-reduces of shared and exclusive communicators beside NCCL, and a product beside a call that waits, on GPUs.

    python research/shared_calls.py --world-size 2 --json FILE

Microseconds of a call of bfloat16, captured (the median of replays of a graph of calls) and eager (calls one behind the
other, by events), each the slowest rank's, as the median of three rounds in which all take turns. Then the time of a
product of 4096^3 and of 8192^3, as a multiple of its time alone, beside a call for which rank 1 is late: one of each
kind, four shared communicators at once, and NCCL's. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_times import seconds_each
from gpu_timing import write
from rich.console import Console
from rich.table import Table

import shotcast
from shotcast.bench import kernels
from shotcast.units import format_size

SIZES = tuple(1 << bits for bits in (10, 13, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26))
WAITING_SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 32 << 20)
ROUNDS = 3
LATE_S = 0.1


def eager_us(call: Callable[[], Any], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


def call_rows(comms: dict[str, shotcast.Communicator], nccl: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Measure calls of every size; as one rank."""
    rows = []
    first = next(iter(comms.values()))
    for size in SIZES:
        x = torch.randint(-8, 8, (size // 2,), device=first.device).bfloat16()
        out, summed = torch.empty_like(x), x.clone()
        dist.all_reduce(summed, group=nccl)
        calls: dict[str, Callable[[], Any]] = {
            name: functools.partial(comm.all_reduce, x, out) for name, comm in comms.items()
        }
        for name, call in calls.items():
            out.zero_()
            call()
            torch.cuda.synchronize()
            comms[name].check()
            assert torch.equal(out, summed), (name, size)
        zeros = torch.zeros_like(x)  # a sum in place grows beyond the dtype
        calls["nccl"] = functools.partial(dist.all_reduce, zeros, group=nccl)
        count = 20 if size < 1 << 21 else 5
        found: dict[tuple[str, str], list[float]] = {}
        for _, (name, call) in itertools.product(range(ROUNDS), calls.items()):
            mine = {"captured": seconds_each(lambda turn, call=call: call(), 1, count) * 1e6}  # type: ignore[misc]
            eager_us(call, 3)
            first._host.barrier()
            mine["eager"] = eager_us(call, count)
            for mode, us in mine.items():
                found.setdefault((name, mode), []).append(max(first._host.all_gather(us)))
        for comm in comms.values():
            comm.check()
        rows += [
            {"bytes": size, "by": name, "mode": mode, "us": statistics.median(us)} for (name, mode), us in found.items()
        ]
    return rows


def product_us(m: torch.Tensor, out: torch.Tensor) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(22)]
    for event in events:
        event.record()
        torch.mm(m, m, out=out)
    events[-1].synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events[1:]))


def product_rows(comms: list[shotcast.Communicator], nccl: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Measure products beside calls that wait for rank 1; as one rank."""
    shared, rows = comms[0], []
    calling, side = [torch.cuda.Stream() for _ in comms], torch.cuda.Stream()

    def beside(call: Callable[[], Any], m: torch.Tensor, out: torch.Tensor) -> float:
        call()
        torch.cuda.synchronize()
        shared._host.barrier()
        if shared.rank == 1:
            time.sleep(LATE_S)
        call()
        us = 0.0
        if shared.rank == 0:
            time.sleep(LATE_S / 5)
            with torch.cuda.stream(side):
                us = product_us(m, out)
        torch.cuda.synchronize()
        shared._host.barrier()
        return us

    def sums(count: int, x: torch.Tensor, out: torch.Tensor) -> None:
        for comm, stream in zip(comms[:count], calling, strict=False):
            with torch.cuda.stream(stream):
                comm.all_reduce(x, out if count == 1 else torch.empty_like(x))

    def by_nccl(x: torch.Tensor) -> None:
        with torch.cuda.stream(calling[0]):
            dist.all_reduce(x, group=nccl)

    for n in (4096, 8192):
        m = torch.randn(n, n, device=shared.device, dtype=torch.bfloat16)
        product = torch.empty_like(m)
        product_us(m, product)
        alone = product_us(m, product)
        for size in WAITING_SIZES:
            x = torch.ones(size // 2, device=shared.device, dtype=torch.bfloat16)
            waiting = {
                "shared": functools.partial(sums, 1, x, torch.empty_like(x)),
                "four shared": functools.partial(sums, 4, x, x),
                "nccl": functools.partial(by_nccl, x),
            }
            for name, call in waiting.items():
                if name != "four shared" or size == WAITING_SIZES[-1]:
                    rows.append({"n": n, "bytes": size, "by": name, "ratio": beside(call, m, product) / alone})
    return rows


def measured() -> list[dict[str, Any]]:
    """Measure all of it; as one rank."""
    exclusive = shotcast.Communicator(device="cuda", timeout_s=30, exclusive=True)
    shared = [shotcast.Communicator(device="cuda", timeout_s=30) for _ in range(4)]
    nccl = dist.new_group(backend="nccl")
    assert isinstance(nccl, dist.ProcessGroup)
    dist.all_reduce(torch.ones(4, device=exclusive.device), group=nccl)
    rows = call_rows({"exclusive": exclusive, "shared": shared[0]}, nccl)
    rows += product_rows(shared, nccl)
    for comm in (exclusive, *shared):
        comm.close()
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    console = Console(width=140)
    for key, unit in (("us", "us"), ("ratio", "of the time alone")):
        table = Table(title=unit)
        kinds = list(dict.fromkeys((row["by"], row.get("mode", "")) for row in rows if key in row))
        for name in ("", *(" ".join(kind) for kind in kinds)):
            table.add_column(name)
        cells = {
            (row.get("n", 0), row["bytes"], row["by"], row.get("mode", "")): row[key] for row in rows if key in row
        }
        for n, size in dict.fromkeys((n, size) for n, size, *_ in cells):
            found = [cells.get((n, size, *kind)) for kind in kinds]
            shown = [f"{one:.2f}" if one is not None else "" for one in found]
            table.add_row(f"{n or ''} {format_size(size)}", *shown)
        console.print(table)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


def main() -> None:
    asked = options().parse_args()
    found = shotcast.spawn(measured, asked.world_size, timeout_s=570)[0]
    show(found)
    if asked.json:
        write(asked.json, found, kernels.of_collectives("cuda"), world_size=asked.world_size)


if __name__ == "__main__":
    main()
