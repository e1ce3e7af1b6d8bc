"""Ranks that disagree, are late, stopped or killed: which are named, how soon, and that the others can go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from executor_calls import run_call
from local_ranks import DEAD, LocalGroup, run_ranks
from shotcast.collectives.registry import registered
from shotcast.errors import ClosedError
from shotcast.transport.cpu import executor as executor_module
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.executor import CpuExecutor
from shotcast.wire import MISMATCH, TIMEOUT, CallPlan, Header, LaunchShape, Op

pytestmark = [pytest.mark.usefixtures("compiled_before_forking"), pytest.mark.timing]

MAX_BYTES = 1 << 20
FORK = multiprocessing.get_context("fork")
LONG_S, SOON_S = 300.0, 60.0
"""A deadline that a test does not wait for, and the longest that a fault takes to be seen on a busy machine."""
SUM = CallPlan(Op.ALL_REDUCE, "one_shot", "float32", 400)


def works(executor: CpuExecutor, group: LocalGroup) -> None:
    for algorithm in ("one_shot", "two_shot", "ring"):
        x = torch.full((1000,), float(group.rank))
        run_call(executor, CallPlan(Op.ALL_REDUCE, algorithm, "float32", 4000), x, x)
        assert executor.fault() is None
        assert x.tolist() == [sum(range(group.world_size))] * 1000
    other = group.rank ^ 1
    if other < group.world_size:
        sent, received = torch.full((3,), float(group.rank)), torch.empty(3)
        run_call(executor, CallPlan(Op.SEND, "one_shot", "float32", 12, root=other), sent, None)
        run_call(executor, CallPlan(Op.RECV, "one_shot", "float32", 12, root=other), None, received)
        assert received.tolist() == [other] * 3


def reset(executor: CpuExecutor, group: LocalGroup) -> None:
    executor.drain()
    epoch = max(group.all_gather(executor.epoch))
    executor.clear(epoch)
    group.barrier()
    assert executor.fault() is None
    assert executor.epoch == epoch
    assert executor.headers(epoch) == [None] * group.world_size
    works(executor, group)


MISMATCHES = {
    "op": CallPlan(Op.ALL_TO_ALL, "one_shot", "float32", 480),
    "dtype": CallPlan(Op.ALL_REDUCE, "one_shot", "float16", 480),
    "nbytes": CallPlan(Op.ALL_REDUCE, "one_shot", "float32", 240),
    "algorithm": CallPlan(Op.ALL_REDUCE, "ring", "float32", 480),
    "two-shot": CallPlan(Op.ALL_REDUCE, "two_shot", "float32", 480),
    "vendor": CallPlan(Op.ALL_REDUCE, "vendor", "float32", 480),
    "barrier": CallPlan(Op.BARRIER, "one_shot", "uint8", 0),
    "sizes": CallPlan(Op.ALL_GATHER, "ring", "float32", 480, sizes=(60, 20, 20, 20)),
    "root": CallPlan(Op.BROADCAST, "one_shot", "float32", 480, root=1),
}


def run_plan(executor: CpuExecutor, group: LocalGroup, plan: CallPlan) -> torch.Tensor:
    dtype = torch.float16 if plan.dtype == "float16" else torch.float32
    x = torch.ones(plan.nbytes // dtype.itemsize, dtype=dtype)
    if plan.op is Op.ALL_GATHER:
        x = x[: plan.sizes[group.rank] if plan.sizes else x.numel() // group.world_size]
    out = torch.zeros(plan.nbytes // dtype.itemsize, dtype=dtype)
    if plan.op is Op.BARRIER:
        run_call(executor, plan, None, None)
    else:
        run_call(executor, plan, x, out)
    return out


def check_mismatches(group):
    executor = CpuExecutor(group, MAX_BYTES, LONG_S, registered())
    usual = CallPlan(Op.ALL_REDUCE, "one_shot", "float32", 480)
    for turn, (what, plan) in enumerate(MISMATCHES.items()):
        odd = turn % group.world_size
        others = CallPlan(Op.BROADCAST, "one_shot", "float32", 480, root=0) if what == "root" else usual
        if what == "sizes":
            others = CallPlan(Op.ALL_GATHER, "ring", "float32", 480, sizes=(30, 30, 30, 30))
        mine = plan if group.rank == odd else others
        begun = time.monotonic()
        out = run_plan(executor, group, mine)
        fault = executor.fault()
        assert time.monotonic() - begun < SOON_S, what
        assert fault is not None, what
        assert (fault.kind, fault.ranks) == (MISMATCH, (odd,)), (what, fault)
        assert mine.op is Op.BARRIER or out.isnan().all(), what
        group.barrier()
        headers = executor.headers(executor.epoch)
        assert headers == [registered().header(plan if r == odd else others) for r in range(group.world_size)], what
        assert Header.decode(headers[odd]).op == plan.op.label
        reset(executor, group)
    executor.close()


@pytest.mark.full
def test_every_mismatch_is_found_and_the_odd_rank_named():
    run_ranks(4, check_mismatches)


def check_two_disagree(group):
    executor = CpuExecutor(group, MAX_BYTES, LONG_S, registered())
    run_plan(executor, group, MISMATCHES["nbytes" if group.rank else "algorithm"])
    fault = executor.fault()
    assert fault is not None
    assert fault.kind == MISMATCH
    assert len(fault.ranks) == 1
    assert len(set(group.all_gather(fault))) == 1
    group.barrier()
    reset(executor, group)


def test_two_ranks_that_disagree_report_the_same():
    run_ranks(2, check_two_disagree)


def check_late(group, late, algorithm, timeout_s):
    executor = CpuExecutor(group, MAX_BYTES, LONG_S, registered())
    works(executor, group)
    group.barrier()
    if group.rank == late:
        group.barrier()  # the others have given up
    else:
        executor.set_timeout(timeout_s)
    begun = time.monotonic()
    plan = CallPlan(Op.ALL_REDUCE, algorithm, "float32", 400)
    x = torch.ones(100)
    run_call(executor, plan, x, x)
    took = time.monotonic() - begun
    if group.rank != late:
        group.barrier()
    fault = executor.fault()
    assert fault is not None
    assert (fault.kind, fault.ranks, fault.op) == (TIMEOUT, (late,), "all_reduce")
    assert x.isnan().all()
    assert took < SOON_S if group.rank == late else timeout_s * 0.9 < took < timeout_s + SOON_S
    # The fault stays: no call waits again, and none is counted.
    epoch, begun = executor.epoch, time.monotonic()
    for _ in range(100):
        out = torch.ones(100)
        run_call(executor, plan, x, out)
        assert out.isnan().all()
    assert executor.epoch == epoch
    assert time.monotonic() - begun < 50 * timeout_s
    group.barrier()
    executor.set_timeout(LONG_S)
    reset(executor, group)


@pytest.mark.parametrize(
    ("world_size", "late", "algorithm"),
    [(2, 0, "one_shot"), pytest.param(4, 2, "ring", marks=pytest.mark.full), (3, 1, "two_shot"), (5, 4, "vendor")],
)
def test_a_late_rank_is_named_in_time(world_size, late, algorithm):
    run_ranks(world_size, check_late, late, algorithm, 1.0)


def check_all_but_late(group, plan, late):
    """Every operation waits for every rank, even if it needs no data of the late one."""
    executor = CpuExecutor(group, MAX_BYTES, 1.0, registered())
    group.barrier()
    if group.rank != late:
        run_plan(executor, group, plan)
        fault = executor.fault()
        assert fault is not None
        assert (fault.kind, fault.ranks, fault.op) == (TIMEOUT, (late,), plan.op.label)
    group.barrier()
    executor.set_timeout(LONG_S)
    reset(executor, group)


@pytest.mark.parametrize(
    "plan",
    [
        CallPlan(Op.BROADCAST, "one_shot", "float32", 480, root=0),
        CallPlan(Op.ALL_GATHER, "one_shot", "float32", 480, sizes=(60, 60, 0)),
        CallPlan(Op.ALL_GATHER, "ring", "float32", 0),
        CallPlan(Op.ALL_REDUCE, "two_shot", "float32", 4),
        CallPlan(Op.REDUCE_SCATTER, "ring", "float32", 0),
        CallPlan(Op.BARRIER, "one_shot", "uint8", 0),
    ],
    ids=lambda plan: f"{plan.op.label}-{plan.algorithm}",
)
def test_no_operation_ends_before_every_rank_has_started(plan):
    run_ranks(3, check_all_but_late, plan, 2)


def check_signal(group, victim, algorithm, number, timeout_s, given_up):
    """Stop or kill ``victim`` in the middle of a call that takes some seconds."""
    executor = CpuExecutor(group, MAX_BYTES, LONG_S, registered())
    works(executor, group)
    executor.set_timeout(timeout_s)
    # Small chunks, so that the call is not over before the signal.
    plan = CallPlan(Op.ALL_REDUCE, algorithm, "float32", 256 << 20, launch=LaunchShape(chunk_bytes=2048))
    x = torch.ones(64 << 20)
    group.barrier()
    begun = time.monotonic()
    if group.rank == victim:
        process = os.getpid()

        def strike():
            time.sleep(0.1)
            os.kill(process, number)

        if number == signal.SIGSTOP and os.fork() == 0:
            given_up.wait(SOON_S)
            os.kill(process, signal.SIGCONT)
            os._exit(0)
        threading.Thread(target=strike, daemon=True).start()
    run_call(executor, plan, x, x)
    took = time.monotonic() - begun
    given_up.set()
    fault = executor.fault()
    assert fault is not None, took
    assert (fault.kind, fault.ranks) == (TIMEOUT, (victim,))
    if group.rank != victim:
        assert took < timeout_s + SOON_S
    assert x[-1].isnan()
    if number == signal.SIGSTOP:
        group.barrier()
        executor.set_timeout(LONG_S)
        reset(executor, group)
    executor.close()
    return "named"


@pytest.mark.parametrize(
    ("world_size", "victim", "algorithm"),
    [
        (4, 1, "ring"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((3, 2, "two_shot"), (2, 0, "one_shot"))),
    ],
)
def test_a_stopped_rank_is_named_and_comes_back(world_size, victim, algorithm):
    arguments = victim, algorithm, signal.SIGSTOP, 2.0, FORK.Event()
    assert run_ranks(world_size, check_signal, *arguments) == ["named"] * world_size


def test_a_killed_rank_is_named():
    arguments = 1, "ring", signal.SIGKILL, 2.0, FORK.Event()
    assert run_ranks(3, check_signal, *arguments, mortal=True) == ["named", DEAD, "named"]


def check_woken(group):
    """Rank 1 expires first; rank 0, in the middle of a long wait, then ends too."""
    executor = CpuExecutor(group, MAX_BYTES, 1.0 if group.rank == 1 else LONG_S, registered())
    group.barrier()
    if group.rank != 2:
        begun = time.monotonic()
        run_plan(executor, group, SUM)
        assert time.monotonic() - begun < SOON_S
        fault = executor.fault()
        assert fault is not None
        assert (fault.kind, fault.ranks) == (TIMEOUT, (2,))
    group.barrier()
    executor.set_timeout(LONG_S)
    reset(executor, group)


def test_a_fault_ends_the_waits_of_the_others():
    run_ranks(3, check_woken)


def check_closed(group):
    executor = CpuExecutor(group, MAX_BYTES, LONG_S, registered())
    works(executor, group)
    group.barrier()
    executor.close()
    executor.close()
    assert executor.fault() is None
    x = torch.ones(100)
    for call in (lambda: run_call(executor, SUM, x, x), lambda: executor.clear(0), lambda: executor.headers(1)):
        with pytest.raises(ClosedError):
            call()


def test_closed_is_closed():
    run_ranks(2, check_closed)


def check_spins(group, cores):
    executor_module.available_cores = lambda: cores  # in a process of its own
    executor = CpuExecutor(group, MAX_BYTES, LONG_S, registered())
    spins = executor.context[layout.SPINS // 8]
    executor.close()
    return spins


@pytest.mark.parametrize(("cores", "spins"), [(3, 200), (2, 200), (1, 20)])
def test_ranks_that_share_cores_offer_them_at_once(cores, spins):
    assert run_ranks(2, check_spins, cores) == [spins, spins]
