"""Results of scripts with their provenance."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from shotcast.hardware.detect import detect


def write(path: Path, rows: list[dict[str, Any]], made_by: dict[str, str], **measured: float) -> None:
    """Write ``rows`` as JSON with the date, the command, the machine and the fingerprints of the kernels.

    ``measured`` adds figures of the machine.
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
