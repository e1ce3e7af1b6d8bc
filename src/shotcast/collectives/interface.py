"""Interfaces between the parts of a communicator, so that none of them imports the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from shotcast.memory.operands import NormTensors
from shotcast.wire import CallPlan, Fault, HeaderWords, Wait


class Collectives(Protocol):
    """A :class:`~shotcast.collectives.communicator.Communicator`, beside its calls."""

    name: str
    rank: int
    world_size: int
    device: torch.device


class BoundCall(Protocol):
    """A call plan that an executor has bound to its kernels; it is run again and again with other tensors."""

    def run(
        self,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        norm: NormTensors | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None: ...
    def load(self) -> None: ...


class Executor(Protocol):
    """Runs call plans: :class:`shotcast.transport.triton.executor.TritonExecutor` or the CPU's ``CpuExecutor``.

    Attributes:
        room: the longest message, in bytes, that the workspace is laid out for now.
        held_bytes: bytes of shared memory that the workspace takes on each rank.
        stopped_word: a word whose ``value`` is 0 until a fault is known. It is gone after :meth:`close`.
    """

    stopped_word: Any

    @property
    def room(self) -> int: ...
    @property
    def batches(self) -> bool:
        """True if it makes several messages at once, as a :class:`BatchExecutor`."""
        ...

    @property
    def held_bytes(self) -> int: ...
    def more_bytes(self, room: int) -> int:
        """Return the bytes that a workspace takes, on each rank, that is made for messages of ``room`` bytes."""
        ...

    def bind(self, plan: CallPlan) -> BoundCall: ...
    def variants(self, plan: CallPlan) -> tuple[str, ...]:
        """Return names for what ``plan`` needs compiled, one for each kernel."""
        ...

    def waiting(self, nbytes: int) -> int: ...
    def fault(self) -> Fault | None: ...
    @property
    def stopped(self) -> bool: ...
    def headers(self, epoch: int) -> list[HeaderWords | None]: ...
    def parts(self, epoch: int) -> dict[int, str]:
        """Return, by rank, the sizes that made this rank stop an uneven all_to_all; empty if it did not."""
        ...

    @property
    def epoch(self) -> int: ...
    def set_epoch(self, epoch: int, /) -> None: ...
    def set_timeout(self, timeout_s: float, /) -> None: ...
    def mark_gone(self, rank: int) -> None: ...
    def interrupt(self) -> None: ...
    def keep(self) -> None:
        """Keep the memory that calls use now: a graph is being captured with its addresses."""
        ...

    @property
    def timeout_s(self) -> float: ...
    def wait(self) -> Wait | None:
        """Return the wait that this rank is in, if there is one. Any thread may call it, and blocks for nothing."""
        ...

    def awaited(self, wait: Wait, /) -> list[int]:
        """Return the ranks that ``wait`` is for, as far as they are known. Raises ClosedError."""
        ...

    def idle(self) -> bool: ...
    def drain(self) -> None: ...
    def clear(self, epoch: int) -> None: ...
    def close(self) -> None: ...


class HeaderExchange(Protocol):
    """A kernel that exchanges the header of a call between all ranks, and does nothing else."""

    def load(self) -> None: ...
    def run(self) -> None:
        """Return when all ranks have come to the call, or a fault is known."""
        ...


@runtime_checkable
class KernelExecutor(Executor, Protocol):
    """An executor whose kernels wait on a device."""

    def stop(self, fault: int, /) -> None:
        """End this rank's kernels that wait, now and until :meth:`clear`, for a fault that was found elsewhere.

        ``fault`` is an abort word (:func:`shotcast.wire.encode_fault`). Any thread may call it.
        """
        ...


class BatchExecutor(Executor, Protocol):
    """An executor that makes several messages at once."""

    def load_batch(self) -> None: ...

    def run_batch(self, messages: Sequence[tuple[CallPlan, torch.Tensor]], /) -> None:
        """Send and receive; return when all is done, or a fault is known."""
        ...


@runtime_checkable
class MappingExecutor(Executor, Protocol):
    """An executor that makes tensors in memory that all ranks map."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, /) -> torch.Tensor | None:
        """Return such a tensor; None if there is no memory for it."""
        ...


@runtime_checkable
class GrowingExecutor(Executor, Protocol):
    """An executor whose workspace begins small."""

    def load(self, plans: Sequence[CallPlan], /) -> None:
        """Compile and load the kernels of plans of any size, and that of a header exchange."""
        ...

    def header_exchange(self, plan: CallPlan) -> HeaderExchange: ...
    def grow(self, room: int) -> None:
        """Make room for messages of ``room`` bytes. Collective; raises ConfigError on all ranks."""
        ...
