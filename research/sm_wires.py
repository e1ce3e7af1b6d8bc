"""Bytes that a few SMs can move over NVLink, by each mechanism: what an all-reduce on few SMs has to be made of.

    python research/sm_wires.py --json FILE

Both of two GPUs run the same kernel at once on 64 MiB of memory that both map. A *push* reads its own memory and
writes the peer's; a *pull* reads the peer's and writes its own; a *sum* reads half of both and writes the rounded sum
to both, as an all-reduce in place does; a *local* copy stays in the own memory, as staging does. The mechanisms:

    registers   loads and stores of 16 bytes a thread
    cp.async    loads go to shared memory, several tiles ahead; stores come from registers
    TMA         the copy engine of the SM loads and stores tiles, several ahead

Each row has the programs (one for each SM), warps, elements of a tile, tiles ahead, and GB/s that leave each GPU (of a
local copy, GB/s that are read).
Every result is compared before it is timed. The best of each mechanism and number of programs comes last.
"""
# ruff: noqa: N803

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from gpu_timing import write
from triton.tools.tensor_descriptor import TensorDescriptor

import shotcast

ELEMENTS = 32 << 20
COLUMNS = 64
"""bfloat16 elements of a row of a TMA tile: 128 bytes, the widest swizzle."""
PROGRAMS = (4, 8, 16, 24, 32, 64, 132)
ROUNDS, CALLS = 3, 8


@triton.jit
def move(source, other, target, second, tiles, BLOCK: tl.constexpr, AHEAD: tl.constexpr, SUM: tl.constexpr):
    """Copy tiles of ``source`` to ``target``, or sums with ``other`` to ``target`` and ``second``."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=AHEAD):
        offs = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source + offs)
        if SUM:
            value = (value.to(tl.float32) + tl.load(other + offs).to(tl.float32)).to(tl.bfloat16)
            tl.store(second + offs, value)
        tl.store(target + offs, value)


@triton.jit
def move_by_tma(source, other, target, second, tiles, ROWS: tl.constexpr, AHEAD: tl.constexpr, SUM: tl.constexpr):
    """Do the same by tensor descriptors of [rows, COLUMNS]."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=AHEAD):
        value = source.load([tile * ROWS, 0])
        if SUM:
            value = (value.to(tl.float32) + other.load([tile * ROWS, 0]).to(tl.float32)).to(tl.bfloat16)
            second.store([tile * ROWS, 0], value)
        target.store([tile * ROWS, 0], value)


class Shape(NamedTuple):
    """A launch: the mechanism, programs, warps, elements of a tile, and tiles ahead."""

    mechanism: str
    programs: int
    warps: int
    block: int
    ahead: int


def shapes() -> Iterator[Shape]:
    for programs in PROGRAMS:
        for warps, units in itertools.product((8, 16, 32), (1, 2, 4)):
            yield Shape("registers", programs, warps, warps * 32 * 8 * units, 1)
        for warps, kilobytes, ahead in itertools.product((8, 16), (16, 32), (3, 5)):
            yield Shape("cp.async", programs, warps, kilobytes * 512, ahead)
        for warps, kilobytes, ahead in itertools.product((4,), (16, 32), (3, 5)):
            yield Shape("TMA", programs, warps, kilobytes * 512, ahead)


def described(tensor: torch.Tensor, block: int) -> Any:
    return TensorDescriptor.from_tensor(tensor.view(-1, COLUMNS), [block // COLUMNS, COLUMNS])


def launcher(shape: Shape, tensors: tuple[torch.Tensor, ...], adds: bool) -> Callable[[], None]:
    """Return the launch of a kernel for (source, other, target, second)."""
    options = {"num_warps": shape.warps, "AHEAD": shape.ahead, "SUM": adds}
    tiles = tensors[0].numel() // shape.block
    if shape.mechanism == "TMA":
        maps = [described(tensor, shape.block) for tensor in tensors]
        rows = shape.block // COLUMNS
        return lambda: move_by_tma[(shape.programs,)](*maps, tiles, ROWS=rows, **options)
    return lambda: move[(shape.programs,)](*tensors, tiles, BLOCK=shape.block, **options)


class Pair(NamedTuple):
    """Two tensors that this GPU owns and the peer's two, as this GPU maps them."""

    own: tuple[torch.Tensor, torch.Tensor]
    peers: tuple[torch.Tensor, torch.Tensor]


def mapped(rank: int, group: dist.ProcessGroup) -> Pair:
    import torch.distributed._symmetric_memory as symm_mem

    device = torch.device("cuda", rank)
    own = symm_mem.empty(2 * ELEMENTS, dtype=torch.bfloat16, device=device)
    handle = symm_mem.rendezvous(own, group.group_name)
    theirs = handle.get_buffer(1 - rank, own.shape, own.dtype)
    return Pair(tuple(own.chunk(2)), tuple(theirs.chunk(2)))


def operands(way: str, rank: int, pair: Pair) -> tuple[torch.Tensor, ...]:
    """Return (source, other, target, second) of a way."""
    (first, second), (peers_first, peers_second) = pair
    if way == "push":
        return first, first, peers_second, peers_second
    if way == "local":
        return first, first, second, second
    if way == "pull":
        return peers_first, peers_first, second, second
    half = slice(rank * (ELEMENTS // 2), (rank + 1) * (ELEMENTS // 2))
    return (first if rank == 0 else peers_first)[half], (peers_first if rank == 0 else first)[half], \
        second[half], peers_second[half]  # fmt: skip


def checked(way: str, rank: int, pair: Pair, launch: Callable[[], None], wanted: dict[str, torch.Tensor]) -> bool:
    pair.own[1].zero_()
    torch.cuda.synchronize()
    dist.barrier()
    launch()
    torch.cuda.synchronize()
    dist.barrier()
    return torch.equal(pair.own[1], wanted[way])


def seconds(launch: Callable[[], None]) -> float:
    """Return the median time of a call, the slower rank's."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        for _ in range(CALLS):
            launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    found = torch.tensor([statistics.median(times)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measured(rank: int, until: float) -> list[dict[str, Any]]:
    device = torch.device("cuda", rank)
    pair = mapped(rank, dist.group.WORLD)
    for seed, tensor in ((rank, pair.own[0]),):
        torch.manual_seed(seed)
        tensor.copy_(torch.randint(-64, 64, (ELEMENTS,), device=device))
    torch.cuda.synchronize()
    dist.barrier()
    theirs = pair.peers[0].clone()
    total = (pair.own[0].float() + theirs.float()).bfloat16()
    wanted = {"local": pair.own[0], "push": theirs, "pull": theirs, "sum": total}
    rows: list[dict[str, Any]] = []
    for shape, way in itertools.product(shapes(), ("push", "pull", "sum", "local")):
        late = torch.tensor([float(time.monotonic() > until)])
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late:
            break
        tensors = operands(way, rank, pair)
        failure = ""
        try:
            launch = launcher(shape, tensors, way == "sum")
            launch()
            torch.cuda.synchronize()
        except (RuntimeError, triton.CompilationError, triton.runtime.errors.OutOfResources) as error:
            failure = str(error).splitlines()[0][:80]
        failed = torch.tensor([float(bool(failure))])
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        row: dict[str, Any] = {"way": way, **shape._asdict()}
        if failed:
            row["failure"] = failure
        elif not checked(way, rank, pair, launch, wanted):
            row["failure"] = "the result is wrong"
        else:
            took = seconds(launch)
            # a sum of half of the elements reads as many bytes of the peer as it writes there
            row |= {"us": round(took * 1e6, 2), "gbps": round(ELEMENTS * 2 / took / 1e9, 1)}
        rows.append(row)
        if rank == 0:
            print(row, flush=True)
    return rows


def as_rank(seconds_each: float) -> list[dict[str, Any]]:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    try:
        return measured(rank, time.monotonic() + seconds_each)
    finally:
        dist.destroy_process_group()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="end the sweep after this time")
    parser.add_argument("--json", type=Path, help="where the results go")
    return parser


def main() -> None:
    given = options().parse_args()
    rows = shotcast.spawn(as_rank, 2, given.seconds, timeout_s=given.seconds + 120)[0]
    best: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in rows:
        key = row["way"], row["mechanism"], row["programs"]
        if row.get("gbps", 0) > best.get(key, {}).get("gbps", 0):
            best[key] = row
    for row in best.values():
        print(row)
    if given.json:
        write(given.json, rows, {})


if __name__ == "__main__":
    main()
