"""A rank of tests/collectives/test_replaced_rank.py, which lives through several jobs or replaces one that did not."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shotcast
from shotcast.collectives import communicator

WORLD_SIZE, VICTIM = 3, 1


def rank_of_jobs(rank: int, jobs: Sequence[tuple[int, str]], first: int, reports: int) -> None:
    """Take part in the jobs from number ``first`` on; rank ``VICTIM`` ends in the middle of its first one.

    Args:
        jobs: the port of each job's store, and the prefix of its keys there.
        reports: the port of the store in which the test reads what became of each job.
    """
    report = dist.TCPStore("127.0.0.1", reports)
    for number, (port, prefix) in enumerate(jobs[first:], first):
        store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=100))
        names = sums_of_a_job(rank)
        last = number == len(jobs) - 1
        if not last and rank == VICTIM:
            end_in_the_middle_of_a_construction()
        report.set(f"{number}/{rank}", ",".join(names))
        if not last:
            meet_no_victim()
        dist.destroy_process_group()


def sums_of_a_job(rank: int) -> list[str]:
    """Sum on communicators built one after the other, and on a split; return their names."""
    names = []
    for count in (3, 5):
        comm = shotcast.Communicator(device="cpu", timeout_s=100, max_bytes=1 << 16)
        part = comm.split(0, -rank)
        assert part is not None
        for one, algorithm in ((comm, "two_shot"), (part, "one_shot"), (part, "vendor")):
            got = one.all_reduce(torch.full([count], float(rank)), algorithm=algorithm)
            assert got.tolist() == [3.0] * count
        names += [comm.name, part.name]
        comm.close()
    return names


def end_in_the_middle_of_a_construction() -> None:
    def end(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    communicator.agree = end
    shotcast.Communicator(device="cpu")


def meet_no_victim() -> None:
    usual = communicator.SETUP_TIMEOUT_S
    communicator.SETUP_TIMEOUT_S = 2.0
    try:
        with pytest.raises(shotcast.CollectiveTimeout) as caught:
            shotcast.Communicator(device="cpu")
    finally:
        communicator.SETUP_TIMEOUT_S = usual
    assert VICTIM in caught.value.missing
