"""The "shotcast" backend of torch.distributed: process groups whose collectives run on communicators.

This module imports little at first because PyTorch loads it at ``import torch``.
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

    For example, it returns ``{"all_reduce": {"own": 3}}``. The routes are ``own``, for a communicator, and ``inner``,
    for the group of Gloo or NCCL inside (``docs/reference/compatibility.md``).

    Args:
        group: a process group of this backend; None for the group of all ranks.

    Raises:
        ConfigError: the group does not belong to this backend.
    """
    from shotcast.process_group.group import own_group

    return own_group(group).counts()


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait for all ranks, and name the ones that do not arrive, like ``torch.distributed.monitored_barrier``.

    PyTorch's function rejects every backend except Gloo by name, so process groups of this backend need this function.
    It waits on the host, and not for calls on a GPU.

    Args:
        group: a process group of this backend; None for the group of all ranks. Does nothing on ranks outside it.
        timeout: how long a rank waits, in seconds if it is a number; None for the timeout of the group.
        wait_all_ranks: name all ranks that have not arrived, not only the first.

    Raises:
        ConfigError: the group does not belong to this backend.
        ShotcastError: ranks did not arrive; they are named by their job ranks.
    """
    import torch.distributed as dist

    from shotcast.process_group.group import own_group

    if dist.get_rank(group) < 0:
        return
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    own_group(group).monitored_barrier(limit, wait_all_ranks)
