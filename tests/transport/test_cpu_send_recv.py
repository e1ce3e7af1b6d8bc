"""Send and recv of any size, between any pair, while others do other things."""

from __future__ import annotations

import random

import pytest
import torch

from executor_calls import run_call
from local_ranks import run_ranks
from shotcast.collectives.registry import registered
from shotcast.transport.cpu.executor import CpuExecutor
from shotcast.wire import MISMATCH, TIMEOUT, CallPlan, Header, Op

pytestmark = pytest.mark.usefixtures("compiled_before_forking")

MAX_BYTES = 1 << 20


def send(executor: CpuExecutor, x: torch.Tensor, peer: int) -> None:
    name = str(x.dtype).removeprefix("torch.")
    run_call(executor, CallPlan(Op.SEND, "one_shot", name, x.numel() * x.element_size(), root=peer), x, None)


def recv(executor: CpuExecutor, count: int, dtype: torch.dtype, peer: int) -> torch.Tensor:
    out = torch.zeros(count, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    run_call(executor, CallPlan(Op.RECV, "one_shot", name, count * dtype.itemsize, root=peer), None, out)
    return out


def message(sender: int, receiver: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) * 7 + sender * 31 + receiver) % 101).to(dtype)


def check_pairs(group):
    """Send between all ordered pairs in one order, each pair with its own sizes, with collectives in between."""
    rank, world_size = group.rank, group.world_size
    executor = CpuExecutor(group, MAX_BYTES, 100.0, registered())
    order = random.Random(3)
    for dtype in (torch.float32, torch.int8, torch.bfloat16, torch.int64):
        for count in (0, 1, 3, 1000, 200_001):
            for sender in range(world_size):
                for receiver in range(world_size):
                    if sender == receiver or order.random() < 0.3:
                        continue
                    x = message(sender, receiver, count, dtype)
                    if rank == sender:
                        send(executor, x, receiver)
                    if rank == receiver:
                        assert torch.equal(recv(executor, count, dtype, sender), x), (sender, receiver, count)
            if order.random() < 0.5:
                x = torch.full((70,), float(rank))
                run_call(executor, CallPlan(Op.ALL_REDUCE, "two_shot", "float32", 280), x, x)
                assert x[0] == sum(range(world_size))
            assert executor.fault() is None
    executor.close()


def test_pairs_sizes_and_dtypes():
    run_ranks(4, check_pairs)


def check_apart(group):
    """Let a pair exchange messages before another begins: nothing waits for the rest, a small send for no receiver."""
    rank = group.rank
    executor = CpuExecutor(group, MAX_BYTES, 100.0, registered())
    peer = rank ^ 1
    if rank >= 2:
        group.barrier()
    for turn in range(300):
        send(executor, message(rank, peer, turn, torch.float32), peer)
        assert torch.equal(recv(executor, turn, torch.float32, peer), message(peer, rank, turn, torch.float32))
    if rank < 2:
        group.barrier()
    assert executor.epoch == 0
    run_call(executor, CallPlan(Op.BARRIER, "one_shot", "uint8", 0), None, None)
    assert executor.fault() is None
    executor.close()


@pytest.mark.timing
def test_pairs_do_not_wait_for_others():
    run_ranks(4, check_apart)


def check_faults(group):
    rank = group.rank
    executor = CpuExecutor(group, MAX_BYTES, 0.5, registered())
    if rank == 1:
        assert recv(executor, 5, torch.float32, 0).isnan().all()
        fault = executor.fault()
        assert fault is not None
        assert (fault.kind, fault.ranks, fault.op) == (TIMEOUT, (0,), "recv")
    group.barrier()
    executor.clear(0)
    group.barrier()

    # A message larger than the mailbox that no rank receives.
    if rank == 2:
        send(executor, torch.ones(1 << 20), 1)
        fault = executor.fault()
        assert fault is not None
        assert (fault.kind, fault.ranks, fault.op) == (TIMEOUT, (1,), "send")
    group.barrier()
    assert executor.fault() is not None
    executor.clear(0)
    group.barrier()

    if rank == 0:
        send(executor, torch.ones(4), 2)
    if rank == 2:
        executor.set_timeout(100)
        assert recv(executor, 5, torch.float32, 0).isnan().all()
        fault = executor.fault()
        assert fault is not None
        assert (fault.kind, fault.ranks, fault.op) == (MISMATCH, (0,), "recv")
        headers = executor.headers(executor.epoch)
        assert [header and Header.decode(header).nbytes for header in headers] == [16, None, 20]
    group.barrier()
    executor.clear(0)
    group.barrier()
    # No part of the old messages is left.
    if rank == 0:
        send(executor, torch.full((3,), 2.0), 2)
    if rank == 2:
        assert recv(executor, 3, torch.float32, 0).tolist() == [2.0] * 3
    assert executor.fault() is None
    executor.close()


@pytest.mark.timing
def test_late_and_different_messages_are_faults():
    run_ranks(3, check_faults)
