"""The ranks of a communicator: a process group, all ranks of the job, or one rank outside a job."""

from __future__ import annotations

import functools
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from shotcast import env
from shotcast.collectives.rank_device import gpus_are_shared
from shotcast.errors import ConfigError
from shotcast.memory.host_group import Rendezvous

SETUP_TIMEOUT_S = 120.0
"""Seconds that ranks wait for each other while a process group or a communicator is constructed."""


def rendezvous_of(group: dist.ProcessGroup | None, device: torch.device) -> Rendezvous:
    """Return the ranks of ``group`` or, for None, all ranks of the job; outside a job, this process is the only rank.

    Raises ConfigError as :func:`process_group_of` does.
    """
    if group is None and not dist.is_initialized() and env.job() is None:
        variable, size = env.size_by_other_launcher()
        if not variable:
            return Rendezvous(_store_of_one(), 0, 1, "alone")
        raise ConfigError(
            f"{variable} says that {size} processes were started, but RANK and WORLD_SIZE are not set, so they cannot "
            "meet; start with torchrun, or with shotcast.spawn(fn, world_size)"
        )
    return Rendezvous.of_group(process_group_of(group, device))


@functools.cache
def _store_of_one() -> dist.Store:
    """Return the store shared by all communicators outside a job, whose names must differ."""
    return dist.HashStore()


def process_group_of(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """Return ``group`` or, for None, the group of all ranks; initialize torch.distributed if necessary.

    Gloo then uses the interface in SHOTCAST_SOCKET_IFNAME, unless Gloo's variable names another. Raises ConfigError if
    this rank is not a member of the group.
    """
    if not dist.is_initialized():
        if group is not None:
            if not isinstance(group, dist.ProcessGroup):
                raise ConfigError(f'group is a torch.distributed.ProcessGroup, not {group!r}; a device: device="cpu"')
            raise ConfigError("a process group was given, and torch.distributed is not initialized")
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
    """Make Gloo use the interface in SHOTCAST_SOCKET_IFNAME, unless Gloo's variable names another."""
    if interface := env.socket_ifname():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else it takes where the host's own name leads
