"""Large collectives by few SMs and by copy engines beside those by as many SMs as they can get, and NCCL: us of a call
in a graph.

    python research/few_sms.py --world-size 2 --json benchmarks/data/h200/few_sms_x2.json

One row for each operation, size and number of SMs (0: as many as are fastest), with the launch; those ``in place`` are
of tensors that all ranks map. With ``--launches`` also other warps and chunks. Every result is compared with the sum or
the copy by PyTorch before it is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
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
from shotcast.collectives.choice.candidates import launch_shapes
from shotcast.errors import ConfigError
from shotcast.units import format_size, parse_size
from shotcast.wire import LaunchShape, Op

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
SMS = (4, 8, 12, 16, 24, 32)
CALLS = 8


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--sizes", type=lambda text: [parse_size(one) for one in text.split(",")])
    parser.add_argument("--ops", type=lambda text: text.split(","), default=list(OPS))
    parser.add_argument("--launches", action="store_true", help="measure other warps and chunks too")
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


def wanted(op: str, xs: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Return the result of this rank, by PyTorch."""
    if op == "all_gather":
        return torch.cat(xs)
    if op == "broadcast":
        return xs[0].clone()
    if op == "all_to_all":
        return torch.cat([x.chunk(len(xs))[rank] for x in xs])
    total = functools.reduce(torch.add, [x.float() for x in xs]).to(xs[0].dtype)
    return total if op == "all_reduce" else total.chunk(len(xs))[rank].clone()


def measured(
    comm: shotcast.Communicator,
    call: Callable[[], Any],
    out: torch.Tensor,
    right: torch.Tensor,
    before: torch.Tensor | None = None,
) -> Any:
    """Return the time of the slowest rank in us, or why there is none; ``out`` is ``before`` before it is checked."""
    try:
        out.fill_(-1)
        if before is not None:
            out.copy_(before)
        call()
        torch.cuda.synchronize()
        comm.check()
        if not all(comm._host.all_gather(torch.equal(out, right))):
            return "wrong"
        mine = seconds_each(lambda turn: call(), 1, CALLS) * 1e6
        comm.check()
    except (ConfigError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return max(comm._host.all_gather(mine))


def by_nccl(op: str, x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> None:
    if op == "all_reduce":
        dist.all_reduce(out, group=group)
    elif op == "reduce_scatter":
        dist.reduce_scatter_tensor(out, x, group=group)
    elif op == "all_gather":
        dist.all_gather_into_tensor(out, x, group=group)
    elif op == "broadcast":
        dist.broadcast(out, 0, group=group)
    else:
        dist.all_to_all_single(out, x, group=group)


def rows_of(
    comm: shotcast.Communicator,
    shared: shotcast.Communicator,
    group: dist.ProcessGroup,
    op: str,
    size: int,
    launches: bool,
) -> Iterator[dict[str, Any]]:
    """Measure one operation at one size; as one rank. Copy engines are for the communicator that is ``shared``."""
    part = size // comm.world_size if op == "all_gather" else size
    seeds = [torch.Generator(comm.device).manual_seed(rank) for rank in range(comm.world_size)]
    xs = [torch.randn(part // 2, generator=seed, device=comm.device).to(torch.bfloat16) for seed in seeds]
    x, right = xs[comm.rank], wanted(op, xs, comm.rank)
    del xs
    out = torch.empty_like(right)
    whole = out if op == "all_gather" else x
    mapped = comm.empty(*x.shape, dtype=x.dtype).copy_(x), comm.empty(*out.shape, dtype=out.dtype)
    calls: list[tuple[str, int, LaunchShape | None, Callable[[], Any], torch.Tensor]] = []
    calls.append(("auto", 0, None, functools.partial(comm._run, Op[op.upper()], x, out), out))
    if "copy_engines" in shared.candidates(whole, op):
        run = functools.partial(shared._run, Op[op.upper()], x, out, algorithm="copy_engines")
        calls.append(("copy_engines", 0, None, run, out))
    for sms in SMS:
        if "few_sms" not in comm.candidates(whole, op, sms):
            continue
        default = comm.explain(whole, op, "few_sms", sms=sms).launch
        asked = comm._resolver.problem(Op[op.upper()], whole.dtype, whole.numel(), "sum", 0, (), None, sms)
        for shape in launch_shapes(asked, "few_sms") if launches else [default]:
            by: dict[str, Any] = {"algorithm": "few_sms", "launch": shape, "sms": sms}
            for name, tensors in (("few_sms", (x, out)), ("in place", mapped)):
                run = functools.partial(comm._run, Op[op.upper()], *tensors, **by)
                calls.append((name, sms, shape, run, tensors[1]))
    # NCCL adds two ranks in the same order, and more in another
    if comm.world_size == 2 or op in ("all_gather", "all_to_all", "broadcast"):
        calls.append(("nccl", 0, None, functools.partial(by_nccl, op, x, out, group), out))
    for name, sms, launch, call, result in calls:
        shape = dataclasses.asdict(launch) if launch else None
        row = {"op": op, "bytes": size, "algorithm": name, "sms": sms, "launch": shape}
        before = x if name == "nccl" and op in ("all_reduce", "broadcast") else None  # in place
        yield row | {"us": measured(comm, call, result, right, before)}


def rows(sizes: list[int], ops: list[str], launches: bool) -> list[dict[str, Any]]:
    """Measure all of it; as one rank."""
    found = []
    with (
        shotcast.Communicator(device="cuda", timeout_s=30, exclusive=True) as comm,
        shotcast.Communicator(device="cuda", timeout_s=30) as shared,
    ):
        group = dist.new_group(backend="nccl")
        for op, size in itertools.product(ops, sizes):
            found += rows_of(comm, shared, group, op, size, launches)
    return found


def main() -> None:
    asked = options().parse_args()
    sizes = asked.sizes or [4 << 20, 16 << 20, 64 << 20, 448 << 20]
    found = shotcast.spawn(rows, asked.world_size, sizes, asked.ops, asked.launches, timeout_s=570)[0]
    table = Table("op", "bytes", "algorithm", "SMs", "warps", "words", "chunk", "us")
    for row in found:
        shape = row["launch"] or {}
        us = f"{row['us']:.1f}" if isinstance(row["us"], float) else row["us"]
        launch = (str(shape.get(name, "")) for name in ("num_warps", "block_words", "chunk_bytes"))
        table.add_row(row["op"], format_size(row["bytes"]), row["algorithm"], str(row["sms"] or ""), *launch, us)
    Console(width=160).print(table)
    if asked.json:
        write(asked.json, found, kernels.of_collectives("cuda"), world_size=asked.world_size)


if __name__ == "__main__":
    main()
