"""Functions that the ranks of test_machine_load.py run."""

from __future__ import annotations

import time


def work(seconds: float) -> float:
    """Keep a core busy, and return the seconds that this process has worked in all."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return time.process_time()
