"""NCCL calls on GPUs, on a separate communicator that can be aborted."""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shotcast import wire
from shotcast.collectives.started import Outcome
from shotcast.collectives.vendor import nccl_library
from shotcast.collectives.vendor.interface import CallError, RefusedError
from shotcast.collectives.vendor.nccl_library import DTYPES, REDUCTIONS, UniqueId, error_text, library
from shotcast.memory import driver
from shotcast.memory.streams import raw_stream
from shotcast.wire import CallPlan, HeaderWords, Op

_BYTES = DTYPES["uint8"]
_WARM_BYTES = (1 << 10, 16 << 20)
"""Sizes of the first calls: NCCL connects ranks on the first use of each algorithm, for small and large messages."""
_LOCK_S = 0.3
"""The time to wait for a thread inside the library before aborting its communicator anyway."""
_DESTROY_S = 5.0
"""The time limit for destroying a communicator; NCCL keeps communicators in captured graphs until these are gone."""


@functools.cache
def _side_stream(device_index: int) -> torch.cuda.ExternalStream:
    """Return the stream of first calls, which no other work uses.

    It is shared, since PyTorch reserves the memory of freed tensors for the stream that allocated them.
    """
    return driver.new_stream(torch.device("cuda", device_index))


class NcclGroup:
    """Ranks connected by NCCL. Construction is collective. Satisfies ``VendorGroup``.

    Calls are enqueued on the current stream. Before and after each call the device writes a count to host memory, so
    :meth:`progress` shows what is waiting, in eager calls and in graph replays. The store serves only this group.
    Construction may take ``connect_s``, and raises CallError if the ranks were not connected; ``interrupted`` raises it
    if construction must stop waiting.
    """

    library = "nccl"

    @torch.inference_mode(False)  # later calls write into its tensors in any mode
    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        device: torch.device,
        connect_s: float,
        interrupted: Callable[[], None],
    ):
        self._rank, self._world_size, self._device = rank, world_size, device
        self._comm = ctypes.c_void_p()
        self._inside = threading.Lock()
        self._stopped = False
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._word = torch.zeros_like(self._count)  # what barriers reduce
        self._marks = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
        self._words = (ctypes.c_int64 * 2).from_address(self._marks.data_ptr())
        torch.cuda.current_stream(device).synchronize()  # the count is zero
        end = Outcome()

        def connect() -> None:
            with torch.cuda.device(device):
                self._connect(store)

        thread = threading.Thread(target=end.run, args=(connect,), name="shotcast-nccl-connect", daemon=True)
        thread.start()
        until = time.monotonic() + connect_s
        try:
            while thread.is_alive():
                thread.join(0.01)
                interrupted()
                if time.monotonic() > until:
                    raise CallError(f"nccl did not connect within {connect_s:g} s")
            if error := end.seen():
                raise CallError(f"nccl did not connect: {error}") from error
        except BaseException:
            self.stop()
            raise

    def _connect(self, store: dist.Store) -> None:
        """Create the communicator and run each operation once, so that later calls do not wait on the host."""
        name = UniqueId()
        if self._rank == 0:
            self._check(library().ncclGetUniqueId(ctypes.byref(name)))
            store.set("id", base64.b64encode(bytes(name)).decode())
        else:
            while not store.check(["id"]) and not self._stopped:
                time.sleep(0.001)
            name = UniqueId.from_buffer_copy(base64.b64decode(store.get("id")))
        comm = ctypes.c_void_p()
        self._check(library().ncclCommInitRank(ctypes.byref(comm), self._world_size, name, self._rank))
        with self._inside:
            self._comm = comm
            if self._stopped:
                self._abort()
                return
        stream = _side_stream(self._device.index)
        with torch.cuda.stream(stream):
            for nbytes in _WARM_BYTES:
                self._warm_up(torch.zeros(nbytes * self._world_size, dtype=torch.uint8, device=self._device))
        stream.synchronize()

    def _warm_up(self, data: torch.Tensor) -> None:
        """Run each operation once in place, ignoring the results."""
        nbytes = data.numel()
        part = data.chunk(self._world_size)[self._rank]
        for op, x, out in (
            (Op.ALL_REDUCE, data, data),
            (Op.REDUCE_SCATTER, data, part),
            (Op.ALL_GATHER, part, data),
            (Op.BROADCAST, data, data),
            (Op.ALL_TO_ALL, data, data),
        ):
            self._enqueue(CallPlan(op, "vendor", "uint8", nbytes), x, out)

    def progress(self) -> tuple[int, int]:
        ended = self._words[1]  # before the other, which is never behind it
        return self._words[0], ended

    def headers(self, own: HeaderWords) -> list[HeaderWords]:
        return [own]

    def set_timeout(self, timeout_s: float) -> None:
        """Do nothing: the watch enforces the deadline."""

    def run(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        asked, reduces = plan, plan.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)
        if reduces:
            plan = _reducible(plan)
        with torch.cuda.device(self._device):
            self._count.add_(1)
            self._mark(0)
            try:
                self._enqueue(plan, x, out)
                if reduces and out is not None and (asked.op is not Op.REDUCE or asked.root == self._rank):
                    _make_true_one(asked, out)
            finally:
                self._mark(1)

    def _mark(self, place: int) -> None:
        """Make the device copy its count into host memory."""
        target = ctypes.c_void_p(self._marks.data_ptr() + 8 * place)
        stream = ctypes.c_void_p(raw_stream(self._device.index))
        source = ctypes.c_uint64(self._count.data_ptr())
        driver.check(
            driver.library().cuMemcpyDtoHAsync_v2(target, source, ctypes.c_size_t(8), stream), "copying a count"
        )

    def _enqueue(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        with self._inside:
            if self._stopped:
                raise CallError("the calls were aborted")
            self._enqueue_inside(plan, x, out)

    def _enqueue_inside(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        nccl, comm, stream = library(), self._comm, raw_stream(self._device.index)
        source = 0 if x is None else x.data_ptr()
        target = 0 if out is None else out.data_ptr()
        nbytes = plan.nbytes
        if plan.op is Op.BARRIER:
            word = self._word.data_ptr()
            self._check(nccl.ncclAllReduce(word, word, 1, DTYPES["int64"], REDUCTIONS["max"], comm, stream))
        elif plan.op is Op.SEND:
            self._check(nccl.ncclSend(source, nbytes, _BYTES, plan.root, comm, stream))
        elif plan.op is Op.RECV:
            self._check(nccl.ncclRecv(target, nbytes, _BYTES, plan.root, comm, stream))
        elif plan.op is Op.BROADCAST:
            self._check(nccl.ncclBroadcast(source, target, nbytes, _BYTES, plan.root, comm, stream))
        elif plan.op in (Op.ALL_TO_ALL, Op.ALL_TO_ALL_UNEVEN):
            equal = [nbytes // self._world_size] * (2 * self._world_size)
            sizes = equal if plan.op is Op.ALL_TO_ALL else [size * wire.DTYPES[plan.dtype] for size in plan.sizes]
            sent_at, received_at = source, target
            with _Grouped(self._check):
                for peer in range(self._world_size):
                    sent, received = sizes[peer], sizes[self._world_size + peer]
                    self._check(nccl.ncclSend(sent_at, sent, _BYTES, peer, comm, stream))
                    self._check(nccl.ncclRecv(received_at, received, _BYTES, peer, comm, stream))
                    sent_at, received_at = sent_at + sent, received_at + received
        elif plan.op is Op.GATHER:
            part = nbytes // self._world_size
            with _Grouped(self._check):
                self._check(nccl.ncclSend(source, part, _BYTES, plan.root, comm, stream))
                for peer in range(self._world_size if self._rank == plan.root else 0):
                    self._check(nccl.ncclRecv(target + peer * part, part, _BYTES, peer, comm, stream))
        elif plan.op is Op.SCATTER:
            part = nbytes // self._world_size
            with _Grouped(self._check):
                for peer in range(self._world_size if self._rank == plan.root else 0):
                    self._check(nccl.ncclSend(source + peer * part, part, _BYTES, peer, comm, stream))
                self._check(nccl.ncclRecv(target, part, _BYTES, plan.root, comm, stream))
        elif plan.op is Op.ALL_GATHER and plan.sizes:
            sizes = [size * wire.DTYPES[plan.dtype] for size in plan.sizes]
            starts = itertools.accumulate(sizes, initial=target)
            with _Grouped(self._check):
                for root, (size, start) in enumerate(zip(sizes, starts, strict=False)):
                    sent = source if root == self._rank else start
                    if size:
                        self._check(nccl.ncclBroadcast(sent, start, size, _BYTES, root, comm, stream))
        elif plan.op is Op.ALL_GATHER:
            self._check(nccl.ncclAllGather(source, target, nbytes // self._world_size, _BYTES, comm, stream))
        else:
            dtype, code = DTYPES[plan.dtype], REDUCTIONS[plan.reduction]
            count = nbytes // wire.DTYPES[plan.dtype]
            if plan.op is Op.ALL_REDUCE:
                self._check(nccl.ncclAllReduce(source, target, count, dtype, code, comm, stream))
            elif plan.op is Op.REDUCE:
                self._check(nccl.ncclReduce(source, target, count, dtype, code, plan.root, comm, stream))
            else:
                assert plan.op is Op.REDUCE_SCATTER
                part = count // self._world_size
                self._check(nccl.ncclReduceScatter(source, target, part, dtype, code, comm, stream))

    def _check(self, result: int) -> None:
        """Raise the error for an NCCL result code: RefusedError for unsupported calls, otherwise CallError."""
        if result == nccl_library.SUCCESS:
            return
        if result in (nccl_library.INVALID_ARGUMENT, nccl_library.INVALID_USAGE) and not self._stopped:
            raise RefusedError(error_text(result))
        raise CallError(error_text(result))

    def check(self) -> None:
        """Ask the library, whose threads notice a broken connection to another host."""
        if self._inside.acquire(blocking=False):  # what a thread is inside of reports by itself
            try:
                result = ctypes.c_int()
                if not self._stopped and self._comm:
                    library().ncclCommGetAsyncError(self._comm, ctypes.byref(result))
                if result.value not in (nccl_library.SUCCESS, nccl_library.IN_PROGRESS):
                    cause = "connection" if result.value == nccl_library.REMOTE_ERROR else "other"
                    raise CallError(error_text(result.value), cause)
            finally:
                self._inside.release()

    def stop(self) -> None:
        """Abort the calls in progress, which ends their kernels. Not collective; never blocks."""
        if self._stopped:
            return
        self._stopped = True

        def abort() -> None:
            held = self._inside.acquire(timeout=_LOCK_S)  # a thread inside may itself wait for a rank
            try:
                self._abort()
            finally:
                if held:
                    self._inside.release()

        threading.Thread(target=abort, name="shotcast-nccl-abort", daemon=True).start()

    def _abort(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            with torch.cuda.device(self._device):
                library().ncclCommAbort(comm)

    def close(self) -> None:
        if self._stopped:
            return
        self._stopped = True

        def destroy() -> None:
            comm, self._comm = self._comm, ctypes.c_void_p()
            with torch.cuda.device(self._device):
                library().ncclCommDestroy(comm)

        thread = threading.Thread(target=destroy, name="shotcast-nccl-destroy", daemon=True)
        thread.start()
        thread.join(_DESTROY_S)


class _Grouped:
    """A context that groups NCCL calls into one operation."""

    def __init__(self, check: Callable[[int], None]):
        self._check = check

    def __enter__(self) -> None:
        self._check(library().ncclGroupStart())

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        result = library().ncclGroupEnd()
        if error is None:
            self._check(result)


def _reducible(plan: CallPlan) -> CallPlan:
    """Return a plan for the same bytes with a dtype and reduction that NCCL supports. Raises RefusedError if none."""
    dtype, reduction = plan.dtype, plan.reduction
    if dtype == "bool":
        # of bytes, of which any but 0 is true; True + True is True, and the result may be any such byte
        dtype = "uint8"
        reduction = {"sum": "max", "bor": "max", "prod": "min", "band": "min"}.get(reduction, reduction)
    elif dtype in ("complex64", "complex128") and reduction in ("sum", "avg"):
        dtype = {"complex64": "float32", "complex128": "float64"}[dtype]
    if dtype not in DTYPES or reduction not in REDUCTIONS:
        raise RefusedError(
            f"nccl has no {plan.reduction} of {plan.dtype}; it has {', '.join(REDUCTIONS)} of {', '.join(DTYPES)} and "
            "bool, and sum and avg of complex numbers"
        )
    return dataclasses.replace(plan, dtype=dtype, reduction=reduction)


def _make_true_one(plan: CallPlan, out: torch.Tensor) -> None:
    """Normalize the bytes of a reduced bool to 0 or 1, since NCCL takes the maximum or minimum of arbitrary bytes.

    Runs in place on the current stream, and is captured with the call.
    """
    if plan.dtype == "bool":
        out.detach().view(torch.uint8).clamp_(max=1)
