"""The candidates for a call, the choice between them, and its explanation: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from shotcast.units import about_size
from shotcast.wire import LaunchShape


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm that serves a problem, with its default launch."""

    algorithm: str
    launch: LaunchShape


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen candidate, the source of the decision, and the reason in words.

    Attributes:
        entry: the number of the table that decided, and the key of its rows; None if no table did.
    """

    candidate: Candidate
    source: str
    reason: str
    entry: tuple[int, tuple[str, str, str]] | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a choice, as returned by :meth:`Communicator.explain`.

    Attributes:
        source: who decided: ``argument``, ``environment``, ``user table``, ``packaged table``, ``cost model``,
            ``sharing`` for an algorithm that leaves the GPU's SMs to others, or ``legality`` if only the vendor library
            can serve the call.
        reason: why, in words; for a table, its name and the sizes that its row serves.
        candidates: names of all algorithms that may serve the call.
        mode: how the call is made, ``graph`` (captured in a CUDA graph) or ``eager``.
        by_library: the vendor library runs the call, without launching a native kernel.
        held_bytes: communication memory that the communicator now holds on each rank.
        more_bytes: memory that the first such call adds, on each rank.
        sms: the most SMs that native kernels may occupy; 0 for no limit.
        batch_invariant: the communicator is in batch-invariant mode.
        gated: one warp waits for the other ranks before the programs begin, because the communicator is not exclusive.
    """

    op: str
    nbytes: int
    dtype: str
    algorithm: str
    launch: LaunchShape
    source: str
    reason: str
    candidates: tuple[str, ...]
    mode: str = "eager"
    by_library: bool = False
    held_bytes: int = 0
    more_bytes: int = 0
    sms: int = 0
    batch_invariant: bool = False
    gated: bool = False

    def __str__(self) -> str:
        shape, gate = self.launch, ", behind a gate" if self.gated else ""
        how = f" ({shape.programs} programs of {shape.num_warps} warps, {shape.block_words} words a tile{gate})"
        if self.by_library:
            how = ""
        elif shape.programs == 0:
            how = f" (chunks of {shape.chunk_bytes or 'default'} bytes)"
        dtype = f"{self.dtype}, captured" if self.mode == "graph" else self.dtype
        dtype += f", on at most {self.sms} SMs" if self.sms else ""
        dtype += ", batch-invariant" if self.batch_invariant else ""
        return (
            f"{self.op} of {self.nbytes} bytes, {dtype}: {self.algorithm}{how}, by {self.source}: {self.reason}; "
            f"legal: {', '.join(self.candidates)}{self._memory}"
        )

    @property
    def _memory(self) -> str:
        more = f", and {about_size(self.more_bytes)} more from the first such call on" if self.more_bytes else ""
        return f"; {about_size(self.held_bytes)} of memory held{more}" if self.held_bytes else ""
