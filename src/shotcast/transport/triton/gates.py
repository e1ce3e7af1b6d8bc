"""Gates: one warp that waits for the ranks that are late, in place of the whole grid of a call.

A grid that waits holds SMs that others need: a product on another stream, a call of another communicator, a message of
NCCL, and maybe what the late rank waits for. The calls of a communicator that is not *exclusive* are therefore launched
behind a gate. It exchanges the header of the call (:func:`.barrier.gate`), and the grid begins when every rank has
come, so it waits for no longer than other ranks take to launch the same kernel.
"""

from __future__ import annotations

from shotcast.device.triton.launch import Launch
from shotcast.transport.triton.barrier import gate_before


def gate_of(launch: Launch) -> Launch | None:
    """Return the gate to launch before a kernel; None where its grid is one program, as that of a barrier is."""
    return gate_before(launch) if launch.programs > 1 else None
