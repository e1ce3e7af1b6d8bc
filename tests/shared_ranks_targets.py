"""Functions that the ranks of tests/test_shared_ranks.py run."""

from __future__ import annotations

import os
import time

import torch

import shotcast
from shotcast import units


def numbered() -> tuple[int, int]:
    return os.getpid(), int(os.environ["RANK"])


def replace_what_is_there() -> None:
    units.parse_size = None  # type: ignore[assignment]
    os.environ["SHOTCAST_REPLACED"] = "1"


def what_is_there() -> tuple[bool, bool]:
    return units.parse_size is None, "SHOTCAST_REPLACED" in os.environ


def reduced() -> list[float]:
    with shotcast.Communicator(device="cpu") as comm:
        return comm.all_reduce(torch.ones(2)).tolist()


def fails_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"rank {rank} found something")
    time.sleep(600)


def ends_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os._exit(3)
    time.sleep(600)


def sleeps(seconds: float) -> None:
    time.sleep(seconds)
