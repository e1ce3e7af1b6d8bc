"""All-reduce over two logical nodes of one GPU each, by several ways, in us of a call in a graph.

    python benchmarks/nvrar_nodes.py --json benchmarks/data/h200/nvrar_x2.json

- ``puts``: our kernels, which reach the other node by NVSHMEM's puts. On one host these are stores to mapped memory, so
  the figures show what the protocol costs, not what a network does.
- ``stores``: the same kernels, which store to the other node's cells themselves.
- ``one_shot``, ``two_shot``: our kernels of one node.
- ``published``: copy, put, fence, signal, wait and sum as separate stream operations, as NVRAR was published.
- ``nccl``: NCCL between these GPUs; ``nccl_network``: NCCL told that they are on two hosts (NCCL_HOSTID), so over TCP
  by the loopback interface.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_timing import write
from rich.console import Console
from rich.table import Table

import shotcast
from shotcast.bench import kernels
from shotcast.bench.gpu_times import seconds_each
from shotcast.units import format_size, parse_size

OWN = ("nvrar", "nvrar_pairs", "nvrar_halving")
CALLS = 40
_SIGNAL_SET, _EQUAL = 9, 0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-b", "--begin", type=parse_size, default=1 << 10, help="the smallest message")
    parser.add_argument("-e", "--end", type=parse_size, default=2 << 20, help="the largest message")
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


class Published:
    """NVRAR between two nodes as stream operations. Calls take turns with two sets of buffers and a signal.

    A rank resets its signal of a call after it has waited for it. The other rank signals again only after this rank's
    signal of the call between, which follows the reset.
    """

    def __init__(self, comm: shotcast.Communicator, most: int):
        from shotcast.memory.nvshmem import HEAP
        from shotcast.memory.nvshmem_library import folder

        lease = HEAP.lease(comm._host, 4 * most + 4096, comm.device, [comm.rank])
        self._lease, self._most, self._turn = lease, most, 0
        lease.view(comm.rank, 0, (lease.nbytes,), torch.uint8).zero_()
        self._rank, self._other = comm.rank, lease.targets[1 - comm.rank]
        self._own = lease.targets[comm.rank].address
        self._library = ctypes.CDLL(str(folder() / "libnvshmem_host.so.3"))
        torch.cuda.synchronize()
        comm._host.barrier()

    def call(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._turn = turn = 1 - self._turn
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        staging, arrival, signal = turn * self._most, (2 + turn) * self._most, 4 * self._most + 64 * turn
        shape = (x.numel(),)
        self._lease.view(self._rank, staging, shape, x.dtype).copy_(x)
        run = self._library
        pointer, pe = ctypes.c_void_p, self._other.pe
        there = self._other.address
        run.nvshmemx_putmem_nbi_on_stream(
            pointer(there + arrival), pointer(self._own + staging), ctypes.c_size_t(x.nbytes), pe, stream
        )
        run.nvshmemx_quiet_on_stream(stream)
        run.nvshmemx_signal_op_on_stream(pointer(there + signal), ctypes.c_uint64(1), _SIGNAL_SET, pe, stream)
        run.nvshmemx_signal_wait_until_on_stream(pointer(self._own + signal), _EQUAL, ctypes.c_uint64(1), stream)
        self._lease.view(self._rank, signal, (1,), torch.int64).zero_()
        came = self._lease.view(self._rank, arrival, shape, x.dtype)
        torch.add(x, came, out=out)


def sizes(begin: int, end: int) -> Iterator[int]:
    size = begin
    while size <= end:
        yield size
        size *= 2


def us_of(comm: shotcast.Communicator, call: Callable[[], Any], right: Callable[[], bool]) -> float | str:
    """Return the time of the slowest rank, or why there is none."""
    try:
        call()
        torch.cuda.synchronize()
        if not all(comm._host.all_gather(right())):
            return "wrong"
        comm._host.barrier()
        mine = seconds_each(lambda turn: call(), 2, CALLS) * 1e6
    except (RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return max(comm._host.all_gather(mine))


def communicator(**settings: str) -> shotcast.Communicator:
    """Return a communicator that is made under some environment variables."""
    names = ("SHOTCAST_RANKS_PER_NODE", "SHOTCAST_NETWORK")
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(settings)
    try:
        return shotcast.Communicator(device="cuda", max_bytes=8 << 20, timeout_s=20)
    finally:
        for name in names:
            os.environ.pop(name, None)


def ways(begin: int, end: int) -> list[dict[str, Any]]:
    """Measure our kernels and the published form; as one rank of two."""
    flat = communicator()
    stores = communicator(SHOTCAST_RANKS_PER_NODE="1")
    puts = communicator(SHOTCAST_RANKS_PER_NODE="1", SHOTCAST_NETWORK="nvshmem")
    assert puts.topology.network == "nvshmem", puts.topology.obstacle
    published = Published(flat, end)
    measured = [(puts, "puts", OWN), (stores, "stores", OWN), (flat, "", ("one_shot", "two_shot"))]
    rows = []
    for size in sizes(begin, end):
        x = torch.randn(size // 2, device=flat.device).to(torch.bfloat16)
        out = torch.empty_like(x)
        first, second = flat.all_gather(x).view(2, -1)
        right = functools.partial(torch.equal, out, (first.float() + second.float()).to(x.dtype))
        row: dict[str, Any] = {"bytes": size}
        for comm, name, algorithms in measured:
            for algorithm in algorithms:
                call = functools.partial(comm.all_reduce, x, out, algorithm)
                row[f"{name}/{algorithm}" if name else algorithm] = us_of(flat, call, right)
        row["published"] = us_of(flat, functools.partial(published.call, x, out), right)
        rows.append(row)
    for comm in (puts, stores, flat):
        comm.close()
    return rows


def nccl(begin: int, end: int, apart: bool) -> list[float | str]:
    """Measure NCCL; as one rank of two, with ``apart`` on hosts of its own."""
    if apart:
        os.environ["NCCL_HOSTID"] = f"host {os.environ['RANK']}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    comm = shotcast.Communicator(device="cuda", max_bytes=1 << 20)  # it brings up torch.distributed
    group = dist.new_group(backend="nccl")
    times = []
    for size in sizes(begin, end):
        x = torch.ones(size // 2, dtype=torch.bfloat16, device=comm.device)
        times.append(us_of(comm, functools.partial(dist.all_reduce, x, group=group), lambda: True))
    comm.close()
    return times


def main() -> None:
    asked = options().parse_args()
    rows = shotcast.spawn(ways, 2, asked.begin, asked.end, timeout_s=400)[0]
    for name, apart in (("nccl", False), ("nccl_network", True)):
        times = shotcast.spawn(nccl, 2, asked.begin, asked.end, apart, timeout_s=120)[0]
        for row, time_us in zip(rows, times, strict=True):
            row[name] = time_us
    table = Table("bytes", *(name for name in rows[0] if name != "bytes"))
    for row in rows:
        cells = (row[name] for name in row if name != "bytes")
        table.add_row(format_size(row["bytes"]), *(f"{us:.1f}" if isinstance(us, float) else us for us in cells))
    Console(width=200).print(table)
    if asked.json:
        write(asked.json, rows, kernels.of_collectives("cuda"))


if __name__ == "__main__":
    main()
