"""Results of scripts with their provenance, and what a GPU copies."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_times import seconds_each

from shotcast.hardware.detect import detect

os.environ.setdefault("NCCL_GRAPH_REGISTER", "1")  # NCCL as it is by default, which the library is not


def write(path: Path, rows: list[dict[str, Any]], made_by: dict[str, str], **measured: float | str) -> None:
    """Write ``rows`` as JSON with the date, the command, the machine and the fingerprints of the kernels.

    ``measured`` adds facts of the machine.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    environment = detect().as_json() | measured
    result = {
        "date": now,
        "command": " ".join(argument if argument != str(path) else path.name for argument in sys.argv),
        "environment": environment,
        "kernels": made_by,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def copy_gbps() -> float:
    """Return the GB/s that copying memory reaches, counting bytes read and bytes written."""
    sources = [torch.ones(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2)]
    target = torch.empty_like(sources[0])
    return 2 * target.nbytes / seconds_each(lambda turn: target.copy_(sources[turn]), 2, 24) / 1e9
