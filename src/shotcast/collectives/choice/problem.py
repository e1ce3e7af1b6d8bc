"""What a call asks for, and what may answer it: plain values, so that choosing is a pure function."""

from __future__ import annotations

from dataclasses import dataclass

from shotcast.wire import LaunchShape, Norm, Op


@dataclass(frozen=True, slots=True)
class Topology:
    """What all ranks share of the ground they stand on.

    Attributes:
        world_size: ranks.
        device: ``"cuda"`` or ``"cpu"``.
        part: name of the GPU, or ``"cpu"``; what tuned tables are made for.
        kernels: who runs own algorithms: ``"triton"`` (GPU), ``"interpreter"`` or ``"compiled"`` (CPU), or ``""``.
        obstacle: why there are no own kernels, where ``kernels`` is empty.
        multicast: kernels may use a multicast address.
        max_bytes: the workspace's largest message.
        allow_fp8: ``auto`` may take algorithms that send FP8.
    """

    world_size: int
    device: str
    part: str
    kernels: str
    obstacle: str
    multicast: bool
    max_bytes: int
    allow_fp8: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveProblem:
    """One call to be served; all but ``reduction`` as in :class:`shotcast.wire.CallPlan`."""

    op: Op
    nbytes: int
    dtype: str
    topology: Topology
    root: int = 0
    sizes: tuple[int, ...] = ()
    reduction: str = "sum"
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm that serves a problem, with its default launch."""

    algorithm: str
    launch: LaunchShape


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate taken, who decided (``source``), and why in words."""

    candidate: Candidate
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What :meth:`Communicator.explain` says: the choice for a call, and what else was legal.

    Attributes:
        source: who decided: ``argument``, ``environment``, ``user table``, ``packaged table``, ``cost model``, or
            ``legality`` where nothing but the vendor library can serve the call.
        reason: why, in words; for a table its name and the sizes its row serves.
        mode: how the call is made, ``graph`` (captured in a CUDA graph) or ``eager``.
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

    def __str__(self) -> str:
        shape = self.launch
        how = (
            ""
            if self.algorithm == "vendor"
            else (
                f" (chunks of {shape.chunk_bytes or 'default'} bytes)"
                if shape.programs == 0
                else f" ({shape.programs} programs of {shape.num_warps} warps, {shape.block_words} words a tile)"
            )
        )
        dtype = f"{self.dtype}, captured" if self.mode == "graph" else self.dtype
        return (
            f"{self.op} of {self.nbytes} bytes, {dtype}: {self.algorithm}{how}, by {self.source}: {self.reason}; "
            f"legal: {', '.join(self.candidates)}"
        )
