"""Functions that ranks run for the tests of frameworks."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from frameworks import run
from torch.nn.modules import module
from torch.optim import optimizer

KILLED = 1


def kill_this_rank(folder: str) -> None:
    Path(folder, "killed").write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(folder: str, place: str, count: int) -> None:
    """Have rank 1 die at a step of its optimizer, or in a forward of the model whose class ``place`` names."""
    if int(os.environ["RANK"]) != KILLED:
        return
    seen = 0

    def one_more() -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            kill_this_rank(folder)

    def after_step(*_: Any) -> None:
        one_more()

    def before_forward(called: torch.nn.Module, *_: Any) -> None:
        if type(called).__name__ == place:
            one_more()

    if place == "step":
        optimizer.register_optimizer_step_post_hook(after_step)
    else:
        module.register_module_forward_pre_hook(before_forward)


def own_threads(within_s: float = 20.0) -> list[str]:
    """Return the names of the package's threads that still run after a while."""
    until = time.monotonic() + within_s
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("shotcast")]:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return left


def survive(
    folder: str, place: str, count: int, script: str, *arguments: str
) -> tuple[str, Any, str, float, list[str]]:
    """Run a script whose rank 1 dies; return the error's kind, the ranks it names, its text, when, and what is left."""
    die_at(folder, place, count)
    try:
        run(script, "shotcast", *arguments)
    except Exception as error:  # which kind it is, the test says
        after_s = time.monotonic() - float(Path(folder, "killed").read_text())
        kind, missing, text = type(error).__name__, getattr(error, "missing", None), str(error)
        return kind, missing, text, after_s, own_threads()
    return "", None, "", 0.0, []
