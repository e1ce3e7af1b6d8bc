"""The device of a rank: the requested one, or the GPU that matches its local rank."""

from __future__ import annotations

import os

import torch

from shotcast import env
from shotcast.errors import ConfigError


def device_of(device: str | torch.device | None) -> torch.device:
    """Return the requested device; for None, a GPU if every rank of the machine can have one, else the CPU.

    Raises ConfigError if there is no such device.
    """
    job = env.whole_job()
    if device is None:
        device = "cuda" if enough_gpus(env.local_world_size()) else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is cpu or cuda, not {device!r}") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is cpu or cuda, not {chosen}")
    if chosen.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {chosen} was asked for, and PyTorch {torch.__version__} sees no GPU")
    index: int | None = chosen.index
    if index is None:
        index = gpu_of(job.local_rank) if job and "LOCAL_RANK" in os.environ else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device cuda:{index} was asked for; there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def may_have_own_gpu(device: str | torch.device | None) -> bool:
    """Return whether this rank may have its own GPU by default although the host has more ranks than GPUs.

    A launcher may show each rank one GPU, by CUDA_VISIBLE_DEVICES, or show all ranks the same one. The ranks determine
    this together (``find_nodes``).
    """
    if device is not None or "CUDA_VISIBLE_DEVICES" not in os.environ or enough_gpus(env.local_world_size()):
        return False
    return torch.cuda.is_available() and torch.cuda.device_count() == 1


def enough_gpus(ranks: int) -> bool:
    """Return whether this machine has a GPU for each of ``ranks`` ranks, or one that they may share."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count >= (1 if env.share_gpus() else ranks)


def gpu_of(local_rank: int) -> int:
    """Return the index of the GPU that a rank uses by default.

    A process that sees one GPU uses it at any rank: launchers assign each rank a GPU by CUDA_VISIBLE_DEVICES or a
    container. Constructing a communicator reveals whether ranks have the same one.
    """
    count = torch.cuda.device_count()
    return local_rank % count if count == 1 or env.share_gpus() else local_rank


def ranks_of_a_gpu() -> int:
    """Return how many ranks share this rank's GPU, as far as this process can tell."""
    return -(-env.local_world_size() // torch.cuda.device_count()) if env.share_gpus() else 1


def gpus_are_shared() -> bool:
    """Return whether several ranks of this machine share one GPU, which NCCL refuses."""
    return env.share_gpus() and torch.cuda.device_count() < env.local_world_size()
