"""One rank of a job is killed and replaced, while the others keep their processes and begin a new job with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import replaced_rank_targets as targets
import torch.distributed as dist

from shotcast.launcher.rank_process import RankProcess


@contextmanager
def processes() -> Iterator[dict[int, RankProcess]]:
    running: dict[int, RankProcess] = {}
    try:
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.join()


def test_one_rank_is_replaced_job_after_job() -> None:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(3)]
    first, other, reports = (store.port for store in stores)
    # the same store under another prefix, then another store under the same prefix
    jobs = [(first, "job 0"), (first, "job 1"), (other, "job 1")]
    with processes() as running:

        def start(rank: int, job: int) -> None:
            running[rank] = RankProcess(target=targets.rank_of_jobs, args=(rank, jobs, job, reports))
            running[rank].start()

        for rank in range(targets.WORLD_SIZE):
            start(rank, 0)
        for job in (1, 2):
            victim = running[targets.VICTIM]
            victim.join(300)
            assert victim.exitcode == -signal.SIGKILL
            start(targets.VICTIM, job)
        for process in running.values():
            process.join(300)
        assert {rank: process.exitcode for rank, process in running.items()} == dict.fromkeys(running, 0)
    reported = {key: stores[-1].get(key).decode() for key in (f"{job}/0" for job in range(3))}
    assert len(set(reported.values())) == 1  # names say what is built, not how often a process has built something
    keys = [key for store in stores[:2] for key in store.list_keys() if "shotcast" in key]
    assert [key for key in keys if "invited" in key or "accepted" in key] == []
