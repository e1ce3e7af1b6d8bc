"""All-reduce over logical nodes of GPUs, by several ways, in us of a call in a graph.

    python research/nvrar_nodes.py --nodes 2 --ranks-per-node 1 --json benchmarks/data/h200/nvrar_2x1.json

- ``puts``: our kernels, which reach other nodes by NVSHMEM's puts. On one host these are stores to mapped memory, so
  the figures show what the protocol costs, not what a network does.
- ``stores``: the same kernels, which store to the cells of other nodes themselves.
- ``one_shot``, ``two_shot``: our kernels of one node.
- ``published``: separate launches, as NVRAR was published: a reduce-scatter within the node, then for each doubling of
  nodes a put, fence, signal, wait and sum, then an all-gather within the node.
- ``nccl``: NCCL between these GPUs; ``nccl_network``: NCCL told that each node is a host (NCCL_HOSTID), so over TCP by
  the loopback interface between nodes; ``nccl_apart``: the same with a host for each rank.

Inputs are small whole numbers, whose sums are exact in any order, so every result is compared bit by bit.
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
from shotcast.errors import ShotcastError
from shotcast.memory.symmetric import Target
from shotcast.units import format_size, parse_size

OWN = ("nvrar", "nvrar_pairs", "nvrar_halving")
CALLS = 40
_SIGNAL_SET, _EQUAL = 9, 0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="a power of two")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("-b", "--begin", type=parse_size, default=1 << 10, help="the smallest message")
    parser.add_argument("-e", "--end", type=parse_size, default=8 << 20, help="the largest message")
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


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

    def _send(self, partner: Target, staging: int, arrival: int, signal: int, nbytes: int) -> None:
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


def ways(nodes: int, local: int, begin: int, end: int) -> list[dict[str, Any]]:
    """Measure our kernels and the published form; as one rank."""
    flat = communicator()
    stores = communicator(SHOTCAST_RANKS_PER_NODE=str(local))
    puts = communicator(SHOTCAST_RANKS_PER_NODE=str(local), SHOTCAST_NETWORK="nvshmem")
    assert puts.topology.network == "nvshmem", puts.topology.obstacle
    published = Published(flat, nodes, end)
    measured = [(puts, "puts", OWN), (stores, "stores", OWN), (flat, "", ("one_shot", "two_shot"))]
    rows = []
    for size in sizes(begin, end):
        generator = torch.Generator(flat.device).manual_seed(flat.rank)
        x = torch.randint(-8, 9, (size // 2,), generator=generator, device=flat.device).to(torch.bfloat16)
        out = torch.empty_like(x)
        wanted = flat.all_gather(x).view(flat.world_size, -1).float().sum(0).to(x.dtype)
        right = functools.partial(torch.equal, out, wanted)
        row: dict[str, Any] = {"bytes": size}
        for comm, name, algorithms in measured:
            for algorithm in algorithms:
                call = functools.partial(comm.all_reduce, x, out, algorithm)
                out.fill_(float("nan"))
                row[f"{name}/{algorithm}" if name else algorithm] = us_of(flat, call, right)
        out.fill_(float("nan"))
        row["published"] = us_of(flat, functools.partial(published.call, x, out), right)
        rows.append(row)
    published.close()
    for comm in (puts, stores, flat):
        comm.close()
    return rows


def nccl(begin: int, end: int, ranks_per_host: int) -> list[float | str]:
    """Measure NCCL; as one rank, with so many on each host that NCCL sees; 0 for all of them."""
    if ranks_per_host:
        os.environ["NCCL_HOSTID"] = f"host {int(os.environ['RANK']) // ranks_per_host}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    comm = shotcast.Communicator(device="cuda", max_bytes=1 << 20)  # it brings up torch.distributed
    group = dist.new_group(backend="nccl")
    times = []
    for size in sizes(begin, end):
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=comm.device)

        def call(x: torch.Tensor = x) -> None:
            dist.all_reduce(x, group=group)

        x.fill_(1)
        call()
        right = bool((x == comm.world_size).all())
        x.zero_()  # else sums of sums would overflow
        times.append(us_of(comm, call, lambda right=right: right))  # type: ignore[misc]
    comm.close()
    return times


def main() -> None:
    parser = options()
    asked = parser.parse_args()
    nodes, local = asked.nodes, asked.ranks_per_node
    if nodes < 2 or nodes & (nodes - 1) or local < 1:
        parser.error(f"--nodes is a power of two from 2 up and --ranks-per-node at least 1, not {nodes} and {local}")
    if asked.begin % (2 * local) or asked.end < asked.begin:
        parser.error(f"sizes are whole elements of each of {local} ranks and ascend, not {asked.begin} to {asked.end}")
    rows = shotcast.spawn(ways, nodes * local, nodes, local, asked.begin, asked.end, timeout_s=330)[0]
    hosts = {"nccl": 0, "nccl_network": local} | ({"nccl_apart": 1} if local > 1 else {})
    for name, ranks_per_host in hosts.items():
        try:
            times = shotcast.spawn(nccl, nodes * local, asked.begin, asked.end, ranks_per_host, timeout_s=80)[0]
        except ShotcastError as error:
            times = [str(error)[:200]] * len(rows)
        for row, time_us in zip(rows, times, strict=True):
            row[name] = time_us
    table = Table("bytes", *(name for name in rows[0] if name != "bytes"))
    for row in rows:
        cells = (row[name] for name in row if name != "bytes")
        table.add_row(format_size(row["bytes"]), *(f"{us:.1f}" if isinstance(us, float) else us for us in cells))
    Console(width=200).print(table)
    if asked.json:
        write(asked.json, rows, kernels.of_collectives("cuda"), nodes=nodes, ranks_per_node=local)


if __name__ == "__main__":
    main()
