"""Ranks of test_gpu_calibration.py: the kernels that are measured on GPUs, interpreted or by host code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shotcast.bench import gpu_case, gpu_host
from shotcast.bench.gpu_case import Cases


def checked(shapes: Sequence[Cases]) -> list[dict[str, Any]]:
    """Check each kernel on this machine's CPU, with few sets of data; return what they are."""
    gpu_case.BYTES_BETWEEN = 2
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


def host_rows(steps: gpu_host.HostSteps) -> list[dict[str, Any]]:
    """Return the host's times of a CPU rank."""
    return gpu_host.measure("cpu", steps)
