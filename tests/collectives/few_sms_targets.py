"""Functions that the ranks of the tests of few SMs run, in the interpreter and on GPUs."""

from __future__ import annotations

import operator
import os
import random
import re
import signal
import time
from typing import Any

import pytest
import torch
from workers import FLOATS, bits, check, failing_call, inputs, settle, shifted, straggle

import shotcast
from shotcast.collectives import reference
from shotcast.errors import ConfigError
from shotcast.wire import MAX_SMS, LaunchShape, Op

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "uneven", "all_to_all", "broadcast")
OTHERS = (torch.uint8, torch.int16, torch.int64, torch.complex128)
"""Dtypes that are moved and not added up."""


def rank_tensors(count: int, dtype: torch.dtype, world_size: int, seed: int, device: torch.device) -> Any:
    """Return every rank's tensor, the same on all ranks; those that are not floats hold random bytes."""
    if dtype in FLOATS.values():
        return inputs(count, dtype, world_size, seed, device)
    nbytes = count * dtype.itemsize
    generators = [torch.Generator().manual_seed(seed * 1000 + rank) for rank in range(world_size)]
    return [torch.randint(256, (nbytes,), dtype=torch.uint8, generator=g).view(dtype).to(device) for g in generators]


def exact(got: torch.Tensor, wanted: torch.Tensor, what: Any) -> None:
    """Compare copies to the bit, the payloads of NaN included."""
    assert got.shape == wanted.shape, what
    assert torch.equal(bits(got), bits(wanted)), what


def one_case(
    comm: shotcast.Communicator, kind: str, dtype: torch.dtype, count: int, shift: int, sms: int, seed: int
) -> None:
    """Compare a call, and the same in place where that is possible, with the reference."""
    rank, size = comm.rank, comm.world_size
    what = kind, dtype, count, shift, sms
    by: dict[str, Any] = {"sms": sms, "algorithm": "few_sms"}
    xs = rank_tensors(count, dtype, size, seed, comm.device)
    x = shifted(xs[rank], shift)
    if kind == "all_reduce":
        wanted = reference.ordered_sum(xs)
        check(comm.all_reduce(x, **by), wanted, what)
        check(comm.all_reduce(x, out=x, **by), wanted, (*what, "in place"))
    elif kind == "all_gather":
        exact(comm.all_gather(x, **by), torch.cat(xs), what)
        whole = shifted(torch.zeros_like(torch.cat(xs)), shift)
        mine = whole[rank * count : (rank + 1) * count]
        mine.copy_(xs[rank])
        exact(comm.all_gather(mine, out=whole, **by), torch.cat(xs), (*what, "in place"))
    elif kind == "broadcast":
        root = seed % size
        exact(comm.broadcast(x.clone(), root, **by), xs[root], what)
        exact(comm.broadcast(x, root, **by), xs[root], (*what, "at an odd address"))
    elif kind == "uneven":
        lengths = [count * r // max(size - 1, 1) for r in range(size)]
        got = comm.all_gather(shifted(xs[rank][: lengths[rank]], shift), sizes=lengths, **by)
        exact(got, torch.cat([one[:length] for one, length in zip(xs, lengths, strict=True)]), what)
    else:
        wide = [torch.cat([torch.roll(one, r) for r in range(size)]) for one in xs]
        if kind == "all_to_all":
            got = comm.all_to_all(shifted(wide[rank], shift), **by)
            exact(got, torch.cat([torch.roll(one, rank) for one in xs]), what)
        else:
            wanted = reference.ordered_sum([torch.roll(one, rank) for one in xs])
            mine = shifted(wide[rank], shift)
            check(comm.reduce_scatter(mine, **by), wanted, what)
            place = mine[rank * count : (rank + 1) * count]
            check(comm.reduce_scatter(mine, out=place, **by), wanted, (*what, "in place"))


def cases(
    device: str, counts: list[int], budgets: list[int], max_bytes: int, dtypes: list[torch.dtype], seed: int = 0
) -> int:
    """Compare calls of every kind, with random stragglers and other calls between. Return how many were made."""
    done = 0
    with shotcast.Communicator(device=device, max_bytes=max_bytes, timeout_s=60) as comm:
        own = random.Random(comm.rank)
        for number, count in enumerate(counts):
            for place, dtype in enumerate(dtypes):
                for kind in KINDS:
                    if dtype not in FLOATS.values() and kind in ("all_reduce", "reduce_scatter"):
                        continue
                    straggle(comm, own)
                    turn = number + place + done
                    one_case(comm, kind, dtype, count, turn % 2, budgets[turn % len(budgets)], seed + number)
                    done += 1
            ones = torch.ones(5, device=comm.device)
            check(comm.all_reduce(ones, algorithm="one_shot"), ones * comm.world_size, "between")
        ones = torch.ones(64, device=comm.device)
        assert comm.candidates(ones, sms=3) == ["few_sms", "vendor"]
        for op in ("all_to_all", "broadcast"):
            assert comm.candidates(ones, op, sms=3) == ["few_sms", "vendor"]
        assert "few_sms" not in comm.candidates(ones)
        settle(comm)
    return done


def pausing(rng: random.Random) -> None:
    """Let the interpreted kernel pause at random before the parts of its steps, so that ranks get steps apart."""
    from shotcast.transport.triton import few_sms, sync

    def later(part: Any) -> Any:
        def paused(*args: Any) -> Any:
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.01)
            return part(*args)

        return paused

    for owner, name in ((few_sms, "reduce_words"), (sync, "raise_progress"), (sync, "await_progress")):
        setattr(owner, name, later(getattr(owner, name)))


def many_chunks(device: str, count: int, launch: tuple[int, int, int, int], calls: int) -> int:
    """Make calls of many small chunks, which use each place of the window again and again."""
    with shotcast.Communicator(device=device, max_bytes=1 << 16, timeout_s=60) as comm:
        own = random.Random(comm.rank)
        if device == "cpu":
            pausing(own)
        for number in range(calls):
            xs = inputs(count + number % 2, torch.bfloat16, comm.world_size, number, comm.device)
            straggle(comm, own)
            out = torch.zeros_like(xs[0])
            # calls divide the window differently
            shape = LaunchShape(*launch[:3], launch[3] * (1 + number % 2))
            comm._run(Op.ALL_REDUCE, xs[comm.rank], out, algorithm="few_sms", launch=shape, sms=launch[0])
            check(out, reference.ordered_sum(xs), number)
        settle(comm)
    return calls


def across_epochs(device: str) -> int:
    """Make calls on both sides of epochs at which a word of progress changes its sign. Return the last epoch."""
    with shotcast.Communicator(device=device, max_bytes=1 << 16, timeout_s=60) as comm:
        xs = inputs(700, torch.float32, comm.world_size, 5, comm.device)
        executor = comm._executor
        for epoch in ((1 << 32) - 3, 1 << 42, (1 << 43) - 3, 3 << 42, (1 << 44) - 3):  # none jumps half of the numbers
            executor.drain()
            comm._host.barrier()
            executor.set_epoch(epoch)
            executor.drain()
            comm._host.barrier()
            for _ in range(5):
                check(comm.all_reduce(xs[comm.rank], sms=2), reference.ordered_sum(xs), epoch)
        settle(comm)
        return executor.epoch


def arguments() -> None:
    """Give calls of compiled CPU ranks numbers of SMs that are none, and one that they ignore."""
    with shotcast.Communicator(device="cpu") as comm:
        x = torch.arange(4.0)
        for budget in (1, 2):  # equal to numbers that are refused
            comm.all_reduce(x, sms=budget)
        for call in (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.all_to_all, comm.explain):
            for sms in (-1, MAX_SMS + 1, 2.0, "8", True, [8]):
                wrong = re.escape(f"; not {sms!r}")
                with pytest.raises(ConfigError, match=rf"sms is a whole number in 0\.\.{MAX_SMS}, .*{wrong}"):
                    call(x, sms=sms)
        with pytest.raises(ConfigError, match="sms is a whole number"):
            comm.broadcast(x, 0, sms=-1)
        assert torch.equal(comm.broadcast(x.clone(), 0, sms=8), x)
        for sms in (0, 8):
            assert torch.equal(comm.all_reduce(x, sms=sms), 2 * x)
            assert comm.explain(x, sms=sms) == comm.explain(x)
        x.requires_grad_()
        for one, wanted in ((comm.all_reduce(x, sms=3), 2.0), (comm.all_gather(x, sms=3), 2.0)):
            (slope,) = torch.autograd.grad(one.sum(), x)
            assert slope.tolist() == [wanted] * 4


def mismatched(device: str) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    """Give the last rank another number of SMs. Return the kind of the error, who differs and in what."""
    with shotcast.Communicator(device=device, max_bytes=1 << 18, timeout_s=100) as comm:
        x = torch.ones(8192, device=comm.device)
        comm.all_reduce(x, sms=2)
        settle(comm)
        error: Any = None
        try:
            comm.all_reduce(x, sms=1 if comm.rank == comm.world_size - 1 else 2)
            settle(comm)
        except shotcast.ShotcastError as caught:
            error = caught
        comm.reset()
        check(comm.all_reduce(x, sms=2), x * comm.world_size, "after reset")
        settle(comm)
        return type(error).__name__, error.differing, error.fields


def absent(device: str, victim: int, timeout_s: float, killed: bool) -> dict[str, Any]:
    """Have rank ``victim`` make no call, or end. Return what the others saw."""
    comm = shotcast.Communicator(device=device, max_bytes=1 << 18, timeout_s=100)
    x = torch.ones(4096, device=comm.device)
    comm.all_reduce(x, sms=2)
    settle(comm)
    comm._host.barrier()
    if comm.rank == victim:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        comm._host.barrier()
        comm.close()
        return {}
    comm.set_timeout(timeout_s)
    out = torch.zeros_like(x)
    started, error = time.monotonic(), None
    try:
        comm.all_reduce(x, out=out, sms=2)
        settle(comm)
    except shotcast.ShotcastError as caught:
        error = caught
    took = time.monotonic() - started
    again, _, _ = failing_call(comm, "two_shot")
    if not killed:
        comm._host.barrier()
    comm.close()
    return {"error": error, "took": took, "nan": bool(out.isnan().all()), "again": again}


def stops_between_chunks(victim: int, step: int, timeout_s: float, killed: bool) -> Any:
    """Have rank ``victim`` stop, or end, before it says that it has done ``step`` steps. Return this rank's error."""
    from shotcast.transport.triton import sync

    comm = shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=100)
    x = torch.ones(20_000)
    comm.all_reduce(x, sms=1)
    comm._host.barrier()
    original = sync.raise_progress

    def stall(call: Any, quads: Any, steps: Any, *rest: Any) -> None:
        if steps == step and killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if steps == step:
            sync.raise_progress = original
            comm._host.barrier()  # the others have given up
        original(call, quads, steps, *rest)

    if comm.rank == victim:
        sync.raise_progress = stall
    else:
        comm.set_timeout(timeout_s)
    error = None
    try:
        comm.all_reduce(x, sms=1)
    except shotcast.ShotcastError as caught:
        error = caught
    if not killed:
        for _ in range(1 if comm.rank == victim else 2):
            comm._host.barrier()
    comm.close()
    return error


def stops_in_place(victim: int, timeout_s: float) -> tuple[Any, torch.Tensor, list[int]]:
    """Have rank ``victim`` stop before it says that its sums lie in the mapped tensors of all. Return this rank's error
    and result, and the ends of the ranges of the tensor that it read."""
    from shotcast.transport.triton import few_sms, sync

    comm = shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=100)
    x = comm.empty(20_001)
    comm.all_reduce(x.fill_(1.0), out=x, sms=1)
    comm._host.barrier()
    ends: list[int] = []
    load, announce = few_sms.load_words, sync.raise_progress

    def noted(address: Any, start: Any, offs: Any, nbytes: Any, unit: Any) -> Any:
        if operator.index(address) == x.data_ptr() and operator.index(nbytes):
            ends.append(operator.index(start) + operator.index(nbytes))
        return load(address, start, offs, nbytes, unit)

    def stall(call: Any, quads: Any, steps: Any, *rest: Any) -> None:
        if steps == 1:
            sync.raise_progress = announce
            comm._host.barrier()  # the others have given up
        announce(call, quads, steps, *rest)

    few_sms.load_words = noted
    if comm.rank == victim:
        sync.raise_progress = stall
    else:
        comm.set_timeout(timeout_s)
    error = None
    try:
        comm.all_reduce(x.fill_(1.0), out=x, sms=1)
    except shotcast.ShotcastError as caught:
        error = caught
    result = x.clone()
    if comm.rank != victim:
        comm._host.barrier()
    comm._host.barrier()
    comm.close()
    return error, result, ends


def graphs(count: int, sms: int) -> int:
    """Replay a graph of calls of every kind on changed inputs, with eager calls between. Return the replays."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        x = torch.zeros(count * size, dtype=torch.bfloat16, device=comm.device)

        def calls() -> list[torch.Tensor]:
            gathered = comm.all_gather(comm.reduce_scatter(x, sms=sms), sms=sms)
            return [comm.all_reduce(x, sms=sms), gathered, comm.all_to_all(x, sms=2 * sms)]

        calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = calls()
        for number in range(20):
            xs = inputs(count * size, torch.bfloat16, size, number, comm.device)
            x.copy_(xs[rank])
            graph.replay()
            total = reference.ordered_sum(xs)
            check(results[0], total, number)
            check(results[1], total, (number, "in two halves"))
            exact(results[2], torch.cat([one.chunk(size)[rank] for one in xs]), number)
            if number % 3 == 0:
                check(comm.all_reduce(xs[rank], sms=sms), total, "between")
        settle(comm)
    return 20
