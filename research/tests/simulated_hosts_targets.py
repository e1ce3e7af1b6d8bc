"""Functions that the ranks of tests/bench/test_simulated_hosts.py run."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hosts import arrive

NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def identity() -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    total = torch.full([4], float(dist.get_rank()))
    dist.all_reduce(total)
    return {
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text(),
        "folder": os.getcwd(),
        "environment": tuple(int(os.environ[name]) for name in NAMES),
        "total": total.tolist(),
    }


def reduce_until_told(folder: str, stop: str, timeout_s: float) -> str:
    """Make calls until a file is there; return the error of one that failed."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    total = torch.zeros(1000)
    dist.all_reduce(total)
    arrive(folder)
    stopped = torch.zeros(1)
    try:
        while stopped.item() == 0:
            dist.all_reduce(total)
            stopped.fill_(os.path.exists(stop))
            dist.all_reduce(stopped)
    except RuntimeError as error:
        return str(error)
    return "stopped"


def sleeps(folder: str) -> None:
    arrive(folder)
    time.sleep(600)
