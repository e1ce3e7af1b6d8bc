"""Functions that a rank of tests/collectives/test_vendor_cuda.py runs: calls that NCCL serves on GPUs."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shotcast
from shotcast import Communicator
from shotcast.collectives.vendor.interface import CallError, RefusedError
from shotcast.collectives.vendor.nccl import NcclGroup
from shotcast.collectives.vendor.nccl_library import DTYPES
from shotcast.wire import CallPlan, Op

_REDUCTIONS = {"sum": torch.sum, "prod": torch.prod, "max": torch.amax, "min": torch.amin}
_MOVED = ("bool", "complex64", "int16", "uint16", "float8_e4m3fn")


def _inputs(comm: Communicator, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the input of every rank: small whole numbers, so that sums and products are exact in each dtype."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(0, 2, (comm.world_size, count), generator=generator)
    return [row.to(dtype).to(comm.device) for row in values]


def every_dtype_and_reduction(counts: list[int]) -> int:
    """Compare reductions by NCCL, eager and replayed, with those of float64 on the CPU. Return how many were made."""
    made = 0
    with Communicator(device="cuda", timeout_s=60) as comm:
        names = [name for name in DTYPES if not name.startswith("float8")]
        for name in (*names, "bool", "complex64"):
            dtype = getattr(torch, name)
            for count in counts:
                parts = _inputs(comm, comm.world_size * count, dtype)
                for reduction, reduce in _REDUCTIONS.items():
                    if name == "complex64" and reduction != "sum":
                        continue
                    wide = torch.stack(
                        [part.cpu().to(torch.complex128 if name == "complex64" else torch.float64) for part in parts]
                    )
                    wanted = reduce(wide, 0).to(dtype).to(comm.device)
                    own = parts[comm.rank]
                    got = comm.all_reduce(own, algorithm="vendor", reduction=reduction)
                    assert torch.equal(got, wanted), (name, count, reduction)
                    share = comm.reduce_scatter(own, algorithm="vendor", reduction=reduction)
                    assert torch.equal(share, wanted.chunk(comm.world_size)[comm.rank]), (name, count, reduction)
                    made += 2
        comm.check()
    return made


def reductions_of_any_byte() -> int:
    """Reduce bool whose bytes are any: all but 0 are true, and results are 0 or 1. Return how many calls were made."""
    made = 0
    with Communicator(device="cuda", timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        raw = torch.randint(0, 4, (size, 5 * size), generator=torch.Generator().manual_seed(5)).to(torch.uint8)
        own = (raw[rank] * 85).to(comm.device).view(torch.bool)
        for reduction in ("sum", "max", "bor", "prod", "min", "band"):
            true = raw.ne(0)
            wanted = (true.any(0) if reduction in ("sum", "max", "bor") else true.all(0)).to(torch.uint8)
            for algorithm in ("vendor", "one_shot"):
                how = {"algorithm": algorithm, "reduction": reduction}
                got = comm.all_reduce(own, **how).view(torch.uint8).cpu()
                assert torch.equal(got, wanted), how
                share = comm.reduce_scatter(own, **how).view(torch.uint8).cpu()
                assert torch.equal(share, wanted.chunk(size)[rank]), how
                root = comm.reduce(own, size - 1, **how).view(torch.uint8).cpu()
                assert root.tolist() == (wanted.tolist() if rank == size - 1 else []), how
                made += 3
            assert torch.equal(own.view(torch.uint8).cpu(), raw[rank] * 85), "x is left alone"
        comm.check()
    return made


class _Moves:
    """Calls that move data of one dtype and size, and what they give."""

    def __init__(self, comm: Communicator, dtype: torch.dtype, count: int):
        self._comm, self._neighbour = comm, comm.rank ^ 1
        n = comm.world_size
        self._parts = _inputs(comm, n * count, dtype)
        self._own = self._parts[comm.rank]
        self._rows = [count * (rank + 1) for rank in range(n)]
        self._uneven = [_inputs(comm, size, dtype)[rank] for rank, size in enumerate(self._rows)]
        self._last, self._message = self._own.clone(), torch.empty_like(self._own)
        self._outputs: list[torch.Tensor] = []

    def make(self) -> None:
        comm, rank = self._comm, self._comm.rank
        self._outputs = [
            comm.all_gather(self._own),
            comm.all_gather(self._uneven[rank], sizes=self._rows),
            comm.all_to_all(self._own),
            comm.broadcast(self._last, comm.world_size - 1),
        ]
        if self._neighbour < comm.world_size:
            for sender in (rank & ~1, rank | 1):
                if rank == sender:
                    comm.send(self._own, self._neighbour)
                else:
                    comm.recv(self._message, self._neighbour)

    def clear(self) -> None:
        for output in (*self._outputs[:3], self._message):
            output.view(torch.uint8).zero_()
        self._last.copy_(self._own)

    def wrong(self) -> dict[str, tuple[list[int], list[int]]]:
        """Return the bytes that arrived and those that were to arrive, by the operation that got them wrong."""
        torch.cuda.synchronize()
        n, rank = self._comm.world_size, self._comm.rank
        turned = torch.cat([part.chunk(n)[rank] for part in self._parts])
        wanted = [torch.cat(self._parts), torch.cat(self._uneven), turned, self._parts[n - 1]]
        names = "all_gather", "all_gather of uneven parts", "all_to_all", "broadcast"
        pairs = dict(zip(names, zip(self._outputs, wanted, strict=True), strict=True))
        if self._neighbour < n:
            pairs["send and recv"] = self._message, self._parts[self._neighbour]
        bytes_of = {name: tuple(x.view(torch.uint8).tolist() for x in pair) for name, pair in pairs.items()}
        return {name: (got[:64], right[:64]) for name, (got, right) in bytes_of.items() if got != right}


def every_operation(counts: list[int]) -> int:
    """Compare moves by NCCL, eager and replayed from a graph, with the inputs. Return how many were made."""
    made = 0
    with Communicator(device="cuda", timeout_s=60) as comm:
        for name in ("float32", "bfloat16", *_MOVED):
            for count in counts:
                moves = _Moves(comm, getattr(torch, name), count)
                moves.make()
                assert not (wrong := moves.wrong()), (name, count, wrong)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    moves.make()
                for replay in range(3):
                    moves.clear()
                    graph.replay()
                    assert not (wrong := moves.wrong()), (name, count, replay, wrong)
                made += 4
        comm.check()
    return made


def absent(victim: int, deadline_s: float) -> list[dict[str, Any]]:
    """Have the victim stay away from an all-reduce by NCCL, eager and replayed. Return what the others saw.

    The device is waited for, as a user's program does: that must end by itself.
    """
    seen = []
    with Communicator(device="cuda", timeout_s=60) as comm:
        x = torch.ones(1000, dtype=torch.int32, device=comm.device)
        comm.all_reduce(x)
        assert comm.calls_by_library == 1
        torch.cuda.synchronize()
        for replayed in (False, True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                comm.all_reduce(x)
            comm.barrier()
            torch.cuda.synchronize()
            comm.set_timeout(deadline_s)
            if comm.rank == victim:
                time.sleep(deadline_s + 1.5)
            else:
                begun = time.monotonic()
                if replayed:
                    graph.replay()
                else:
                    comm.all_reduce(x)
                torch.cuda.synchronize()
                drained = time.monotonic() - begun
                with pytest.raises(shotcast.CollectiveTimeout) as caught:
                    comm.check()
                raised = time.monotonic() - begun
                seen.append({"missing": caught.value.missing, "drained": drained, "raised": raised})
            comm.set_timeout(60)
            comm.reset()
            fresh = torch.ones(5, dtype=torch.int32, device=comm.device)
            assert comm.all_reduce(fresh).tolist() == [comm.world_size] * 5
    return seen


def replayed_after_a_reset(victim: int) -> str:
    """Replay a graph with calls of an aborted communicator. Return what ``check`` says."""
    with Communicator(device="cuda", timeout_s=60) as comm:
        x = torch.ones(1000, dtype=torch.int32, device=comm.device)
        comm.all_reduce(x)
        assert comm.calls_by_library == 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.all_reduce(x)
        graph.replay()
        torch.cuda.synchronize()
        comm.check()
        comm.barrier()
        torch.cuda.synchronize()
        comm.set_timeout(1)
        if comm.rank == victim:
            time.sleep(2.5)
        else:
            graph.replay()
            torch.cuda.synchronize()
            with pytest.raises(shotcast.CollectiveTimeout):
                comm.check()
        comm.set_timeout(60)
        # every rank captured before the fault, and every rank's connections are new
        comm.reset()
        comm.check()
        graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(shotcast.ShotcastError) as caught:
            comm.check()
        del graph
        comm.reset()
        assert comm.all_reduce(torch.ones(5, dtype=torch.int32, device=comm.device)).tolist() == [comm.world_size] * 5
        return str(caught.value)


def killed_inside(victim: int) -> dict[str, Any]:
    """Kill the victim when its GPU has begun a long series of calls, with ten minutes to the deadline."""
    comm = Communicator(device="cuda")
    x = torch.ones(1 << 26, dtype=torch.int32, device=comm.device)
    comm.all_reduce(x)
    assert comm.calls_by_library == 1
    torch.cuda.synchronize()
    comm._host.barrier()
    for _ in range(2000):
        comm.all_reduce(x)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    while not comm._peers.gone and time.monotonic() - begun < 20:
        time.sleep(0.001)
    died = time.monotonic()
    found: dict[str, Any] = {}
    while not found and time.monotonic() - died < 20:
        time.sleep(0.001)
        try:
            comm.check()
        except shotcast.CollectiveTimeout as error:
            found = {"missing": error.missing, "reason": error.reason, "took": time.monotonic() - died}
    comm.close()
    return found


def one_rank() -> dict[str, Any]:
    """Make NCCL's calls on a group of one rank, which one GPU is enough for. Return what was seen."""
    device = torch.device("cuda", 0)
    store = dist.HashStore()
    group = NcclGroup(store, 0, 1, device, 60.0, lambda: None)
    x = torch.arange(1000, dtype=torch.int32, device=device)
    made = 0

    def call(op: Op, source: torch.Tensor | None, out: torch.Tensor | None, dtype: str = "int32", **more: Any) -> None:
        nonlocal made
        nbytes = x.numel() * x.element_size()
        group.run(CallPlan(op, "vendor", dtype, nbytes, **more), source, out)
        made += 1

    for op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BROADCAST):
        out = torch.zeros_like(x)
        call(op, x, out)
        torch.cuda.synchronize()
        assert torch.equal(out, x), op
    out = torch.zeros_like(x)
    call(Op.ALL_GATHER, x, out, sizes=(1000,))
    call(Op.BARRIER, None, None)
    torch.cuda.synchronize()
    assert torch.equal(out, x)
    assert group.progress() == (made, made)
    with pytest.raises(RefusedError, match="int16"):
        group.run(CallPlan(Op.ALL_REDUCE, "vendor", "int16", 8), x.short(), x.short())
    torch.cuda.synchronize()
    before = group.progress()
    assert before[0] == before[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(Op.ALL_REDUCE, x, out)
    for _ in range(5):
        out.zero_()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, x)
    assert group.progress() == (before[0] + 5, before[1] + 5)
    group.check()
    begun = time.monotonic()
    torch.cuda._sleep(2_000_000_000)  # about a second: calls behind it have not begun
    call(Op.ALL_REDUCE, x, out)
    assert group.progress() == (before[0] + 5, before[1] + 5)
    group.stop()
    stopped = time.monotonic() - begun
    with pytest.raises(CallError):
        call(Op.ALL_REDUCE, x, out)
    torch.cuda.synchronize()
    graph.replay()  # of an aborted communicator: it ends, whatever it does
    torch.cuda.synchronize()
    counted = group.progress()[0] - before[0]
    aborting = [thread.name for thread in threading.enumerate() if "nccl" in thread.name]
    del graph
    until = time.monotonic() + 10
    while any("nccl" in thread.name for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.05)
    left = [thread.name for thread in threading.enumerate() if "nccl" in thread.name]
    other = NcclGroup(dist.HashStore(), 0, 1, device, 60.0, lambda: None)
    begun = time.monotonic()
    other.close()
    return {
        "stopped": stopped,
        "counted": counted,
        "aborting": aborting,
        "left": left,
        "closed": time.monotonic() - begun,
    }
