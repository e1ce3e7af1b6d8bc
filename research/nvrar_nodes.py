"""All-reduce over logical nodes of GPUs, by several ways, in us of a call in a graph.

    python research/nvrar_nodes.py --nodes 2 --ranks-per-node 1 --json benchmarks/data/h200/nvrar_2x1.json

- ``puts/...``: our kernels, which reach other nodes by NVSHMEM's puts. On one host these are stores to mapped memory,
  so the figures show what the protocol costs, not what a network does.
- ``stores/...``: the same kernels, which store to the slots of other nodes themselves.
- ``one_shot``, ``two_shot``: our kernels of one node.
- ``published``: separate launches, as NVRAR was published: a reduce-scatter within the node, then for each doubling of
  nodes a put, fence, signal, wait and sum, then an all-gather within the node.
- ``nccl``: NCCL between these GPUs; ``nccl_network``: NCCL told that each node is a host (NCCL_HOSTID), so over TCP by
  the loopback interface between nodes; ``nccl_apart``: the same with a host for each rank.

Each way has processes of its own and a time limit. Rank 0 prints every row as it has it, with the seconds of the first
call, most of which are the compiler's: a kernel that puts takes eight. A way that fails or stalls is ended, and the
others go on. Inputs are small whole numbers, whose sums are exact in any order, so every result is compared bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from shotcast.errors import ShotcastError
from shotcast.memory.symmetric import ShareTarget
from shotcast.units import format_size, parse_size

CALLS = 40
_SIGNAL_SET, _EQUAL = 9, 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Nodes, ranks of each, and the sizes of messages in bytes."""

    nodes: int
    local: int
    sizes: tuple[int, ...]


class Rows:
    """The results of rank 0: each is printed, and kept in a file, as soon as it is there."""

    def __init__(self, path: Path, way: str):
        self._path, self._way = path, way

    def add(self, rank: int, nbytes: int, us: float | str, first_s: float, way: str = "") -> None:
        """Take the result of a size; ``us`` is a time or why there is none."""
        if rank:
            return
        way = way or self._way
        found = f"{us:9.1f} us" if isinstance(us, float) else us
        print(f"{way:20} {format_size(nbytes):>8} {found}   first call {first_s:.1f} s", flush=True)
        with self._path.open("a") as file:
            file.write(json.dumps([way, nbytes, us]) + "\n")


def partners(rank: int, nodes: int, local: int) -> list[int]:
    """Return the ranks of the same number in nodes 1, 2, 4, ... off, with which a rank exchanges sums in turn."""
    return [rank ^ (1 << turn) * local for turn in range(nodes.bit_length() - 1)]


class Published:
    """NVRAR as stream operations, over ``nodes`` nodes. Calls take turns with two sets of buffers and signals.

    A rank resets its signal of a call after it has waited for it. Its partner signals again only after this rank's
    signal of the call between, which follows the reset.
    """

    def __init__(self, comm: shotcast.Communicator, nodes: int, most: int):
        from shotcast.memory.nvshmem import HEAP
        from shotcast.memory.nvshmem_library import folder

        local = comm.world_size // nodes
        partner_ranks = partners(comm.rank, nodes, local)
        self._part, self._rounds, self._turn = most // local, len(partner_ranks), 0
        self._signals_at = 2 * (1 + self._rounds) * self._part
        lease = HEAP.lease(comm._host, self._signals_at + 4096, comm.device, [comm.rank])
        self._lease, self._rank = lease, comm.rank
        lease.view(comm.rank, 0, (lease.nbytes,), torch.uint8).zero_()
        self._partners = [lease.targets[partner] for partner in partner_ranks]
        self._own = lease.targets[comm.rank].address
        self._node = comm.split(comm.rank // local) if local > 1 else None
        self._library = ctypes.CDLL(str(folder() / "libnvshmem_host.so.3"))
        torch.cuda.synchronize()
        comm._host.barrier()

    def call(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._turn = turn = 1 - self._turn
        staging = turn * (1 + self._rounds) * self._part
        local = 1 if self._node is None else self._node.world_size
        mine = self._lease.view(self._rank, staging, (x.numel() // local,), x.dtype)
        if self._node is None:
            mine.copy_(x)
        else:
            self._node.reduce_scatter(x, out=mine)
        for number, partner in enumerate(self._partners):
            arrival = staging + (1 + number) * self._part
            signal = self._signals_at + 64 * (turn * self._rounds + number)
            self._send(partner, staging, arrival, signal, mine.nbytes)
            mine.add_(self._lease.view(self._rank, arrival, tuple(mine.shape), x.dtype))
        if self._node is None:
            out.copy_(mine)
        else:
            self._node.all_gather(mine, out=out)

    def _send(self, partner: ShareTarget, staging: int, arrival: int, signal: int, nbytes: int) -> None:
        """Put the staged bytes to a partner and tell it so, then wait for those of the partner."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        run, pointer, pe = self._library, ctypes.c_void_p, partner.pe
        run.nvshmemx_putmem_nbi_on_stream(
            pointer(partner.address + arrival), pointer(self._own + staging), ctypes.c_size_t(nbytes), pe, stream
        )
        run.nvshmemx_quiet_on_stream(stream)
        there = pointer(partner.address + signal)
        run.nvshmemx_signal_op_on_stream(there, ctypes.c_uint64(1), _SIGNAL_SET, pe, stream)
        run.nvshmemx_signal_wait_until_on_stream(pointer(self._own + signal), _EQUAL, ctypes.c_uint64(1), stream)
        self._lease.view(self._rank, signal, (1,), torch.int64).zero_()

    def close(self) -> None:
        if self._node is not None:
            self._node.close()


def measured(
    comm: shotcast.Communicator, call: Callable[[], Any], right: Callable[[], bool]
) -> tuple[float | str, float]:
    """Return the time of the slowest rank, or why there is none, and the seconds of the first call."""
    began = time.monotonic()
    first_s = 0.0
    try:
        call()
        torch.cuda.synchronize()
        first_s = time.monotonic() - began
        comm.check()
        if not all(comm._host.all_gather(right())):
            return "wrong", first_s
        comm._host.barrier()
        mine = seconds_each(lambda turn: call(), 2, CALLS) * 1e6
    except (RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"[:200], first_s or time.monotonic() - began
    return max(comm._host.all_gather(mine)), first_s


def communicator(**settings: str) -> shotcast.Communicator:
    """Return a communicator that is made under some environment variables.

    It is exclusive, as others load the kernels of all sizes with the first call, eight seconds each.
    """
    names = ("SHOTCAST_RANKS_PER_NODE", "SHOTCAST_NETWORK")
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(settings)
    try:
        return shotcast.Communicator(device="cuda", max_bytes=8 << 20, timeout_s=20, exclusive=True)
    finally:
        for name in names:
            os.environ.pop(name, None)


def operands(comm: shotcast.Communicator, nbytes: int) -> tuple[torch.Tensor, torch.Tensor, Callable[[], bool]]:
    """Return the input of this rank, the output, and what compares that with the sum of all ranks' inputs."""
    every = []
    for rank in range(comm.world_size):
        generator = torch.Generator(comm.device).manual_seed(rank)
        every.append(torch.randint(-8, 9, (nbytes // 2,), generator=generator, device=comm.device).to(torch.bfloat16))
    out = torch.full_like(every[0], float("nan"))
    wanted = torch.stack(every).float().sum(0).to(out.dtype)
    return every[comm.rank], out, functools.partial(torch.equal, out, wanted)


def ours(shape: Shape, rows: Rows, over: str, *algorithms: str) -> None:
    """Measure our kernels, over "stores" or "puts" between nodes or on one node; as one rank."""
    settings = {} if over == "node" else {"SHOTCAST_RANKS_PER_NODE": str(shape.local)}
    if over == "puts":
        settings["SHOTCAST_NETWORK"] = "nvshmem"
    with communicator(**settings) as comm:
        if over == "puts" and not comm.topology.network.puts:
            raise RuntimeError(f"GPUs do not put to each other: {comm.topology.unsupported_reason}")
        for algorithm in algorithms:
            way = algorithm if over == "node" else f"{over}/{algorithm}"
            for nbytes in shape.sizes:
                x, out, right = operands(comm, nbytes)
                us, first_s = measured(comm, functools.partial(comm.all_reduce, x, out, algorithm), right)
                rows.add(comm.rank, nbytes, us, first_s, way)
                if isinstance(us, str):
                    comm.reset()
                    break


def published(shape: Shape, rows: Rows) -> None:
    """Measure the published form; as one rank."""
    with communicator() as comm:
        form = Published(comm, shape.nodes, max(shape.sizes))
        for nbytes in shape.sizes:
            x, out, right = operands(comm, nbytes)
            rows.add(comm.rank, nbytes, *measured(comm, functools.partial(form.call, x, out), right))
        form.close()


def nccl(shape: Shape, rows: Rows, apart: str = "") -> None:
    """Measure NCCL; as one rank. It sees one host, or a host for each "node" or "rank"."""
    if apart:
        ranks_per_host = shape.local if apart == "node" else 1
        os.environ["NCCL_HOSTID"] = f"host {int(os.environ['RANK']) // ranks_per_host}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    with shotcast.Communicator(device="cuda", max_bytes=1 << 20) as comm:  # it brings up torch.distributed
        group = dist.new_group(backend="nccl")
        for nbytes in shape.sizes:
            x, out, right = operands(comm, nbytes)

            def call(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
                dist.all_reduce(out.copy_(x), group=group)

            call()
            if all(comm._host.all_gather(right())):
                out.zero_()  # else sums of sums would overflow
                only = functools.partial(dist.all_reduce, out, group=group)
                rows.add(comm.rank, nbytes, *measured(comm, only, lambda: True))
            else:
                rows.add(comm.rank, nbytes, "wrong", 0.0)


WAYS: dict[str, tuple[Any, ...]] = {
    "nccl": (nccl,),
    "stores": (ours, "stores", "nvrar_pairs", "nvrar_16bit", "nvrar", "nvrar_halving"),
    **{f"puts/{name}": (ours, "puts", name) for name in ("nvrar_pairs", "nvrar_16bit", "nvrar", "nvrar_halving")},
    "node": (ours, "node", "one_shot", "two_shot"),
    "published": (published,),
    "nccl_network": (nccl, "node"),
    "nccl_apart": (nccl, "rank"),
}
"""The function that measures each way, with its further arguments, in the order in which they begin."""


def run(name: str, shape: Shape, path: Path, limit_s: float) -> None:
    """Measure a way within its limit; ``path`` has its results until it fails or stalls."""
    measure, *others = WAYS[name]
    began = time.monotonic()
    print(f"{name}: begins", flush=True)
    try:
        shotcast.spawn(measure, shape.nodes * shape.local, shape, Rows(path, name), *others, timeout_s=limit_s)
    except (ShotcastError, RuntimeError) as error:
        print(f"{name}: {str(error)[:3000]}", flush=True)
    print(f"{name}: ended after {time.monotonic() - began:.0f} s", flush=True)


def table_of(path: Path, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each size with the results of all ways that have any."""
    rows: dict[int, dict[str, Any]] = {nbytes: {"bytes": nbytes} for nbytes in sizes}
    for line in path.read_text().splitlines():
        way, nbytes, us = json.loads(line)
        rows[nbytes][way] = us
    return list(rows.values())


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="a power of two")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("-b", "--begin", type=parse_size, default=8 << 10, help="the smallest message")
    parser.add_argument("-e", "--end", type=parse_size, default=8 << 20, help="the largest message")
    parser.add_argument("-f", "--factor", type=int, default=8, help="from one message to the next")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of %(default)s")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds that a way may take")
    parser.add_argument("--total", type=float, default=540.0, help="seconds after which no way begins")
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options()
    asked = parser.parse_args(arguments)
    nodes, local = asked.nodes, asked.ranks_per_node
    if nodes < 2 or nodes & (nodes - 1) or local < 1:
        parser.error(f"--nodes is a power of two from 2 up and --ranks-per-node at least 1, not {nodes} and {local}")
    if asked.begin % (2 * local) or asked.end < asked.begin or asked.factor < 2:
        parser.error(f"sizes are whole elements of each of {local} ranks and ascend, not {asked.begin} to {asked.end}")
    names = asked.ways.split(",")
    if unknown := [name for name in names if name not in WAYS]:
        parser.error(f"no way {', '.join(unknown)}; ways: {', '.join(WAYS)}")
    sizes = [asked.begin]
    while sizes[-1] * asked.factor <= asked.end:
        sizes.append(sizes[-1] * asked.factor)
    shape, end = Shape(nodes, local, tuple(sizes)), time.monotonic() + asked.total
    with tempfile.TemporaryDirectory(prefix="nvrar-") as folder:
        path = Path(folder) / "rows"
        path.touch()
        for name in names:
            left = end - time.monotonic()
            if left <= 0:
                print(f"{name}: not begun, {asked.total:.0f} s have passed", flush=True)
            elif name != "nccl_apart" or local > 1:
                run(name, shape, path, min(asked.limit, left))
                if asked.json:
                    rows = table_of(path, sizes)
                    write(asked.json, rows, kernels.of_collectives("cuda"), nodes=nodes, ranks_per_node=local)
        rows = table_of(path, sizes)
    ways = dict.fromkeys(name for row in rows for name in row if name != "bytes")
    table = Table("way", *(format_size(nbytes) for nbytes in sizes))
    for way in ways:
        found = (row.get(way, "") for row in rows)
        table.add_row(way, *(f"{us:.1f}" if isinstance(us, float) else us for us in found))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
