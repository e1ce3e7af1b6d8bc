"""Where an engine runs, if that is left to it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from shotcast.collectives.rank_device import enough_gpus
from shotcast.engine.config import EngineConfig
from shotcast.errors import ConfigError

logger = logging.getLogger(__name__)


def resolved(config: EngineConfig) -> EngineConfig:
    """``config`` with a device in place of "auto": CUDA where each rank of this machine can have a GPU.

    Raises:
        ConfigError: CUDA was asked for and there are too few GPUs, or the dtype is not one of the device's.
    """
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", config.ranks))
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    served = enough_gpus(needed)
    if config.device == "cuda":
        if not there:
            raise ConfigError("device is cuda, but PyTorch finds no usable GPU")
        if not served:
            raise ConfigError(
                f"{needed} ranks on CUDA need as many GPUs, and {there} are visible; SHOTCAST_SHARE_GPUS=1 lets them "
                "take turns"
            )
    if config.device != "auto":
        return config
    if there and not served:
        logger.warning("%d ranks need as many GPUs, and %d are visible: they run on the CPU", needed, there)
    return replace(config, device="cuda" if served else "cpu")
