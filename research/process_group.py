"""Calls of torch.distributed by the backend "shotcast", beside a communicator's own calls and Gloo's or NCCL's backend.

    python research/process_group.py --device cpu --world-size 2 --json process_group.json
    python research/process_group.py --device cuda --world-size 2 --json process_group_x2.json

All calls are made from Python, as a program makes them, and checked before they are timed: inputs are whole numbers, so
results are exact. The ways take turns in rounds. The time of a round is the median of a rank, and the largest of these;
that of a way is its quickest round, as others may disturb some. Sizes are those of the larger tensor. Own calls
of CPU ranks are made on a core of each rank, if there are as many; Gloo, which has threads, is not bound. On GPUs calls
are made one by one (eager) and in graphs (captured).
"""

from __future__ import annotations

import argparse
import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_timing import write
from result_tables import size_name

import shotcast
from shotcast.bench import kernels, timers
from shotcast.errors import ConfigError
from shotcast.process_group.registration import register
from shotcast.units import parse_size

OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single")
IN_PLACE = ("all_reduce", "broadcast")
SIZES = {"cpu": "4,1K,8K,64K,1M,16M,64M", "cuda": "8K,64K,256K,1M,4M,16M,64M"}
OWN, DIRECT = "process group", "communicator"
LIBRARY = {"cpu": "gloo", "cuda": "nccl"}
LIMITS = {"eager": 2.0, "captured": 1.25}
"""The largest times of an all-reduce through the process group, over those of the communicator."""
QUICK_BYTES, QUICK_RATIO = 64 << 10, 10.0
"""Up to this size, Gloo's all-reduce between CPU ranks has to take so many times as long."""

Row = dict[str, Any]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--operations", type=lambda text: text.split(","), default=list(OPERATIONS))
    parser.add_argument("--sizes", type=lambda text: [parse_size(one) for one in text.split(",")], default=None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each way in each round")
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


def through(op: str, group: Any) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Return a call of torch.distributed that reads its first tensor and writes its second; some work in place."""
    if op == "all_reduce":
        return lambda x, out: dist.all_reduce(out, group=group)
    if op == "broadcast":
        return lambda x, out: dist.broadcast(out, 0, group=group)
    if op == "all_to_all_single":
        return lambda x, out: dist.all_to_all_single(out, x, group=group)
    # PyTorch 2.13 has other names for these two, and warns of the old ones in every call
    names = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
    function = getattr(dist, names[op], None) or getattr(dist, op)
    return lambda x, out: function(out, x, group=group)


def directly(op: str, comm: shotcast.Communicator) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Return the same call of a communicator."""
    if op == "all_reduce":
        return lambda x, out: comm.all_reduce(out, out=out)
    if op == "broadcast":
        return lambda x, out: comm.broadcast(out, 0)
    if op == "all_to_all_single":
        return lambda x, out: comm.all_to_all(x, out=out)
    if op == "all_gather_into_tensor":
        return lambda x, out: comm.all_gather(x, out=out)
    return lambda x, out: comm.reduce_scatter(x, out=out)


def operands(op: str, nbytes: int, comm: shotcast.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of this rank, and what the call has to write."""
    n, rank = comm.world_size, comm.rank
    part = max(1, nbytes // 4 // n)
    count = max(1, nbytes // 4) if op in IN_PLACE else part if op == "all_gather_into_tensor" else part * n
    seeds = [torch.Generator().manual_seed(one) for one in range(n)]
    inputs = [torch.randint(-8, 9, (count,), generator=seed).float() for seed in seeds]
    wanted = {
        "all_reduce": lambda: torch.stack(inputs).sum(0),
        "broadcast": lambda: inputs[0],
        "all_gather_into_tensor": lambda: torch.cat(inputs),
        "reduce_scatter_tensor": lambda: torch.stack(inputs).sum(0)[rank * part : (rank + 1) * part],
        "all_to_all_single": lambda: torch.cat([x[rank * part : (rank + 1) * part] for x in inputs]),
    }[op]()
    return inputs[rank].to(comm.device), wanted.to(comm.device)


def checked(name: str, op: str, call: Callable[[], Any], out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Make a call and compare what it has written; raise ConfigError if that is wrong."""
    call()
    if wrong := int((out != wanted).sum()):
        raise ConfigError(f"{op} by {name} gave {wrong} wrong elements of {len(out)}")


def rows(device: str, ops: list[str], sizes: list[int], rounds: int, seconds: float) -> list[Row]:
    """Measure; as one rank. Every rank returns all rows."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    register()
    dist.init_process_group("shotcast")
    library = dist.new_group(backend=LIBRARY[device])
    found = []
    with shotcast.Communicator(device=device) as comm:
        if comm.device.type == "cuda":
            torch.cuda.set_device(comm.device)
        modes = {"cpu": {"eager": timers.cpu}, "cuda": {"eager": timers.eager, "captured": timers.graph}}[device]
        for op in ops:
            for nbytes in sizes:
                x, wanted = operands(op, nbytes, comm)
                out = torch.empty_like(wanted)
                ways = {OWN: through(op, None), DIRECT: directly(op, comm), LIBRARY[device]: through(op, library)}
                calls: dict[str, Callable[[], Any]] = {}
                for name, way in ways.items():
                    out.copy_(x) if op in IN_PLACE else out.zero_()
                    calls[name] = functools.partial(way, x, out)
                    checked(name, op, calls[name], out, wanted)
                for mode, timer in modes.items():
                    facts = {"op": op, "device": device, "mode": mode, "world_size": comm.world_size, "bytes": nbytes}
                    out.zero_()  # else sums of sums would overflow
                    found += [facts | row for row in timed(comm, calls, timer, rounds, seconds)]
    dist.destroy_process_group()
    return found


def timed(
    comm: shotcast.Communicator,
    calls: dict[str, Callable[[], Any]],
    timer: Callable[..., timers.Timer],
    rounds: int,
    seconds: float,
) -> list[Row]:
    """Time calls in turn, each the same number of times on every rank."""

    def largest(value: float) -> float:
        return max(comm._host.all_gather(value))

    runs, counts = {}, {}
    for name, call in calls.items():
        each_us = largest(float(np.median(timers.cpu(call, 20)() if comm.device.type == "cpu" else timer(call, 20)())))
        counts[name] = max(10, min(2000, int(seconds * 1e6 / each_us)))
        runs[name] = timer(call, counts[name])
    samples: dict[str, list[np.ndarray]] = {name: [] for name in calls}
    cores = sorted(os.sched_getaffinity(0))
    bound = {cores[comm.rank]} if comm.device.type == "cpu" and comm.world_size <= len(cores) else set(cores)
    for _ in range(rounds):
        for name, run in runs.items():
            os.sched_setaffinity(0, bound if name in (OWN, DIRECT) else cores)
            comm.barrier()
            samples[name].append(run())
    os.sched_setaffinity(0, cores)
    found = []
    for name, parts in samples.items():
        us = [largest(float(np.median(part))) for part in parts]
        found.append({"way": name, "us": min(us), "us_of_rounds": us, "calls": counts[name]})
    return found


def table(found: list[Row]) -> str:
    """Return the results as a table of Markdown: microseconds, and ratios to the other ways."""
    device = found[0]["device"]
    label = {"gloo": "Gloo", "nccl": "NCCL"}[LIBRARY[device]]
    sizes = sorted({row["bytes"] for row in found})
    times = {(row["op"], row["mode"], row["bytes"], row["way"]): row["us"] for row in found}
    lines = [f"| | | {' | '.join(map(size_name, sizes))} |", "|---" * (len(sizes) + 2) + "|"]
    for op, mode in dict.fromkeys((row["op"], row["mode"]) for row in found):
        own, direct, library = (
            [times[op, mode, size, way] for size in sizes] for way in (OWN, DIRECT, LIBRARY[device])
        )
        name = f"`{op}`, {mode}" if device == "cuda" else f"`{op}`"
        for what, cells in (
            ("us", [f"{us:.1f}" if us < 1000 else f"{us:.0f}" for us in own]),
            ("over the communicator's", [f"{a / b:.2f}x" for a, b in zip(own, direct, strict=True)]),
            (f"{label}'s over it", [f"{a / b:.1f}x" for a, b in zip(library, own, strict=True)]),
        ):
            lines.append(f"| {name} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def beyond_limits(found: list[Row]) -> list[str]:
    """Return what all-reduces through the process group should have been and were not."""
    times = {(row["mode"], row["bytes"], row["way"]): row["us"] for row in found if row["op"] == "all_reduce"}
    device = found[0]["device"]
    said = []
    for mode, nbytes, way in times:
        if way != OWN:
            continue
        own, direct, library = (times[mode, nbytes, name] for name in (OWN, DIRECT, LIBRARY[device]))
        where = f"{mode} all_reduce of {size_name(nbytes)}"
        if device == "cuda" and own > LIMITS[mode] * direct:
            said.append(f"{where}: {own / direct:.2f} of the communicator's time, above {LIMITS[mode]}")
        least = QUICK_RATIO if device == "cpu" and nbytes <= QUICK_BYTES else 1.0
        if library < least * own:
            said.append(f"{where}: {LIBRARY[device]} takes {library / own:.2f} of its time, below {least:g}")
    return said


def main() -> None:
    asked = options().parse_args()
    sizes = asked.sizes or [parse_size(one) for one in SIZES[asked.device].split(",")]
    if unknown := [op for op in asked.operations if op not in OPERATIONS]:
        raise ConfigError(f"there is no operation {unknown[0]!r}; choose from {', '.join(OPERATIONS)}")
    given = asked.device, asked.operations, sizes, asked.rounds, asked.seconds
    found = shotcast.spawn(rows, asked.world_size, *given, timeout_s=1800)[0]
    print(table(found))
    for line in beyond_limits(found):
        print(line)
    if asked.json:
        write(asked.json, found, kernels.of_collectives(asked.device))


if __name__ == "__main__":
    main()
