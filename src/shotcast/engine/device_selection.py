"""The device on which an engine runs."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from shotcast import env
from shotcast.engine.config import EngineConfig
from shotcast.errors import ConfigError
from shotcast.hardware import detect

logger = logging.getLogger(__name__)


def select_device(config: EngineConfig) -> EngineConfig:
    """Return ``config`` with a device in place of "auto": CUDA if each rank of this machine can have a GPU.

    A layout that a plan chooses has as many ranks as there are GPUs, so it takes these wherever there is one.

    Raises:
        ConfigError: the device is "cuda", or the layout is left to a plan, and there are too few GPUs (a launcher may
            show one to each rank), or the device does not support the dtype.
    """
    if config.device == "cpu":
        return config
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", config.asked_ranks or env.local_world_size()))
    visible = _visible_gpus()
    enough = visible >= (1 if env.share_gpus() else needed)
    one_each = visible == 1 and "LOCAL_WORLD_SIZE" in os.environ  # a communicator refuses ranks with the same one
    if config.device == "cuda":
        if not visible:
            raise ConfigError("device is cuda, but PyTorch finds no usable GPU")
        if not enough and not one_each:
            raise ConfigError(
                f"{needed} ranks on CUDA need as many GPUs, and {visible} are visible; SHOTCAST_SHARE_GPUS=1 lets them "
                "take turns"
            )
    if config.device != "auto":
        return config
    if visible and config.plans_layout:
        if not enough and not one_each:
            raise ConfigError(
                f"layout {config.layout} is of {needed} ranks on this machine, and {visible} GPUs are visible: take as "
                "many ranks as GPUs, or device cpu"
            )
        return replace(config, device="cuda")
    if visible and not enough:
        logger.warning(
            "%d ranks need as many GPUs, and %d are visible: they run on the CPU; device cuda takes the one that each "
            "rank sees where a launcher shows each its own",
            needed,
            visible,
        )
    return replace(config, device="cuda" if enough else "cpu")


def _visible_gpus() -> int:
    if not detect.has_cuda_driver():
        return 0  # which takes no PyTorch
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
