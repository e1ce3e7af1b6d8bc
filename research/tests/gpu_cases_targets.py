"""Ranks of test_gpu_calibration.py: the kernels that are measured on GPUs, interpreted or by host code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpu_calibration.case
import torch
from gpu_calibration import host
from gpu_calibration.case import Cases


def checked(shapes: Sequence[Cases]) -> list[dict[str, Any]]:
    """Check each kernel on this machine's CPU, with few sets of data; return what they are."""
    gpu_calibration.case.BYTES_BETWEEN = 2
    torch.manual_seed(1)
    rows = []
    with torch.inference_mode():
        for shape in shapes:
            for case in shape.cases(torch.device("cpu"), True):
                case.check()
                for turn in range(case.turns):
                    case.call(turn)
                rows.append(case.row)
    return rows


def host_rows(steps: host.HostSteps) -> list[dict[str, Any]]:
    """Return the host's times of a CPU rank."""
    return host.measure("cpu", steps)
