"""CUDA graphs of what is computed on static memory, so that a replay is one call of the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from shotcast.layers.step_timer import DeviceStepTimer, StepTimer

Replay = Callable[[], object]


class Graphs:
    """Graphs by name, captured when they are first asked for; without CUDA, each replay computes anew.

    They share the memory of what they compute in between, as no two run at a time: those that take most should be
    captured first. What outlasts a replay has to be kept elsewhere.

    Args:
        timer: of this rank; on CUDA a :class:`DeviceStepTimer`.
    """

    def __init__(self, device: torch.device, timer: StepTimer):
        self._device, self._timer = device, timer
        self._replays: dict[Hashable, Replay] = {}
        self._pool: Any = None

    def ready(self, name: Hashable, compute: Callable[[], None], stamped: bool = False) -> Replay:
        """What replays ``compute``. The first time it is captured, which is collective; unless ``stamped``, it is also
        computed, on what memory holds: that must do no harm."""
        if name not in self._replays:
            self._replays[name] = self._captured(compute, stamped) if self._device.type == "cuda" else compute
        return self._replays[name]

    def made(self, name: Hashable) -> Replay:
        """What :meth:`ready` made before. KeyError if it did not: it would compute what memory holds now."""
        return self._replays[name]

    def __len__(self) -> int:
        return len(self._replays)

    def close(self) -> None:
        """Let go of the graphs, which must be gone before what they communicate by. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._replays.clear()

    def _captured(self, compute: Callable[[], None], stamped: bool) -> Replay:
        timer = self._timer
        assert isinstance(timer, DeviceStepTimer)
        if not stamped:
            # Kernels are compiled, libraries set up, and ranks brought together.
            compute()
        else:
            timer.calibrate()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        timer.recording = stamped
        try:
            # NCCL's watchdog thread asks for events meanwhile; only this thread's calls must be capturable.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute()
        finally:
            timer.recording = False
        self._pool = graph.pool()
        if not stamped:
            graph.replay()  # the first takes longer
        return graph.replay
