"""A transport in one file: ranks are threads of one process, which read each other's tensors where they lie.

A package's own transport has the same parts: an object, an executor, and a field of forms with kernels of algorithms.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shotcast import wire
from shotcast.collectives.algorithm import Algorithm, Algorithms, Form
from shotcast.cost.collective import Work
from shotcast.transport.transport import Built, Ranks, Transport
from shotcast.wire import CallPlan, Fault, HeaderWords, NodeShape, Op, Wait

Kernel = Callable[[Sequence[torch.Tensor], int], torch.Tensor]
"""``kernel(inputs, rank)``: the result of a rank, from the inputs of all."""
_POLL_S = 0.01

# --- the object -------------------------------------------------------------------------------------------------------

LOOPBACK = Transport(
    name="loopback",
    device="cpu",
    field="loopback",
    missing="{name} does not run on threads",
    build=f"{__name__}:build",
)


def build(ranks: Ranks) -> Built:
    """Build the executor of a rank. All ranks are threads of this process."""
    with _meeting:
        hub = _hubs.setdefault(ranks.host.name, Hub(ranks.host.world_size))
    return Built(LoopbackExecutor(ranks, hub))


# --- the algorithm ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackForm(Form):
    """A form whose kernel is for threads."""

    loopback: Kernel


def add_up(inputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Add up in the order of ranks; floats in float32, and rounded once."""
    wide = torch.float32 if inputs[0].is_floating_point() else inputs[0].dtype
    total = inputs[0].to(wide)
    for x in inputs[1:]:
        total = total + x.to(wide)
    return total.to(inputs[0].dtype)


def join(inputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.cat([x.view(-1) for x in inputs])


def _work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    return Work(1, nbytes, nbytes)


DIRECT = Algorithm(
    name="direct",
    label="direct",
    summary="every thread reads the tensors of all others",
    forms={
        Op.ALL_REDUCE: LoopbackForm(work=_work, loopback=add_up),
        Op.ALL_GATHER: LoopbackForm(work=_work, loopback=join, uneven=False),
    },
)

# --- the executor -----------------------------------------------------------------------------------------------------


class Hub:
    """The meeting place of the ranks of a communicator: what each has brought to a call, by (epoch, phase)."""

    def __init__(self, world_size: int):
        self.world_size, self.changed, self.fault = world_size, threading.Condition(), ctypes.c_int64(0)
        self.brought: dict[tuple[int, str], dict[int, Any]] = {}
        self.gone: set[int] = set()

    def stop(self, kind: int, op: int, ranks: Sequence[int], epoch: int) -> None:
        """Stop the calls of all ranks. The first fault stays: it is the cause of those that follow."""
        with self.changed:
            self.fault.value = self.fault.value or wire.encode_fault(kind, op, ranks, epoch)
            self.changed.notify_all()

    def missing(self, place: tuple[int, str]) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.brought.get(place, {})]


_hubs: dict[str, Hub] = {}
_meeting = threading.Lock()


class BoundCall:
    """A call plan with its kernel; without one, as for a call of the vendor library, ranks only compare headers."""

    def __init__(self, executor: LoopbackExecutor, plan: CallPlan, kernel: Kernel | None):
        self._executor, self._plan, self._kernel = executor, plan, kernel

    def load(self) -> None:
        pass

    def run(self, x: torch.Tensor | None, out: torch.Tensor | None, norm: Any = None, sizes: Any = ()) -> None:
        executor, plan = self._executor, self._plan
        if plan.op in (Op.SEND, Op.RECV):
            return  # the library carries messages, and nothing compares their headers here
        executor.epoch += 1
        brought = executor.meet(plan, "begun", (executor.algorithms.header(plan), x))
        if executor.stopped or len({header for header, _ in brought}) > 1:
            executor.hub.stop(wire.MISMATCH, plan.op, range(len(brought)), executor.epoch)
            return
        result = self._kernel([tensor for _, tensor in brought], executor.rank) if self._kernel else None
        executor.meet(plan, "read", None)  # until then, others read what this one may overwrite
        if result is not None and not executor.stopped:
            out = x if out is None else out
            out.view(-1).copy_(result.view(-1))  # type: ignore[union-attr]


class LoopbackExecutor:
    """This rank's side of a communicator, as :class:`shotcast.collectives.interface.Executor` has it."""

    capacity, held_bytes = sys.maxsize, 0

    def __init__(self, ranks: Ranks, hub: Hub):
        self.rank, self.hub, self.timeout_s, self.epoch = ranks.host.rank, hub, ranks.timeout_s, 0
        self.algorithms: Algorithms = ranks.algorithms
        self.stopped_word, self._name, self._wait = hub.fault, ranks.host.name, None

    def bind(self, plan: CallPlan) -> BoundCall:
        field = self.algorithms.form(plan).kernel(LOOPBACK.field)
        return BoundCall(self, plan, field and self.algorithms.kernel(plan, LOOPBACK.field))

    def meet(self, plan: CallPlan, phase: str, mine: Any) -> list[Any]:
        """Return what each rank has brought; nothing after a fault."""
        hub, place, since = self.hub, (self.epoch, phase), time.monotonic()
        with hub.changed:
            hub.brought.setdefault(place, {})[self.rank] = mine
            hub.brought.pop((self.epoch - 2, phase), None)  # all ranks have left that call
            hub.changed.notify_all()
            self._wait = Wait(plan.op.label, self.epoch, since)
            while (missing := hub.missing(place)) and not self.stopped:
                if dead := hub.gone & set(missing):
                    hub.stop(wire.DEAD, plan.op, sorted(dead), self.epoch)
                elif time.monotonic() - since > self.timeout_s:
                    hub.stop(wire.TIMEOUT, plan.op, missing, self.epoch)
                hub.changed.wait(_POLL_S)
            self._wait = None
            return [] if self.stopped else [hub.brought[place][rank] for rank in range(hub.world_size)]

    @property
    def stopped(self) -> bool:
        return self.hub.fault.value != 0

    def fault(self) -> Fault | None:
        return Fault.decode(self.hub.fault.value) if self.stopped else None

    def headers(self, epoch: int) -> list[HeaderWords | None]:
        begun = self.hub.brought.get((epoch, "begun"), {})
        return [begun[rank][0] if rank in begun else None for rank in range(self.hub.world_size)]

    def mark_gone(self, rank: int) -> None:
        self.hub.gone.add(rank)

    def interrupt(self) -> None:
        self.hub.stop(wire.INTERRUPTED, Op.BARRIER, [self.rank], self.epoch)

    def clear(self, epoch: int) -> None:
        self.hub.brought.clear()
        self.hub.fault.value, self.epoch = 0, epoch

    def close(self) -> None:
        _hubs.pop(self._name, None)

    # what there is not, on threads: compilation, parts of unknown sizes, a workspace, graphs, work in the background
    variants = lambda self, plan: ("loopback",)  # noqa: E731
    parts = lambda self, epoch: {}  # noqa: E731
    more_bytes = waiting = lambda self, nbytes: 0
    keep = drain = lambda self: None
    idle = lambda self: True  # noqa: E731
    set_epoch = lambda self, epoch: setattr(self, "epoch", epoch)  # noqa: E731
    set_timeout = lambda self, seconds: setattr(self, "timeout_s", seconds)  # noqa: E731
    wait = lambda self: self._wait  # noqa: E731
    awaited = lambda self, wait: self.hub.missing((wait.epoch, "begun"))  # noqa: E731
