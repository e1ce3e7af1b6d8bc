"""The backend "shotcast" of torch.distributed: process groups whose collectives are those of communicators.

This module imports little at first, as PyTorch reads it at ``import torch``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from shotcast.process_group.names import BACKEND

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["BACKEND", "counts", "monitored_barrier"]


def counts(group: dist.ProcessGroup | None = None) -> dict[str, dict[str, int]]:
    """Return how many calls of a process group each route has served, by operation.

    It returns ``{"all_reduce": {"own": 3}}``, for example. The routes are ``own``, for a communicator, and ``inner``,
    for the group of Gloo or NCCL inside (``docs/reference/compatibility.md``).

    Args:
        group: a process group of this backend; None for that of all ranks.

    Raises:
        ConfigError: it is none of this backend.
    """
    from shotcast.process_group.group import own_group

    return own_group(group).counts()


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait for all ranks, and name those that do not come, as ``torch.distributed.monitored_barrier`` does.

    PyTorch's function refuses every backend but Gloo by its name, so a process group of this one needs this function.
    It waits on the host, and for no call on a GPU.

    Args:
        group: a process group of this backend; None for that of all ranks. Nothing happens on a rank outside it.
        timeout: how long a rank waits, in seconds if it is a number; None for the timeout of the group.
        wait_all_ranks: name all ranks that have not come, and not only the first.

    Raises:
        ConfigError: the group is none of this backend.
        ShotcastError: ranks did not come, which are named by their ranks in the job.
    """
    import torch.distributed as dist

    from shotcast.process_group.group import own_group

    if dist.get_rank(group) < 0:
        return
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    own_group(group).monitored_barrier(limit, wait_all_ranks)
