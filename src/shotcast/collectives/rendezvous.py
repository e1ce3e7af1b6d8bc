"""The process group of a communicator: the one given, or all ranks of the job; and the end of one of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from shotcast import env
from shotcast.collectives.rank_device import local_world_size
from shotcast.errors import ConfigError

logger = logging.getLogger(__name__)

SETUP_TIMEOUT_S = 120.0
"""Seconds that ranks wait for each other while a process group or a communicator is constructed."""
_END_S = 1.0
"""Seconds that a rank which closes a communicator waits for the others to close theirs."""


def process_group_of(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """Return ``group``, or for None the group of all ranks; initialise torch.distributed if that has not been done.

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
        shared = env.share_gpus() and torch.cuda.device_count() < local_world_size()  # which NCCL refuses
        backend = "gloo" if device.type == "cpu" or shared else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=SETUP_TIMEOUT_S))
    group = group or dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise ConfigError("this rank is not a member of the process group")
    return group


def end_process_group(group: dist.ProcessGroup, broken: bool) -> None:
    """Destroy a group that its communicator made: its connections, threads, and NCCL communicator.

    It needs no other rank. NCCL's communicator ends when all ranks of the host end theirs, so from a second on a thread
    waits for them.

    Args:
        broken: ranks are gone, or a call failed, so the others may never come: abort NCCL's communicator.
    """
    with contextlib.suppress(RuntimeError):  # there is no backend for GPUs
        nccl = group._get_backend(torch.device("cuda"))
        if broken:
            nccl.abort()

    def destroy() -> None:
        try:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        except ValueError:
            pass  # it was destroyed with all groups
        except RuntimeError as error:
            logger.warning("the process group %s has not ended in order: %s", group.group_name, error)

    ending = threading.Thread(target=destroy, name=f"end of {group.group_name}", daemon=True)
    ending.start()
    ending.join(_END_S)
