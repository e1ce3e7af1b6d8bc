"""CUDA graphs of computations on static memory, which make a replay one call of the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from shotcast.layers.step_timer import DeviceStepTimer, StepTimer

Replay = Callable[[], object]


class CudaGraphs:
    """Graphs by key, captured when they are first needed. Without CUDA, each replay computes again.

    No two graphs run at the same time, so they share the memory of their intermediate results; capture those that need
    most of it first. Results that outlive a replay have to be kept in other memory.

    Args:
        device: where they run.
        timer: the timer of this rank; on CUDA a :class:`DeviceStepTimer`.
    """

    def __init__(self, device: torch.device, timer: StepTimer):
        self._device, self._timer = device, timer
        self._replays: dict[Hashable, Replay] = {}
        self._pool: Any = None

    def get_or_capture(self, key: Hashable, compute: Callable[[], None], stamped: bool = False) -> Replay:
        """Return the replay of ``compute``, captured on first use. The capture is a collective operation.

        Unless ``stamped``, the capture also runs ``compute`` on the current contents of memory, which must do no harm.
        """
        if key not in self._replays:
            self._replays[key] = self._capture(compute, stamped) if self._device.type == "cuda" else compute
        return self._replays[key]

    def get(self, key: Hashable) -> Replay:
        """Return a replay that was captured before.

        Raises:
            KeyError: it was not; a capture now would compute on memory that is in use.
        """
        return self._replays[key]

    def __len__(self) -> int:
        return len(self._replays)

    def close(self) -> None:
        """Wait for the device and release the graphs, which has to happen before their communicators are closed."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._replays.clear()

    def _capture(self, compute: Callable[[], None], stamped: bool) -> Replay:
        timer = self._timer
        assert isinstance(timer, DeviceStepTimer)
        if not stamped:
            # This compiles kernels, initialises libraries, and brings the ranks together.
            compute()
        else:
            timer.calibrate()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        timer.recording = stamped
        try:
            # NCCL's watchdog thread queries events meanwhile; only the calls of this thread must be capturable.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute()
        finally:
            timer.recording = False
        self._pool = graph.pool()
        if not stamped:
            graph.replay()  # the first replay takes longer
        return graph.replay
