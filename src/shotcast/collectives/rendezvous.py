"""The process group of a communicator: the one given, or all ranks of the job."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from shotcast import env
from shotcast.collectives.rank_device import gpus_are_shared
from shotcast.errors import ConfigError

SETUP_TIMEOUT_S = 120.0
"""Seconds that ranks wait for each other while a process group or a communicator is constructed."""


def process_group_of(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """Return ``group``, or for None the group of all ranks; initialize torch.distributed if that has not been done.

    Gloo then uses the interface of SHOTCAST_SOCKET_IFNAME, unless its own variable names another.

    Raises:
        ConfigError: the environment does not describe a job, or this rank is not a member of the group.
    """
    if not dist.is_initialized():
        if group is not None:
            raise ConfigError("a process group was given, and torch.distributed is not initialised")
        if env.job() is None:
            raise ConfigError(
                "RANK and WORLD_SIZE are not set; start with torchrun, or with shotcast.spawn(fn, world_size)"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        use_interface()
        backend = "gloo" if device.type == "cpu" or gpus_are_shared() else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=SETUP_TIMEOUT_S))
    group = group or dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise ConfigError("this rank is not a member of the process group")
    return group


def use_interface() -> None:
    """Let Gloo use the interface of SHOTCAST_SOCKET_IFNAME, unless its own variable names another."""
    if interface := env.socket_ifname():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else it takes where the host's own name leads
