"""Gates: one warp that waits for the ranks that are late, in place of the whole grid of a call.

A grid that waits holds SMs that others need: a product on another stream, a call of another communicator, a message of
NCCL, and maybe what the late rank waits for. The calls of a communicator that is not *exclusive* are therefore launched
behind a gate. It exchanges the header of the call (:func:`.barrier.gate`), and the grid begins when every rank has
come, so it waits for no longer than other ranks take to launch the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shotcast.device.triton.launch import Launch
from shotcast.transport.triton.barrier import gate_before
from shotcast.transport.triton.binding import Enqueue


class Gated:
    """A kernel behind its gate.

    Args:
        launch: of the kernel.
    """

    __slots__ = ("_gate", "_launch")

    def __init__(self, launch: Launch):
        self._gate, self._launch = gate_before(launch), launch

    def load(self) -> None:
        """Compile and load both kernels."""
        self._gate.load()
        self._launch.load()

    def __call__(self, stream: int, call_values: Sequence[Any]) -> None:
        """Enqueue both kernels."""
        self._gate(stream, ())
        self._launch(stream, call_values)


def gated(launch: Enqueue) -> Enqueue:
    """Return a kernel behind a gate, or as it is where its grid is one program, as that of a barrier is.

    What enqueues more than one kernel keeps to few SMs by itself.
    """
    return Gated(launch) if isinstance(launch, Launch) and launch.programs > 1 else launch
