"""Functions that the ranks of the tests of copy engines run, in the interpreter and on GPUs."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from few_sms_targets import exact, rank_tensors
from workers import FLOATS, check, failing_call, settle, shifted, straggle

import shotcast
from shotcast.collectives import reference
from shotcast.collectives.choice.candidates import launch_shape
from shotcast.wire import Op

KINDS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL)
ROOM = 32 << 20
"""The least ``max_bytes`` of communicators that copy engines serve."""


def call(comm: shotcast.Communicator, op: Op, x: torch.Tensor, out: torch.Tensor, chunk: int, **by: Any) -> None:
    """Make a call by copy engines in chunks of so many bytes of each part; 0 for a call as users make it."""
    if not chunk:
        getattr(comm, op.label)(x, out=out, sms=0, **by)
        return
    count = x.numel() * comm.world_size if op is Op.ALL_GATHER else x.numel()
    problem = comm._resolver.problem(op, x.dtype, count, by.get("reduction", "sum"), 0, (), None, None)
    launch = launch_shape(problem, "copy_engines")
    comm._run(
        op,
        x,
        out,
        algorithm="copy_engines",
        launch=dataclasses.replace(launch, chunk_bytes=chunk),
        **by,
    )


def one_case(
    comm: shotcast.Communicator, op: Op, dtype: torch.dtype, count: int, shift: int, chunk: int, seed: int
) -> None:
    """Compare a call, and the same in place where that is possible, with the reference. Parts have ``count``."""
    rank, size = comm.rank, comm.world_size
    what = op, dtype, count, shift, chunk
    xs = rank_tensors(count, dtype, size, seed, comm.device)
    wide = [torch.cat([torch.roll(one, r) for r in range(size)]) for one in xs]
    if op is Op.ALL_REDUCE:
        x, wanted = shifted(xs[rank], shift), reference.ordered_sum(xs)
        out = torch.zeros_like(x)
        call(comm, op, x, out, chunk)
        check(out, wanted, what)
        exact(x, shifted(xs[rank], shift), (*what, "x"))
        call(comm, op, x, x, chunk)
        check(x, wanted, (*what, "in place"))
        mean = (reference.ordered_sum([one.float() for one in xs]) / size).to(dtype)
        call(comm, op, shifted(xs[rank], shift), out, chunk, reduction="avg")
        check(out, mean, (*what, "avg"))
    elif op is Op.ALL_GATHER:
        out = shifted(torch.zeros_like(torch.cat(xs)), shift)
        call(comm, op, shifted(xs[rank], shift), out, chunk)
        exact(out, torch.cat(xs), what)
        out.zero_()
        mine = out[rank * count : (rank + 1) * count]
        mine.copy_(xs[rank])
        call(comm, op, mine, out, chunk)
        exact(out, torch.cat(xs), (*what, "in place"))
    elif op is Op.ALL_TO_ALL:
        out = torch.zeros_like(wide[rank])
        call(comm, op, shifted(wide[rank], shift), out, chunk)
        exact(out, torch.cat([torch.roll(one, rank) for one in xs]), what)
    else:
        wanted = reference.ordered_sum([torch.roll(one, rank) for one in xs])
        mine, out = shifted(wide[rank], shift), torch.zeros_like(xs[rank])
        call(comm, op, mine, out, chunk)
        check(out, wanted, what)
        place = mine[rank * count : (rank + 1) * count]
        call(comm, op, mine, place, chunk)
        check(place, wanted, (*what, "in place"))


def cases(
    device: str, counts: list[int], chunks: list[int], dtypes: list[torch.dtype], exclusive: bool = False, seed: int = 0
) -> int:
    """Compare calls of every kind, with random stragglers and other calls between. Return how many were made."""
    done = 0
    with shotcast.Communicator(device=device, max_bytes=ROOM, timeout_s=60, exclusive=exclusive) as comm:
        for op in KINDS:
            assert comm.explain(torch.ones(64, device=comm.device), op.label, sms=0).algorithm == "copy_engines"
        own = random.Random(comm.rank)
        for number, count in enumerate(counts):
            for place, dtype in enumerate(dtypes):
                for op in KINDS:
                    if dtype not in FLOATS.values() and op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
                        continue
                    straggle(comm, own)
                    turn = number + place + done
                    one_case(comm, op, dtype, count, turn % 2, chunks[turn % len(chunks)], seed + number)
                    done += 1
            ones = torch.ones(5, device=comm.device)
            check(comm.all_reduce(ones, algorithm="one_shot"), ones * comm.world_size, "between")
        settle(comm)
    return done


def absent(device: str, victim: int, timeout_s: float, meeting: int, killed: bool) -> dict[str, Any]:
    """Have rank ``victim`` stop, or end, before its meeting of that number. Return what the others saw."""
    from shotcast.transport.triton import copy_engines

    comm = shotcast.Communicator(device=device, max_bytes=ROOM, timeout_s=100)
    x = torch.ones(5000, device=comm.device)
    out = torch.zeros_like(x)
    call(comm, Op.ALL_REDUCE, x, out, 4096)
    settle(comm)
    comm._host.barrier()
    original = copy_engines.CopyEngineCall._meet

    def stall(self: Any, number: int, stream: int) -> None:
        if number == meeting:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            copy_engines.CopyEngineCall._meet = original  # type: ignore[method-assign]
            comm._host.barrier()  # the others have given up
        original(self, number, stream)

    if comm.rank == victim:
        copy_engines.CopyEngineCall._meet = stall  # type: ignore[method-assign]
    else:
        comm.set_timeout(timeout_s)
    started, error = time.monotonic(), None
    try:
        call(comm, Op.ALL_REDUCE, x, out.zero_(), 4096)
        settle(comm)
    except shotcast.ShotcastError as caught:
        error = caught
    took = time.monotonic() - started
    again = failing_call(comm, "two_shot")[0]
    if not killed:
        for _ in range(1 if comm.rank == victim else 2):
            comm._host.barrier()
    comm.close()
    return {"error": error, "took": took, "nan": bool(out.isnan().all()), "again": again}


def in_place_after_a_fault() -> tuple[torch.Tensor, str]:
    """Gather in place where the last rank does not come. Return the tensor, and the error."""
    comm = shotcast.Communicator(device="cpu", max_bytes=ROOM, timeout_s=100)
    x = torch.full((3000 * comm.world_size,), 7.0)
    call(comm, Op.ALL_GATHER, x[:3000].clone(), x, 0)
    comm._host.barrier()
    x.fill_(comm.rank)
    error = ""
    if comm.rank < comm.world_size - 1:
        comm.set_timeout(3)
        try:
            call(comm, Op.ALL_GATHER, x[3000 * comm.rank : 3000 * (comm.rank + 1)], x, 0)
        except shotcast.ShotcastError as caught:
            error = type(caught).__name__
    comm._host.barrier()
    comm.close()
    return x, error


def told_after_the_last_meeting(copies: int) -> tuple[torch.Tensor, Any]:
    """Have rank 1 give up, as this rank hears when it has met all. Return its result, and the error.

    The fault has come to so many copies of the abort word, the last ones; 0 for all, by the host.
    """
    from shotcast import wire
    from shotcast.transport.triton import copy_engines, layout

    comm = shotcast.Communicator(device="cpu", max_bytes=ROOM, timeout_s=100)
    x = torch.ones(5000)
    out = torch.zeros_like(x)
    call(comm, Op.ALL_REDUCE, x, out, 0)
    comm._host.barrier()
    original = copy_engines.CopyEngineCall._meet

    def told(self: Any, number: int, stream: int) -> None:
        original(self, number, stream)
        if number == 2:
            fault = wire.encode_fault(wire.TIMEOUT, Op.ALL_REDUCE, [1], 9)
            if copies:
                workspace = comm._executor.workspaces[-1]
                end = layout.ABORT + layout.COPIES * layout.COPY_WORDS
                workspace._control[layout.ABORT : end : layout.COPY_WORDS][-copies:] = fault
                assert workspace.stopped
            else:
                comm._executor.stop(fault)

    if comm.rank == 0:
        copy_engines.CopyEngineCall._meet = told  # type: ignore[method-assign]
    error = None
    try:
        call(comm, Op.ALL_REDUCE, x, out, 0)
    except shotcast.ShotcastError as caught:
        error = caught
    comm._host.barrier()
    comm.close()
    return out, error


def stopped_by_its_host(op: Op) -> tuple[bool, Any]:
    """Have the host of rank 0 end a second call while rank 1 has yet to take what came in the first.

    Return whether the first had the right result, and its error.
    """
    from shotcast import wire
    from shotcast.transport.triton import copy_engines

    comm = shotcast.Communicator(device="cpu", max_bytes=ROOM, timeout_s=100)
    size, count = comm.world_size, 3000
    numbers = count if op is Op.ALL_GATHER else count * size
    out = torch.zeros(count if op is Op.REDUCE_SCATTER else count * size)
    x = torch.full((numbers,), comm.rank + 1.0)
    call(comm, op, x, out, 0)
    right = out.clone()
    comm._host.barrier()
    original = copy_engines.CopyEngineCall._meet

    def stall(self: Any, number: int, stream: int) -> None:
        original(self, number, stream)
        if number == len(self._phases) - 1:
            comm._host.barrier()  # rank 0 has ended its second call

    if comm.rank == 1:
        copy_engines.CopyEngineCall._meet = stall  # type: ignore[method-assign]
    error = None
    try:
        call(comm, op, x, out.zero_(), 0)
    except shotcast.ShotcastError as caught:
        error = caught
    if comm.rank == 0:
        fault = wire.encode_fault(wire.INTERRUPTED, op, [0], 9)
        threading.Timer(1.0, comm._executor.stop, (fault,)).start()
        with pytest.raises(shotcast.ShotcastError):
            call(comm, op, torch.full_like(x, 1000.0), torch.zeros_like(out), 0)
        comm._host.barrier()
    comm._host.barrier()
    comm.close()
    return torch.equal(out, right), error


def graphs(count: int, chunk: int) -> int:
    """Replay a graph of calls of every kind on changed inputs, with eager calls between. Return the replays."""
    with shotcast.Communicator(device="cuda", max_bytes=ROOM, timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        x = torch.zeros(count * size, dtype=torch.bfloat16, device=comm.device)
        part, summed, gathered, exchanged = x[:count].clone(), *(torch.zeros_like(x) for _ in range(3))

        def calls() -> None:
            call(comm, Op.REDUCE_SCATTER, x, part, chunk)
            call(comm, Op.ALL_GATHER, part, gathered, chunk)
            call(comm, Op.ALL_REDUCE, x, summed, chunk)
            call(comm, Op.ALL_TO_ALL, x, exchanged, chunk)

        calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        for replay in range(20):
            xs = rank_tensors(count * size, torch.bfloat16, size, replay, comm.device)
            x.copy_(xs[rank])
            if replay % 3 == 0:
                calls()
            graph.replay()
            wanted = reference.ordered_sum(xs)
            check(summed, wanted, (replay, "all_reduce"))
            check(gathered, wanted, (replay, "gathered"))
            exact(exchanged, torch.cat([one[rank * count : (rank + 1) * count] for one in xs]), (replay, "exchanged"))
            ones = torch.ones(5, device=comm.device)
            check(comm.all_reduce(ones, algorithm="one_shot"), ones * size, "between")
        return 20
