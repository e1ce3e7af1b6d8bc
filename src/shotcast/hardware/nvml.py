"""NVIDIA's management library (NVML), queried for all GPUs, including ones hidden by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_READ, _WRITE = 0, 1  # NVML_P2P_CAPS_INDEX_*; status 0 is NVML_P2P_STATUS_OK


@functools.cache
def library() -> Any:
    """Load the library, which comes with the driver; None if it is missing or does not start."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None


def peer_access(uuid: str, other: str) -> bool | None:
    """Return whether a GPU can read and write another's memory; None if the library cannot tell.

    It cannot tell if a container or a control group hides a GPU, or for parts of a GPU (MIG).

    Args:
        uuid, other: GPU UUIDs from PyTorch, with or without the prefix ``GPU-``.
    """
    nvml = library()
    if nvml is None:
        return None
    gpus = []
    for name in (uuid, other):
        gpu = ctypes.c_void_p()
        full = name if name.startswith("GPU-") else f"GPU-{name}"
        if nvml.nvmlDeviceGetHandleByUUID(full.encode(), ctypes.byref(gpu)) != 0:
            return None
        gpus.append(gpu)
    for ability in (_READ, _WRITE):
        status = ctypes.c_int(-1)
        if nvml.nvmlDeviceGetP2PStatus(*gpus, ability, ctypes.byref(status)) != 0:
            return None
        if status.value != 0:
            return False
    return True
