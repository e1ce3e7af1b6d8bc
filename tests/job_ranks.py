"""Ranks of a job that this package did not start, on hosts that are this one: the test's process is rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from shotcast.launcher import job
from shotcast.launcher.spawn import RankGroup


@contextmanager
def other_ranks(
    monkeypatch: pytest.MonkeyPatch, world_size: int, ranks_per_host: int, target: Callable[..., Any], *args: Any
) -> Iterator[RankGroup]:
    """Make this process rank 0 of a job, whose other ranks run ``target``; yields their processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in rank_variables(0, world_size, ranks_per_host, store.port).items():
        monkeypatch.setenv(name, value)
    others = RankGroup.start(run_other, world_size - 1, world_size, ranks_per_host, store.port, target, *args)
    try:
        yield others
    finally:
        others.kill()
        others.end()


def rank_variables(rank: int, world_size: int, ranks_per_host: int, port: int) -> dict[str, str]:
    """Return what torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "GROUP_RANK": str(rank // ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def run_other(world_size: int, ranks_per_host: int, port: int, target: Callable[..., Any], *args: Any) -> Any:
    """Run ``target`` as another rank; return what it returns, the code that it exits with, or the text of its error."""
    os.environ.update(rank_variables(int(os.environ["RANK"]) + 1, world_size, ranks_per_host, port))
    job._LINGER_S = 0.3
    try:
        return target(*args)
    except SystemExit as end:
        return end.code
    except Exception as error:
        return f"{type(error).__name__}: {error}"
