"""Calls of an executor without a Communicator."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from shotcast.memory.operands import NormTensors
from shotcast.wire import CallPlan


def run_call(
    executor: Any,
    plan: CallPlan,
    x: torch.Tensor | None,
    out: torch.Tensor | None,
    norm: NormTensors | None = None,
) -> None:
    """Bind ``plan`` and make the call."""
    executor.bind(plan).run(x, out, norm)


def clear_after_read_from(comm: Any, nbytes: int) -> None:
    """Have calls with slots of more than ``nbytes`` clear them as they read."""
    for workspace in comm._executor.workspaces:
        workspace.context = dataclasses.replace(workspace.context, clear_after_read_bytes=nbytes)
