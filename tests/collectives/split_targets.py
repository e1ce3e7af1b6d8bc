"""Functions that the ranks of tests/collectives/test_split.py run."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

import shotcast
from shotcast import Communicator
from shotcast.launcher.process_watch import WATCH


def every_operation(comm: Communicator, job_ranks: list[int], mine: int, algorithm: str) -> None:
    """Check all calls on ``comm``, whose ranks are the job's ranks in the order ``job_ranks``."""
    assert comm.world_size == len(job_ranks)
    assert job_ranks[comm.rank] == mine
    size, rank = comm.world_size, comm.rank
    x = torch.full([3], float(mine))
    what = (algorithm, job_ranks)
    assert comm.all_reduce(x, algorithm=algorithm).tolist() == [float(sum(job_ranks))] * 3, what
    assert comm.all_gather(x[:1], algorithm=algorithm).tolist() == job_ranks, what
    lengths = [r % 2 + 1 for r in range(size)]
    wanted = [float(job) for job, n in zip(job_ranks, lengths, strict=True) for _ in range(n)]
    plain = "vendor" if algorithm == "vendor" else "auto"
    assert comm.all_gather(x[: lengths[rank]], sizes=lengths, algorithm=plain).tolist() == wanted, what
    wide = torch.arange(size, dtype=torch.float32) + 10 * mine
    total = [sum(10.0 * job for job in job_ranks) + size * r for r in range(size)]
    assert comm.reduce_scatter(wide, algorithm=algorithm).tolist() == [total[rank]], what
    assert comm.all_to_all(wide, algorithm=plain).tolist() == [10.0 * job + rank for job in job_ranks], what
    for root in range(size):
        assert comm.broadcast(x.clone(), root, algorithm=plain).tolist() == [float(job_ranks[root])] * 3, what
    # The vendor library sums integers, whatever algorithm the other calls name.
    assert comm.all_reduce(torch.tensor([mine])).tolist() == [sum(job_ranks)], what
    assert comm.reduce_scatter(wide.long()).tolist() == [int(total[rank])], what
    if size > 1:
        if rank == 0:
            comm.send(x, size - 1)
        elif rank == size - 1:
            assert comm.recv(torch.zeros(3), 0).tolist() == [float(job_ranks[0])] * 3, what
    comm.barrier()


def colors_and_keys() -> None:
    """Check colors, keys, and the order of ranks within a group."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        me, size = comm.rank, comm.world_size
        evens, odds = list(range(0, size, 2)), list(range(1, size, 2))
        shuffled = random.Random(3).sample(range(size), size)
        cases = [
            (me % 2, me, evens if me % 2 == 0 else odds),
            (me % 2, -me, (evens if me % 2 == 0 else odds)[::-1]),
            (7, 0, list(range(size))),
            (7, -me, list(range(size))[::-1]),
            ("by name", shuffled.index(me), shuffled),
            (me, 0, [me]),
        ]
        for color, key, wanted in cases:
            with comm.split(color, key) as sub:
                for algorithm in ("one_shot", "ring", "vendor"):
                    every_operation(sub, wanted, me, algorithm)
                sub.check()
        # Split a child again: an order within an order.
        with comm.split(0, -me) as reversed_, reversed_.split(reversed_.rank % 2, -reversed_.rank) as part:
            order = list(range(size))[::-1]
            every_operation(part, order[reversed_.rank % 2 :: 2][::-1], me, "one_shot")
            every_operation(part, order[reversed_.rank % 2 :: 2][::-1], me, "vendor")
        every_operation(comm, list(range(size)), me, "ring")


def last_rank_left_out() -> None:
    """Leave out the last rank, and check that the others go on without it."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        last = comm.world_size - 1
        sub = comm.split(None if comm.rank == last else 0)
        if comm.rank == last:
            assert sub is None
            time.sleep(0.2)
        else:
            every_operation(sub, list(range(last)), comm.rank, "one_shot")
            sub.close()
        assert comm.all_reduce(torch.ones(2)).tolist() == [last + 1.0] * 2


def communicators_in_turn(calls: int) -> None:
    """Use the rows and columns of a grid, the whole, and a copy of it, in a random order that all ranks share."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        me, size = comm.rank, comm.world_size
        width = 2
        row = comm.split(me // width, me)
        column = comm.split(me % width, me)
        copy = comm.split(0, me)
        members = {
            comm: list(range(size)),
            copy: list(range(size)),
            row: [r for r in range(size) if r // width == me // width],
            column: [r for r in range(size) if r % width == me % width],
        }
        shared, own = random.Random(5), random.Random(me)
        for _ in range(calls):
            chosen = shared.choice(list(members))
            count = shared.choice([1, 77, 5000])
            algorithm = shared.choice(["one_shot", "two_shot", "ring"])
            if own.random() < 0.1:
                time.sleep(own.random() * 0.003)
            got = chosen.all_reduce(torch.full([count], float(me)), algorithm=algorithm)
            assert got.tolist() == [float(sum(members[chosen]))] * count
        for child in (row, column, copy):
            child.check()
            child.close()
        comm.check()


def own_workspace_size(small: int, large: int) -> None:
    """Split off a part with its own workspace size. A part of that part has the same size by default."""
    with shotcast.Communicator(device="cpu", max_bytes=small, timeout_s=100) as comm:
        with comm.split(comm.rank % 2, max_bytes=large) as part, part.split(0) as like_it:
            assert [one.max_bytes for one in (comm, part, like_it)] == [small, large, large]
            least, taken, same = (one._executor.held_bytes for one in (comm, part, like_it))
            assert 0 < least < taken == same
            for one in (comm, part, like_it):
                assert one.all_reduce(torch.ones(small)).tolist() == [one.world_size] * small
        with pytest.raises(shotcast.ConfigError, match="max_bytes is a whole number"):
            comm.split(0, max_bytes=0)
        first = comm.rank // 2 * 2
        told = f"do not agree on max_bytes: rank {first}: {small}, rank {first + 1}: {large}"
        with pytest.raises(shotcast.ConfigError, match=told):
            comm.split(comm.rank // 2, max_bytes=large if comm.rank % 2 else None)


def after_different_splits(groups: int) -> None:
    """Split after the ranks have created different numbers of process groups, by this library or without it."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        for _ in range(groups):
            part = comm.split(0 if comm.rank < 2 else None)
            if part is not None:
                assert part.all_reduce(torch.ones(1)).tolist() == [2.0]
        if comm.rank == 0:
            dist.new_group([0], use_local_synchronization=True)
        with comm.split(0) as whole, whole.split(comm.rank % 2) as half:
            assert whole.all_reduce(torch.ones(1)).tolist() == [comm.world_size]
            assert half.all_reduce(torch.ones(1), algorithm="vendor").tolist() == [half.world_size]


def independent() -> None:
    """Check that a copy of the whole has its own workspace, epoch, faults and lifetime."""
    with shotcast.Communicator(device="cpu", timeout_s=60) as comm:
        copy = comm.split(0)
        assert (copy.rank, copy.world_size, copy.max_bytes) == (comm.rank, comm.world_size, comm.max_bytes)
        for number in range(3):
            assert copy.all_reduce(torch.tensor([float(number)])).tolist() == [number * comm.world_size]
        assert comm._executor.epoch == 0
        comm.all_reduce(torch.ones(1))
        comm._host.barrier()
        if comm.rank == 0:
            comm.set_timeout(0.5)
            with pytest.raises(shotcast.CollectiveTimeout):
                comm.all_reduce(torch.ones(1))
            comm.set_timeout(60)
            comm._host.barrier()
        else:
            comm._host.barrier()
            with pytest.raises(shotcast.CollectiveTimeout):
                comm.all_reduce(torch.ones(1))
        copy.check()
        assert copy.all_reduce(torch.ones(1)).tolist() == [comm.world_size]
        comm.reset()
        copy.close()
        assert comm.all_reduce(torch.ones(1)).tolist() == [comm.world_size]
    # Closing the parent does not close the child.
    parent = shotcast.Communicator(device="cpu", timeout_s=100)
    child = parent.split(0)
    parent.close()
    assert child.all_reduce(torch.ones(1)).tolist() == [child.world_size]
    child.close()


def reasons_of_each_size() -> list[str]:
    """Return what ``explain`` says of one call: of all three ranks, of a part of two or one, and of one alone."""
    x = torch.ones(8)
    reasons = []
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        for one in (comm, comm.split(0 if comm.rank < 2 else 1), comm.split(comm.rank)):
            assert one.all_reduce(x).tolist() == [one.world_size] * 8
            said = one.explain(x)
            reasons.append(f"{said.source}: {said.reason}")
    return reasons


def failed_constructions(count: int) -> tuple[int, int]:
    """Make communicators whose sizes differ between ranks. Return what more is open and watched afterwards."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        for _ in range(3):
            _disagree(comm)
        files, watched = len(os.listdir("/proc/self/fd")), _watched()
        for _ in range(count):
            _disagree(comm)
        return len(os.listdir("/proc/self/fd")) - files, _watched() - watched


def _disagree(comm: shotcast.Communicator) -> None:
    with pytest.raises(shotcast.ConfigError, match="max_bytes"):
        comm.split(0, max_bytes=(1 + comm.rank) << 20)


def _watched() -> int:
    return sum(len(callbacks) for callbacks in WATCH._callbacks.values())
