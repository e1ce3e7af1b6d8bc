"""Gloo calls on CPU tensors, on separate connections per communicator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shotcast import wire
from shotcast.collectives.reductions import OF_TORCH
from shotcast.collectives.vendor.interface import CallError, RefusedError
from shotcast.memory.members import cause_of
from shotcast.wire import CallPlan, HeaderWords, Op

_REDUCTIONS = {name: getattr(dist.ReduceOp, kind) for kind, name in OF_TORCH.items()}
_REDUCTIONS["avg"] = _REDUCTIONS["sum"]  # which is divided afterwards
_SLICE = timedelta(milliseconds=20)
"""Interval between checks for Ctrl-C and for faults elsewhere while a call waits."""
_SLICE_ENDED = "Operation timed out!"
"""The error text of a wait that ended before the call."""
_OVERTIME_S = 0.3
"""Time from the deadline, which Gloo enforces itself, until the call is given up."""


class _PatientStore(dist.Store):
    """A store that waits by polling.

    PyTorch's wait blocks the process's connection. If two threads connect two groups, each rank could wait for the
    other's keys of one group, while neither can set or read the keys of the other group.
    """

    def __init__(self, store: dist.Store, interrupted: Callable[[], None]):
        super().__init__()
        self._store, self._interrupted = store, interrupted

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=5)) -> None:
        until, pause = time.monotonic() + timeout.total_seconds(), 0.0005
        while not self._store.check(keys):
            self._interrupted()
            if time.monotonic() > until:
                raise dist.DistStoreError(f"wait timeout: keys {', '.join(keys)} were not set")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


class GlooGroup:
    """Ranks connected by Gloo. Construction is collective. Satisfies ``VendorGroup``.

    Tensors of GPUs pass through the host's memory: ranks that share one GPU cannot use NCCL. The store serves only this
    group. Construction may take ``connect_s``; ``interrupted`` raises CallError if a call must stop waiting.
    """

    library = "gloo"

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        connect_s: float,
        interrupted: Callable[[], None],
    ):
        self._rank, self._world_size = rank, world_size
        self._work: Any = None
        self._interrupted = interrupted
        try:
            self._store = _PatientStore(store, interrupted)
            self._group: Any = dist.ProcessGroupGloo(self._store, rank, world_size, timedelta(seconds=connect_s))
        except RuntimeError as error:
            raise CallError(f"gloo did not connect: {error}") from error
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def progress(self) -> tuple[int, int]:
        return 0, 0

    def headers(self, own: HeaderWords) -> list[HeaderWords]:
        mine = torch.tensor(own, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self._world_size)]
        self._wait(lambda: self._group.allgather([rows], [mine]))
        return [HeaderWords(*row.tolist()) for row in rows]

    def run(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        if any(tensor is not None and tensor.is_cuda for tensor in (x, out)):
            self._run_by_host(plan, x, out)
            return
        if plan.op is Op.BARRIER:
            self._wait(lambda: self._group.barrier())
            return
        if plan.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE):
            assert x is not None
            self._reduce(plan, x.view(-1), None if out is None else out.view(-1))
            return
        # data that is only moved is sent as bytes, as the library knows few dtypes
        x = None if x is None else x.view(-1).view(torch.uint8)
        out = None if out is None else out.view(-1).view(torch.uint8)
        self._move(plan, x, out)

    def _run_by_host(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        result = None if out is None else torch.empty_like(out, device="cpu")
        self.run(plan, None if x is None else x.cpu(), result)
        if out is not None and result is not None:
            out.copy_(result)

    def _reduce(self, plan: CallPlan, x: torch.Tensor, out: torch.Tensor | None) -> None:
        if out is None or (plan.op is Op.REDUCE and self._rank != plan.root):
            out = torch.empty_like(x)  # the library writes to all
        # it adds the bytes of bool, and True + True is no bool
        name = "max" if plan.dtype == "bool" and plan.reduction == "sum" else plan.reduction
        x, out, by = _bytes_of_bool(plan, x), _bytes_of_bool(plan, out), dist.ReduceOp(_REDUCTIONS[name])
        if plan.op is Op.REDUCE_SCATTER:
            if plan.dtype == "bool":
                x = x.clamp(max=1)  # a byte that is not 0 is true
            scatter = dist.ReduceScatterOptions()
            scatter.reduceOp = by
            self._wait(lambda: self._group._reduce_scatter_base(out, x, scatter))
        else:
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            if plan.dtype == "bool":
                out.clamp_(max=1)
            options: Any = dist.ReduceOptions() if plan.op is Op.REDUCE else dist.AllreduceOptions()
            options.reduceOp = by
            if plan.op is Op.REDUCE:
                options.rootRank, options.rootTensor = plan.root, 0
            make = self._group.reduce if plan.op is Op.REDUCE else self._group.allreduce
            self._wait(lambda: make([out], options))
        if plan.reduction == "avg":  # which Gloo has not
            (torch.view_as_real(out) if out.is_complex() else out).div_(self._world_size)

    def _move_by_root(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        at_root = self._rank == plan.root
        if plan.op is Op.GATHER:
            gather = dist.GatherOptions()
            gather.rootRank = plan.root
            rows = [list(out.view(self._world_size, -1))] if out is not None and at_root else []
            self._wait(lambda: self._group.gather(rows, [x], gather))
            return
        scatter = dist.ScatterOptions()
        scatter.rootRank = plan.root
        parts = [list(x.view(self._world_size, -1))] if x is not None and at_root else []
        self._wait(lambda: self._group.scatter([out], parts, scatter))

    def _move(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        if plan.op in (Op.SEND, Op.RECV, Op.BROADCAST):
            # A message is a broadcast between two ranks: Gloo's waits for messages cannot be looked into.
            data = x if out is None else out
            assert data is not None
            if plan.op is Op.BROADCAST and x is not None and data.data_ptr() != x.data_ptr():
                data.copy_(x)
            options = dist.BroadcastOptions()
            options.rootRank = self._rank if plan.op is Op.SEND else plan.root
            options.rootTensor = 0
            self._wait(lambda: self._group.broadcast([data], options))
            return
        if plan.op in (Op.GATHER, Op.SCATTER):
            if plan.nbytes:  # the library divides nothing among ranks
                self._move_by_root(plan, x, out)
            else:
                self._wait(lambda: self._group.barrier())
            return
        assert x is not None
        assert out is not None
        if plan.op is Op.ALL_TO_ALL:
            self._wait(lambda: self._group.alltoall_base(out, x, [], []))
            return
        if plan.op is Op.ALL_TO_ALL_UNEVEN:
            scale = wire.DTYPES[plan.dtype]
            sizes = [size * scale for size in plan.sizes]
            sent, received = sizes[: self._world_size], sizes[self._world_size :]
            self._wait(lambda: self._group.alltoall_base(out, x, received, sent))
            return
        assert plan.op is Op.ALL_GATHER
        if not plan.sizes:
            self._wait(lambda: self._group._allgather_base(out, x))
            return
        sizes = [size * wire.DTYPES[plan.dtype] for size in plan.sizes]
        widest = max(sizes)
        if x.numel() < widest:
            x = torch.cat([x, x.new_zeros(widest - x.numel())])
        parts = out.split(sizes)
        rows = list(parts) if min(sizes) == widest else [out.new_empty(widest) for _ in sizes]
        self._wait(lambda: self._group.allgather([rows], [x]))
        if min(sizes) < widest:
            for part, row in zip(parts, rows, strict=True):
                part.copy_(row[: part.numel()])

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            work = begin()
        except (RuntimeError, ValueError, TypeError) as error:
            raise _meaning(error) from error
        self._work = work
        until = time.monotonic() + self._timeout_s + _OVERTIME_S
        while (ended := _end_of(work)) is None:
            if time.monotonic() > until:
                raise CallError("gloo went on after its deadline", "deadline")
            self._interrupted()
        self._work = None
        if isinstance(ended, Exception):
            raise _meaning(ended) from ended

    def check(self) -> None:
        """Do nothing: failed calls raise."""

    def stop(self) -> None:
        group, work, self._group, self._work = self._group, self._work, None, None
        if group is not None and work is not None:
            # to destroy the group would be to wait for its call, which ends at its deadline or when other ranks let go
            threading.Thread(target=_outlive, args=(group, work), name="shotcast gloo", daemon=True).start()

    close = stop


def _bytes_of_bool(plan: CallPlan, x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if plan.dtype == "bool" else x


def _end_of(work: Any) -> Exception | bool | None:
    """Wait briefly for a call. Return True if it is done, the error if it failed, None if it continues."""
    completed = work.is_completed()  # which is never true of some operations
    try:
        work.wait(_SLICE)
    except (RuntimeError, ValueError, TypeError) as error:
        return error if completed or _SLICE_ENDED not in str(error) else None
    return True


def _outlive(group: Any, work: Any) -> None:
    """Hold a group until its call has ended."""
    while _end_of(work) is None:
        pass


def _meaning(error: Exception) -> CallError | RefusedError:
    cause = cause_of(error)
    return CallError(str(error), cause) if cause else RefusedError(str(error))
