"""Functions that the ranks of tests/collectives/test_interpreter.py run, besides those of workers.py."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import expected_results
import torch
import triton.language as tl
from workers import changing_sizes, check, failing_call, inputs, settle, shifted, straggle, warm

import shotcast
from executor_calls import clear_after_read_from, run_call
from shotcast import wire
from shotcast.collectives import reference
from shotcast.collectives.norm_operands import norm_operands
from shotcast.wire import Op, Wait


class Case(NamedTuple):
    """One call.

    ``count`` is the number of elements in a rank's share. Its tensors begin ``shift`` elements past an aligned address.
    """

    operation: str
    dtype: str
    world_size: int
    count: int
    shift: int


def in_turn(fn: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """Call ``fn`` with each set of arguments, on one set of ranks: new ranks take seconds to read the kernels."""
    return [fn(*args) for args in calls]


def run_cases(cases: list[Case]) -> int:
    """Run one case after the other, with random stragglers. Return the number of cases."""
    with shotcast.Communicator(device="cpu", max_bytes=1 << 18, timeout_s=60) as comm:
        rng = random.Random(comm.rank)
        for number, case in enumerate(cases):
            straggle(comm, rng)
            run_case(comm, case, seed=number)
        comm.check()
    return len(cases)


def with_late_programs(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn(*args)`` with random pauses before the programs of a kernel, so also between a call's header and data.

    The interpreter runs a grid's programs one after the other, headers first. Without the pauses, all ranks push at
    once.
    """
    from shotcast.transport.triton import sync

    rng = random.Random(int(os.environ["RANK"]))

    def pause(pdl: Any) -> None:
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.02)

    sync.await_prior_kernel = pause  # every program calls this first, and in the interpreter it does nothing
    return fn(*args)


def silent_after_its_header(operation: str, victim: int, timeout_s: float) -> dict[str, Any]:
    """Have rank ``victim`` exchange headers and send no data. Only the place of the missing data tells who it is."""
    from shotcast.transport.triton import sync

    with shotcast.Communicator(device="cpu", timeout_s=100, max_bytes=1 << 18, exclusive=True) as comm:
        x, out = torch.ones(4096), torch.zeros(comm.world_size * 4096)
        programs = 0

        def stall(pdl: Any) -> None:
            nonlocal programs
            programs += 1
            if programs == 2:  # the first program exchanges the headers
                comm._host.barrier()  # the others have given up

        def call() -> None:
            if operation == "all_gather":
                comm.all_gather(x, out=out)
            else:
                comm.broadcast(x, root=victim)
            settle(comm)

        call()
        comm._host.barrier()
        if comm.rank == victim:
            sync.await_prior_kernel = stall
        else:
            comm.set_timeout(timeout_s)
        error = None
        try:
            call()
        except shotcast.ShotcastError as caught:
            error = caught
        for _ in range(1 if comm.rank == victim else 2):
            comm._host.barrier()
        return {"error": error}


def long_messages(count: int) -> int:
    """Send messages of many chunks a lane, both ways. Return the number of messages that arrived at this rank."""
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        for number, dtype in enumerate((torch.bfloat16, torch.uint8)):
            xs = rank_tensors(count, dtype, 2, number)
            check(*message(comm, xs, number, ""), (dtype, count))
        comm.check()
    return 2


def calls_clearing_slots(calls: int, largest: int) -> int:
    """Mix calls that clear their own slots, those of 256 bytes a slot and more, with calls that do not."""
    from shotcast.transport.triton import layout

    layout.CLEAR_AFTER_READ_BYTES = 256
    return changing_sizes("cpu", calls, largest, 5)


def words_left_in_slots(operation: str, count: int) -> list[int]:
    """Count the words other than the sentinel in all slots of this rank after one call.

    The first count is for a call that clears its slots itself, the second for one that leaves it to the next call.
    """
    left = []
    for many in (0, 1 << 30):
        with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
            clear_after_read_from(comm, many)
            run_case(comm, Case(operation, "float32", comm.world_size, count, 0), 1)
            comm._host.barrier()
            where = comm._executor.workspaces[0].where
            words = comm._executor.workspaces[0].memory.view(comm.rank, 0, (where.nbytes // 4,), torch.int32)
            left.append(int((words[where.slots_at * 4 : where.staging_at * 4] != -1).sum()))
    return left


def messages_in_pieces(max_bytes: int) -> int:
    """Reduce messages of 0.75 to 2.25 times the workspace, in place and not, with other calls between.

    Return their number.
    """
    done = 0
    with shotcast.Communicator(device="cpu", max_bytes=max_bytes, timeout_s=60) as comm:
        for dtype in (torch.float32, torch.bfloat16):
            for quarters in (3, 4, 5, 9):
                count = quarters * max_bytes // (4 * dtype.itemsize) + quarters % 3
                xs = rank_tensors(count, dtype, comm.world_size, quarters)
                for run in (all_reduce, in_place):
                    check(*run(comm, xs, quarters % 2, "two_shot"), (dtype, quarters, run.__name__))
                    check(*all_reduce(comm, [x[:9] for x in xs], 0, "one_shot"), "between")
                    done += 1
        chosen = comm.explain(torch.empty(5 * max_bytes))
        assert chosen.algorithm == "two_shot", chosen
        comm.check()
    return done


def run_case(comm: shotcast.Communicator, case: Case, seed: int) -> None:
    xs = rank_tensors(case.count, getattr(torch, case.dtype), comm.world_size, seed)
    kind, _, algorithm = case.operation.partition("/")
    got, wanted = OPERATIONS[kind](comm, xs, case.shift, algorithm or "one_shot")
    check(got, wanted, case)


def rank_tensors(count: int, dtype: torch.dtype, world_size: int, seed: int) -> list[torch.Tensor]:
    """Return every rank's tensor, the same on all ranks. In integer tensors, the first quarter is sentinel words."""
    if dtype.is_floating_point:
        return inputs(count, dtype, world_size, seed, "cpu")
    tensors = []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        x = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        x[: len(x) // 4] = 0xFF
        tensors.append(x.view(dtype))
    return tensors


Outcome = tuple[torch.Tensor, torch.Tensor]


def all_reduce(comm: shotcast.Communicator, xs: list[torch.Tensor], shift: int, algorithm: str) -> Outcome:
    return comm.all_reduce(shifted(xs[comm.rank], shift), algorithm=algorithm), expected_results.all_reduce(
        xs, algorithm
    )


def in_place(comm: shotcast.Communicator, xs: list[torch.Tensor], shift: int, algorithm: str) -> Outcome:
    x = shifted(xs[comm.rank], shift)
    return comm.all_reduce(x, out=x, algorithm=algorithm), expected_results.all_reduce(xs, algorithm)


def reduce_scatter(comm: shotcast.Communicator, xs: list[torch.Tensor], shift: int, algorithm: str) -> Outcome:
    wide = [torch.cat([torch.roll(x, r) for r in range(comm.world_size)]) for x in xs]
    got = comm.reduce_scatter(shifted(wide[comm.rank], shift), algorithm=algorithm)
    return got, expected_results.reduce_scatter(wide, comm.rank, algorithm)


def all_gather(comm: shotcast.Communicator, xs: list[torch.Tensor], shift: int, algorithm: str) -> Outcome:
    return comm.all_gather(shifted(xs[comm.rank], shift), algorithm=algorithm), torch.cat(xs)


def uneven(comm: shotcast.Communicator, xs: list[torch.Tensor], shift: int, algorithm: str) -> Outcome:
    """Gather r / (N - 1) of the share of each rank r: rank 0 gives nothing, the last rank gives all."""
    sizes = [x.numel() * r // max(comm.world_size - 1, 1) for r, x in enumerate(xs)]
    got = comm.all_gather(shifted(xs[comm.rank][: sizes[comm.rank]], shift), sizes=sizes)
    return got, torch.cat([x[:size] for x, size in zip(xs, sizes, strict=True)])


def all_to_all(comm: shotcast.Communicator, xs: list[torch.Tensor], shift: int, algorithm: str) -> Outcome:
    wide = [torch.cat([torch.roll(x, r) for r in range(comm.world_size)]) for x in xs]
    got = comm.all_to_all(shifted(wide[comm.rank], shift))
    return got, torch.cat([torch.roll(x, comm.rank) for x in xs])


def broadcast(comm: shotcast.Communicator, xs: list[torch.Tensor], shift: int, algorithm: str) -> Outcome:
    root = xs[0].numel() % comm.world_size
    return comm.broadcast(shifted(xs[comm.rank], shift), root), xs[root]


def message(comm: shotcast.Communicator, xs: list[torch.Tensor], shift: int, algorithm: str) -> Outcome:
    """Send from rank 0 to the last rank, and from the last rank back."""
    last = comm.world_size - 1
    received = shifted(torch.zeros_like(xs[0]), shift)
    if comm.rank == 0:
        comm.send(shifted(xs[0], shift), last)
        comm.recv(received, last)
    elif comm.rank == last:
        comm.recv(received, 0)
        comm.send(shifted(xs[last], shift), 0)
    else:
        return received, torch.zeros_like(xs[0])
    return received, xs[last - comm.rank]


OPERATIONS: dict[str, Callable[[shotcast.Communicator, list[torch.Tensor], int, str], Outcome]] = {
    "all_reduce": all_reduce,
    "in_place": in_place,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "uneven": uneven,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "message": message,
}


def sentinels(count: int) -> int:
    """Check that tensors of sentinel words pass every operation as NaN. Return the number of calls."""
    done = 0
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=100) as comm:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.full([count * 4], 0xFF, dtype=torch.uint8).view(dtype)
            assert x.isnan().all()
            results = [comm.all_reduce(x, algorithm=name) for name in ("one_shot", "two_shot", "ring")]
            results += [comm.all_gather(x, algorithm=name) for name in ("one_shot", "ring")]
            wide = x.repeat(comm.world_size)
            results += [comm.reduce_scatter(wide, algorithm=name) for name in ("one_shot", "ring")]
            results += [comm.all_to_all(wide), comm.broadcast(x.clone(), 0)]
            for number, result in enumerate(results):
                assert result.isnan().all(), (dtype, number)
            assert torch.equal(comm.all_gather(x.view(torch.uint8)), torch.full([4 * count * comm.world_size], 0xFF))
            done += len(results) + 1
        comm.check()
    return done


def rms_norms() -> None:
    """Check all-reduce, residual and RMSNorm by the interpreted kernel."""
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for hidden in (64, 1000):
                xs = [torch.randn(3, hidden, generator=torch.Generator().manual_seed(r)) for r in range(9)]
                residual, weight = xs.pop().to(dtype), torch.linspace(0.5, 2, hidden).to(dtype)
                total = reference.ordered_sum([x.to(dtype) for x in xs[: comm.world_size]])
                normed, new = comm.all_reduce_rms_norm(xs[comm.rank].to(dtype), residual, weight, 1e-5)
                wanted = total.float() + residual.float()
                check(new, wanted.to(dtype), (dtype, hidden, "residual"))
                exact = torch.nn.functional.rms_norm(new.double(), [hidden], weight.double(), 1e-5)
                step = torch.finfo(dtype).eps
                assert torch.allclose(normed.double(), exact, rtol=2 * step, atol=step), (dtype, hidden)


def several_tiles_a_program() -> int:
    """Check that programs with several tiles give the bits of those with one. Return the number of launches."""
    done = 0
    with shotcast.Communicator(device="cpu", max_bytes=1 << 16, timeout_s=60) as comm:
        for op, kind in ((Op.ALL_REDUCE_RMS_NORM, wire.RMS), (Op.ALL_REDUCE_LAYER_NORM, wire.LAYER)):
            for rows, dtype in ((1, torch.float32), (5, torch.bfloat16), (9, torch.bfloat16)):
                seeds = [torch.Generator().manual_seed(seed) for seed in (comm.rank, 9)]
                x, residual = (torch.randn(rows, 72, generator=seed).to(dtype) for seed in seeds)
                weight = torch.linspace(0.5, 2, 72).to(dtype)
                name = op.label
                usual = comm.explain(x, name, "one_shot").launch
                wanted = getattr(comm, name)(x, residual, weight, eps=1e-5, algorithm="one_shot")
                for each in (2, 4, 8):
                    norm, tensors = norm_operands(name, x.device, x, residual, weight, 1e-5, None, kind)
                    launch = dataclasses.replace(usual, chunk_bytes=4 * usual.block_words * each)
                    comm._run(op, x, None, algorithm="one_shot", norm=norm, tensors=tensors, launch=launch)
                    check(tensors.normed, wanted[0], (name, rows, each, "normed"))
                    check(tensors.new_residual, wanted[1], (name, rows, each, "new residual"))
                    done += 1
        comm.check()
    return done


def replayed(algorithm: str, timeout_s: float) -> tuple[BaseException | None, list[bool], float]:
    """Make the last rank miss a call.

    The others then run calls as a graph replays them, without the host's fault check.

    Return the error of the missed call, whether each later output was NaN, and the seconds that they took together.
    """
    comm = shotcast.Communicator(device="cpu", timeout_s=100, max_bytes=1 << 18)
    warm(comm, algorithm)
    warm(comm, algorithm)  # write words into all generations
    comm._host.barrier()
    comm.set_timeout(timeout_s)
    error, nans, took = None, [], 0.0
    if comm.rank != comm.world_size - 1:
        error, _, _ = failing_call(comm, algorithm)
        plan = next(reversed(comm._calls.values())).plan
        started = time.monotonic()
        for _ in range(5):
            x = torch.ones(4096)
            out = torch.zeros_like(x)
            run_call(comm._executor, plan, x, out)
            nans.append(bool(out.isnan().all()))
        took = time.monotonic() - started
    comm._host.barrier()
    comm.close()
    return error, nans, took


def programs_that_do_not_count(timeout_s: float) -> tuple[BaseException | None, float]:
    """Let program 0 wait for the other programs, none of which runs before it ends. Return the error, and the time."""
    from shotcast.transport.triton import sync

    with (
        mock.patch.object(sync, "SERIAL", tl.constexpr(False)),
        shotcast.Communicator(device="cpu", timeout_s=timeout_s, max_bytes=1 << 18, exclusive=True) as comm,
    ):
        error, took, _ = failing_call(comm, "one_shot")
        return error, took


def told_of_a_long_wait(late: int, notice_s: float) -> tuple[list[str], Wait | None]:
    """Bring rank ``late`` some seconds after the others; return what is logged meanwhile, and the wait that is left."""
    from shotcast.collectives import call_watch
    from shotcast.memory import members
    from shotcast.transport.triton import sync

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shotcast").addHandler(handler)
    members._AT_S, call_watch.WAITS.period_s = (notice_s, 1e9), 0.05
    sync.WAIT_NOTICE_NS = tl.constexpr(int(notice_s * 1e9))
    with shotcast.Communicator(device="cpu", timeout_s=60, max_bytes=1 << 18) as comm:
        warm(comm, "two_shot")
        comm._host.barrier()
        if comm.rank == late:
            time.sleep(notice_s + 3)
        warm(comm, "two_shot")
        comm.check()
        assert comm._waits is not None
        comm._waits.close()  # one thread at a time asks
        time.sleep(0.2)
        comm._executor.wait()
        return lines, comm._executor.wait()
