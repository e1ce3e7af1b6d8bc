"""Functions that the ranks of the Communicator's tests run, on compiled CPU ranks, the interpreter, and GPUs."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import expected_results
import torch

import shotcast
from shotcast import env
from shotcast.collectives import reference
from shotcast.wire import CallPlan, LaunchShape, Op

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 65504.0, 1e-8, 3.4e38)


def inputs(
    count: int, dtype: torch.dtype, world_size: int, seed: int, device: torch.device | str
) -> list[torch.Tensor]:
    """Return every rank's tensor, the same on all ranks.

    A tenth of the values are zeros, infinities, NaN and subnormals.
    """
    tensors = []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        x = torch.randn(count, generator=generator) * 10 ** torch.randint(-3, 4, (count,), generator=generator)
        where = torch.rand(count, generator=generator) < 0.1
        which = torch.randint(len(SPECIAL), (count,), generator=generator)
        x = torch.where(where, torch.tensor(SPECIAL)[which], x)
        tensors.append(x.to(dtype).to(device))
    return tensors


def tame(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Replace infinities, NaN and the largest numbers, beside which FP8 transport loses the other values of a block."""
    return [torch.where(x.abs() < 1e5, x, torch.full_like(x, 1.5)) for x in xs]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def differing(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Count the elements that differ in any bit, as a 0-d tensor on the device. All NaNs count as equal."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = got.reshape(-1).view(kind) == wanted.reshape(-1).view(kind)
    if got.is_floating_point():
        same |= (got.reshape(-1) != got.reshape(-1)) & (wanted.reshape(-1) != wanted.reshape(-1))
    return (~same).sum()


def check(got: torch.Tensor, wanted: torch.Tensor, what: Any) -> None:
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    wrong = int(differing(got, wanted))
    assert wrong == 0, f"{what}: {wrong} of {got.numel()} elements differ: {got.view(-1)[:4]} {wanted.view(-1)[:4]}"


def shifted(x: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a contiguous copy that begins ``elements`` past the start of an allocation."""
    room = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    room[elements:].copy_(x.reshape(-1))
    return room[elements:].view(x.shape)


def straggle(comm: shotcast.Communicator, rng: random.Random, cycles: int = 200_000, seconds: float = 0.003) -> None:
    if rng.random() < 0.2:
        if comm.device.type == "cuda":
            torch.cuda._sleep(rng.randrange(cycles))
        else:
            time.sleep(rng.random() * seconds)


def matrix(
    device: str, dtypes: list[str], counts: list[int], shift: int = 0, max_bytes: int | None = None, seed: int = 0
) -> int:
    """Compare every operation and algorithm bit by bit over dtypes and counts. Return the number of calls."""
    done = 0
    with shotcast.Communicator(device=device, max_bytes=max_bytes, timeout_s=60) as comm:
        rank, size = comm.rank, comm.world_size
        rng = random.Random(rank)
        for name, count in itertools.product(dtypes, counts):
            dtype = FLOATS[name]
            xs = inputs(count, dtype, size, seed + count, comm.device)
            x = shifted(xs[rank], shift)
            for algorithm in comm.candidates(x):
                if algorithm == "vendor" or (algorithm == "multimem" and comm.device.type == "cuda"):
                    continue  # the vendor and the switch round differently
                straggle(comm, rng)
                wanted = expected_results.all_reduce(xs, algorithm, comm.topology.layout)
                check(comm.all_reduce(x, algorithm=algorithm), wanted, (name, count, algorithm))
                y = shifted(x, shift)
                if algorithm == "two_shot_fp8":
                    y, wanted = shifted(tame(xs)[rank], shift), expected_results.all_reduce(tame(xs), algorithm)
                comm.all_reduce(y, out=y, algorithm=algorithm)
                check(y, wanted, (name, count, algorithm, "in place"))
                done += 2
            wide = [torch.cat([torch.roll(x, r) for r in range(size)]) for x in xs]
            for algorithm in comm.candidates(wide[rank], "reduce_scatter"):
                if algorithm == "vendor":
                    continue
                straggle(comm, rng)
                got = comm.reduce_scatter(shifted(wide[rank], shift), algorithm=algorithm)
                check(
                    got,
                    expected_results.reduce_scatter(wide, rank, algorithm),
                    (name, count, "reduce_scatter", algorithm),
                )
                got = comm.all_gather(x, algorithm=algorithm)
                check(got, torch.cat(xs), (name, count, "all_gather", algorithm))
                done += 2
            done += copies(comm, xs, x, wide, shift)
        comm.check()
    return done


def copies(
    comm: shotcast.Communicator, xs: list[torch.Tensor], x: torch.Tensor, wide: list[torch.Tensor], shift: int
) -> int:
    """Check copies of one size, in their own dtype and as integers. Return the number of calls."""
    rank, size = comm.rank, comm.world_size
    kind = {2: torch.int16, 4: torch.int32}[x.element_size()]
    for view in (lambda t: t, lambda t: t.view(kind)):
        got = comm.all_to_all(shifted(view(wide[rank]), shift))
        check(got, torch.cat([view(w).chunk(size)[rank] if w.numel() else view(w) for w in wide]), "all_to_all")
        root = x.numel() % size
        check(comm.broadcast(shifted(view(x), shift), root), view(xs[root]), ("broadcast", x.numel()))
        lengths = [max(0, x.numel() - 3 * r) for r in range(size)]
        got = comm.all_gather(shifted(view(x)[: lengths[rank]], shift), sizes=lengths)
        check(got, torch.cat([view(p)[:n] for p, n in zip(xs, lengths, strict=True)]), ("uneven", lengths))
        after, before = (rank + 1) % size, (rank - 1) % size
        received = torch.zeros_like(view(x))
        if rank % 2 == 0 and rank != size - 1:
            comm.send(view(x), after)
        elif rank % 2:
            comm.recv(received, before)
            check(received, view(xs[before]), ("recv", x.numel()))
    return 8


def waiting_messages(device: str, rounds: int) -> int:
    """Fill mailboxes while their senders, which have yet to receive as many messages, go on.

    Return the number of messages that arrived at this rank.
    """
    done = 0
    with shotcast.Communicator(device=device, timeout_s=100, max_bytes=1 << 18) as comm:
        rank, size = comm.rank, comm.world_size
        other = rank ^ 1
        for number in range(rounds):
            count = (0, 1, 513, 1024, 2051)[number % 5] + number // 5
            x = torch.arange(count, device=comm.device)
            several = comm.waiting_messages(x) if other < size else 0
            for position in range(several):
                comm.send(x * (rank + 1) + position, other)
            if number % 2:
                ones = torch.ones(5, device=comm.device)
                check(comm.all_reduce(ones), ones * size, "between")
            for position in range(several):
                got = comm.recv(torch.zeros_like(x), other)
                check(got, x * (other + 1) + position, ("message", number, position, count))
            done += several
        settle(comm)
    return done


def changing_sizes(device: str, calls: int, largest: int, seed: int) -> int:
    """Make calls of random size, operation and algorithm with random stragglers. Count differences on the device."""
    with shotcast.Communicator(device=device, timeout_s=60, max_bytes=max(largest * 8, 1 << 16)) as comm:
        rank, size = comm.rank, comm.world_size
        fp8, shared, own = fp8_of(comm), random.Random(seed), random.Random(seed * 100 + rank)
        pools = {name: inputs(largest, dtype, size, seed, comm.device) for name, dtype in FLOATS.items()}
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for _ in range(calls):
            name = shared.choice(list(FLOATS))
            count = int(largest ** shared.random())
            start = shared.randrange(0, largest - count + 1, 8) if count < largest else 0
            xs = [x[start : start + count] for x in pools[name]]
            straggle(comm, own)
            kind = shared.randrange(6)
            if kind < 4:
                algorithm = shared.choice([*("one_shot", "two_shot", "ring", "two_shot"), *fp8])
                xs = tame(xs) if algorithm in fp8 else xs
                got, wanted = comm.all_reduce(xs[rank], algorithm=algorithm), expected_results.all_reduce(xs, algorithm)
            elif kind == 4:
                got, wanted = comm.all_gather(xs[rank]), torch.cat(xs)
            else:
                root = shared.randrange(size)
                got, wanted = comm.broadcast(xs[rank].clone(), root), xs[root]
            wrong += differing(got, wanted)
        assert int(wrong) == 0, f"{int(wrong)} elements differ"
        comm.check()
        return calls


def across_epochs(device: str) -> list[int]:
    """Make calls on both sides of epochs 2^16, 2^31 and 2^32. Return the last epoch of each."""
    ends = []
    with shotcast.Communicator(device=device, timeout_s=60, max_bytes=1 << 16) as comm:
        xs = inputs(1000, torch.float32, comm.world_size, 5, comm.device)
        whole = torch.cat(xs)
        for border in (1 << 16, 1 << 31, 1 << 32):
            executor = comm._executor
            executor.drain()
            comm._host.barrier()
            executor.set_epoch(border - 4)
            executor.drain()
            comm._host.barrier()
            for _ in range(3):
                for algorithm in ("one_shot", "two_shot", "ring"):
                    got = comm.all_reduce(xs[comm.rank], algorithm=algorithm)
                    check(got, expected_results.all_reduce(xs, algorithm), (border, algorithm))
                got = comm.all_gather(xs[comm.rank].view(torch.int32))
                check(got, whole.view(torch.int32), (border, "cells"))
            comm.check()
            ends.append(executor.epoch)
    return ends


def fp8_of(comm: shotcast.Communicator) -> list[str]:
    """Return the name of the transport in FP8 if the ranks have it, as all but compiled CPU ranks have."""
    return [] if comm.topology.transport.name == "compiled" else ["two_shot_fp8"]


def launches(comm: shotcast.Communicator) -> list[LaunchShape]:
    """Return launch shapes that no operation uses by default."""
    if comm.topology.transport.name == "compiled":
        return [LaunchShape(chunk_bytes=size) for size in (64, 704, 8192)]
    return [LaunchShape(1, 1024), LaunchShape(3, 64), LaunchShape(7, 256, 2 if comm.device.type == "cuda" else 1)]


def launched(comm: shotcast.Communicator, x: torch.Tensor, algorithm: str, launch: LaunchShape) -> torch.Tensor:
    """Run an all_reduce with the given launch shape, bypassing the choice of algorithm."""
    nbytes = x.numel() * x.element_size()
    plan = CallPlan(Op.ALL_REDUCE, algorithm, str(x.dtype).removeprefix("torch."), nbytes, launch=launch)
    call = comm._executor.bind(plan)
    call.load()
    comm._host.barrier()
    out = torch.full_like(x, 7.0)
    call.run(x, out)
    return out


def numerics(device: str, dtypes: Sequence[str] = tuple(FLOATS)) -> list[bytes]:
    """Check the bits of one sum by each algorithm, three times, and with other launch shapes.

    Return the sums as bytes.
    """
    results = []
    with shotcast.Communicator(device=device, timeout_s=60, max_bytes=1 << 18) as comm:
        for dtype in map(FLOATS.__getitem__, dtypes):
            xs = inputs(3001, dtype, comm.world_size, 11, comm.device)
            wanted = reference.ordered_sum(xs)
            # One addition commutes, so between two ranks the ring must give the same bits.
            for algorithm in ("one_shot", "two_shot", *(["ring"] if comm.world_size == 2 else [])) * 3:
                got = comm.all_reduce(xs[comm.rank], algorithm=algorithm)
                check(got, wanted, (dtype, algorithm))
            for algorithm, launch in itertools.product(("one_shot", "two_shot"), launches(comm)):
                got = launched(comm, xs[comm.rank], algorithm, launch)
                check(got, wanted, (dtype, algorithm, launch))
            numbers = tame(xs)
            for algorithm, launch in itertools.product(fp8_of(comm), launches(comm)):
                got = launched(comm, numbers[comm.rank], algorithm, launch)
                check(got, expected_results.all_reduce(numbers, algorithm), (dtype, algorithm, launch))
            # A piece of a message has the same bits as in the whole: the batch size does not change the answer.
            check(comm.all_reduce(shifted(xs[comm.rank][:77], 1)), wanted[:77], (dtype, "piece"))
            results.append(bytes(torch.nan_to_num(got.float()).cpu().numpy()))
    return results


# -- faults -----------------------------------------------------------------------------------------------------------


def settle(comm: shotcast.Communicator) -> None:
    """Wait for the calls that were enqueued, and raise their errors."""
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    comm.check()


def await_call(comm: shotcast.Communicator, rank: int, epoch: int | None = None) -> None:
    """Wait until a rank is in a call of all ranks, the next of this rank or ``epoch``, which is compiled already."""
    assert comm._executor is not None
    epoch = comm._executor.epoch + 1 if epoch is None else epoch
    while comm._executor.headers(epoch)[rank] is None:
        time.sleep(0.01)


def failing_call(
    comm: shotcast.Communicator, algorithm: str, count: int = 4096
) -> tuple[BaseException | None, float, bool]:
    """Make one all_reduce that is expected to fail. Return its error, its seconds, and whether the output was NaN."""
    x = torch.ones(count, device=comm.device)
    out = torch.zeros_like(x)
    started = time.monotonic()
    error: BaseException | None = None
    try:
        comm.all_reduce(x, out=out, algorithm=algorithm)
        settle(comm)
    except shotcast.ShotcastError as caught:
        error = caught
    took = time.monotonic() - started
    return error, took, bool(torch.isnan(out).all())


def warm(comm: shotcast.Communicator, algorithm: str, count: int = 4096) -> None:
    for _ in range(2):
        comm.all_reduce(torch.ones(count, device=comm.device), algorithm=algorithm)
    settle(comm)


def killed(device: str, algorithm: str, victim: int, signum: int, timeout_s: float) -> dict[str, Any]:
    """Send signal ``signum`` to rank ``victim`` while the others make a call. Return what each survivor saw."""
    comm = shotcast.Communicator(device=device, timeout_s=100, max_bytes=1 << 18)
    warm(comm, algorithm)
    comm.set_timeout(timeout_s)
    processes = comm._host.all_gather(os.getpid())
    if comm.rank == victim:
        os.kill(os.getpid(), signum)
        time.sleep(600)
    time.sleep(0.2)
    error, took, nan = failing_call(comm, algorithm)
    started = time.monotonic()
    again, _, _ = failing_call(comm, algorithm)
    again_s = time.monotonic() - started
    comm.close()
    if signum == signal.SIGSTOP:  # otherwise the test would wait for the stopped process
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[victim], signal.SIGKILL)
    return {
        "error": error,
        "took": took,
        "nan": nan,
        "again": again,
        "again_s": again_s,
        "left": [name for name in os.listdir(env.shm_dir()) if name.startswith("shotcast")],
    }


def late_then_reset(device: str, algorithm: str, late: int, timeout_s: float) -> dict[str, Any]:
    """Bring rank ``late`` after the deadline of the others, reset all, and check that results are right again."""
    with shotcast.Communicator(device=device, timeout_s=100, max_bytes=1 << 18) as comm:
        warm(comm, algorithm)
        comm._host.barrier()
        if comm.rank == late:
            comm._host.barrier()  # the others have given up
            error, took, nan = failing_call(comm, algorithm)
        else:
            comm.set_timeout(timeout_s)
            error, took, nan = failing_call(comm, algorithm)
            comm.set_timeout(100)
            comm._host.barrier()
        comm.reset()
        comm.check()
        xs = inputs(1000, torch.bfloat16, comm.world_size, 3, comm.device)
        for _ in range(7):
            for name in ("one_shot", "two_shot", "ring"):
                check(
                    comm.all_reduce(xs[comm.rank], algorithm=name), expected_results.all_reduce(xs, name), "after reset"
                )
        check(comm.all_gather(xs[comm.rank].view(torch.int16)), torch.cat(xs).view(torch.int16), "after reset")
        settle(comm)
        return {"error": error, "took": took, "nan": nan}


def mismatched(device: str, what: str, odd: int, timeout_s: float) -> dict[str, Any]:
    """Have rank ``odd`` make a different call. Return the error, and the seconds until it was raised."""
    with shotcast.Communicator(device=device, timeout_s=timeout_s, max_bytes=1 << 18) as comm:
        warm(comm, "one_shot")
        warm(comm, "two_shot")
        x = torch.ones(512, device=comm.device)

        def call(is_odd: bool) -> None:
            if what == "op":
                comm.broadcast(x, 0) if is_odd else comm.all_reduce(x, algorithm="one_shot")
            elif what == "nbytes":
                comm.all_reduce(torch.ones(520 if is_odd else 512, device=comm.device), algorithm="one_shot")
            elif what == "dtype":
                comm.all_reduce(x.bfloat16().repeat(2) if is_odd else x, algorithm="one_shot")
            elif what == "algorithm":
                comm.all_reduce(x, algorithm="two_shot" if is_odd else "one_shot")
            elif what == "launch":
                launch = LaunchShape(2, 128, 1, 512) if is_odd else LaunchShape(3, 128, 1, 1024)
                comm._run(Op.ALL_REDUCE, x, torch.empty_like(x), algorithm="two_shot", launch=launch)
            elif what == "nbytes of two calls":  # pieces of the longer call have the size of the shorter ones
                both = torch.ones(comm.max_bytes // 2, device=comm.device)
                for part in both.chunk(2 if is_odd else 1):
                    comm.all_reduce(part, algorithm="two_shot")
            else:
                comm.broadcast(x, 1 if is_odd else 0)

        call(True)  # by all ranks, so that nothing is compiled later
        call(False)
        settle(comm)
        started = time.monotonic()
        error: BaseException | None = None
        try:
            call(comm.rank == odd)
            settle(comm)
        except shotcast.ShotcastError as caught:
            error = caught
        took = time.monotonic() - started
        comm.reset()
        got = comm.all_reduce(torch.full([10], float(comm.rank), device=comm.device))
        settle(comm)
        total = comm.world_size * (comm.world_size - 1) / 2
        assert got.tolist() == [total] * 10
        return {"error": error, "took": took}


SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
