"""Interfaces between the parts of a communicator, so that none imports another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from shotcast.memory.operands import NormTensors
from shotcast.wire import CallPlan, Fault, HeaderWords, Wait


class Collectives(Protocol):
    """The parts of a :class:`~shotcast.collectives.communicator.Communicator` other than its calls."""

    name: str
    rank: int
    world_size: int
    device: torch.device


class BoundCall(Protocol):
    """A call plan that an executor has bound to its kernels; it can run many times with different tensors."""

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
        capacity: the longest message, in bytes, that the workspace is currently laid out for.
        held_bytes: bytes of shared memory that the workspace takes on each rank.
        stopped_word: a word whose ``value`` is 0 until a fault is known. It is gone after :meth:`close`.
    """

    stopped_word: Any

    @property
    def capacity(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    def more_bytes(self, capacity: int) -> int:
        """Return the bytes per rank of a workspace laid out for messages of ``capacity`` bytes."""
        ...

    def bind(self, plan: CallPlan) -> BoundCall: ...
    def variants(self, plan: CallPlan) -> tuple[str, ...]:
        """Return names of the kernels that ``plan`` needs compiled."""
        ...

    def waiting(self, nbytes: int) -> int: ...
    def fault(self) -> Fault | None: ...
    @property
    def stopped(self) -> bool: ...
    def headers(self, epoch: int) -> list[HeaderWords | None]: ...
    def parts(self, epoch: int) -> dict[int, str]:
        """Return the sizes, by rank, that made this rank stop an uneven all_to_all; empty if it did not."""
        ...

    @property
    def epoch(self) -> int: ...
    def set_epoch(self, epoch: int, /) -> None: ...
    def set_timeout(self, timeout_s: float, /) -> None: ...
    def mark_gone(self, rank: int) -> None: ...
    def interrupt(self) -> None: ...
    def keep(self) -> None:
        """Keep the memory that calls now use, because a graph is being captured with its addresses."""
        ...

    @property
    def timeout_s(self) -> float: ...
    def wait(self) -> Wait | None:
        """Return the wait that this rank is in, if any. Any thread may call this; it never blocks."""
        ...

    def awaited(self, wait: Wait, /) -> list[int]:
        """Return the ranks that ``wait`` is for, as far as known. Raises ClosedError."""
        ...

    def idle(self) -> bool: ...
    def drain(self) -> None: ...
    def clear(self, epoch: int) -> None: ...
    def close(self) -> None: ...


class HeaderExchange(Protocol):
    """A kernel that only exchanges the header of a call between all ranks."""

    def load(self) -> None: ...
    def run(self) -> None:
        """Return when all ranks have reached the call, or a fault is known."""
        ...


@runtime_checkable
class KernelExecutor(Executor, Protocol):
    """An executor whose kernels wait on a device."""

    def stop(self, fault: int, /) -> None:
        """Stop this rank's waiting kernels, now and until :meth:`clear`, for a fault found elsewhere.

        ``fault`` is an abort word (:func:`shotcast.wire.encode_fault`). Any thread may call it.
        """
        ...


@runtime_checkable
class MappingExecutor(Executor, Protocol):
    """An executor that creates tensors in memory that all ranks map."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, /) -> torch.Tensor | None:
        """Allocate such a tensor; None if there is no memory for it."""
        ...


@runtime_checkable
class GrowingExecutor(Executor, Protocol):
    """An executor whose workspace starts small and grows."""

    def load(self, call: Any, plans: Sequence[CallPlan], /) -> None:
        """Compile and load the kernels of a bound call, of plans of any size, and of a header exchange."""
        ...

    def header_exchange(self, plan: CallPlan) -> HeaderExchange: ...
    def grow(self, capacity: int) -> None:
        """Enlarge the workspace for messages of ``capacity`` bytes. Collective; raises ConfigError on all ranks."""
        ...
