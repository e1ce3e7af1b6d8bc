"""The backend "shotcast" of torch.distributed: process groups whose collectives are those of communicators.

This module imports little at first, as PyTorch reads it at ``import torch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shotcast.process_group.names import BACKEND

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["BACKEND", "counts"]


def counts(group: dist.ProcessGroup | None = None) -> dict[str, dict[str, int]]:
    """Return how many calls of a process group each way has served, by operation.

    It returns ``{"all_reduce": {"own": 3}}``, for example. The ways are ``own``, for a communicator, and ``inner``, for
    the group of Gloo or NCCL inside (``docs/reference/compatibility.md``).

    Args:
        group: a process group of this backend; None for that of all ranks.

    Raises:
        ConfigError: it is none of this backend.
    """
    from shotcast.process_group.group import own_group

    return own_group(group).counts()
