"""The executor for CPU ranks, which runs call plans with compiled host code over POSIX shared memory."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
import math
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shotcast import wire
from shotcast.errors import ClosedError, ConfigError
from shotcast.hardware.detect import available_cores
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.operands import NormTensors
from shotcast.memory.shm import ShmBuffer
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.host_call import LINE_BYTES, HostCall
from shotcast.transport.cpu.norm_rows import put_tensors
from shotcast.transport.cpu.waiting import ABORTED, DONE, INTERRUPTED, MISMATCHED, PARTS_DIFFER, PEER_GONE, TIMED_OUT
from shotcast.transport.transport import Built, Ranks
from shotcast.wire import CallPlan, Fault, Header, HeaderWords, Op, Wait

logger = logging.getLogger(__name__)

_SEND_RECV = (Op.SEND, Op.RECV)

_MIN_GENERATION, _MAX_GENERATION = 16 << 10, 1 << 20
_MIN_PIECE, _MAX_PIECE = 4 << 10, 64 << 10
_SPINS, _SPINS_ON_SHARED_CORES = 200, 20
"""Polls before a rank yields its core: a few microseconds, enough for a running peer to arrive. A core that is yielded
to another job is gone for a time slice. Ranks that share cores yield almost at once, because the peer may need this
core."""
_HEAP_BYTES = 32 << 30
"""Address space for tensors on each rank. Tensors take memory as they are created."""
_GRACE_S = 0.2
_SEEN_S = 0.5
"""A waiting rank updates its heartbeat more often than this."""
_KINDS = {
    TIMED_OUT: wire.TIMEOUT,
    MISMATCHED: wire.MISMATCH,
    PEER_GONE: wire.DEAD,
    INTERRUPTED: wire.INTERRUPTED,
    PARTS_DIFFER: wire.PARTS_DIFFER,
}
"""The kind of fault for each status of a schedule."""


def fill_with_nan(tensor: torch.Tensor | None) -> None:
    """Overwrite the output of a failed call, if it has one and is of floats."""
    if tensor is None:
        return
    if tensor.dtype is torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))


def _words_at(address: int) -> list[int]:
    return list((ctypes.c_uint64 * 2).from_address(address))


def parts_of(plan: CallPlan, world_size: int) -> list[int]:
    """Compute the bytes of each rank's part of the output."""
    itemsize = wire.DTYPES[plan.dtype] if plan.op is not Op.BARRIER else 1
    return [size * itemsize for size in plan.sizes[-world_size:]] or [plan.nbytes // world_size] * world_size


class CpuBoundCall:
    """A call with its compiled function and its record, in which tensor addresses and part sizes are still open."""

    __slots__ = ("_executor", "_function", "_record", "_record_address", "call", "plan")

    def __init__(self, executor: CpuExecutor, plan: CallPlan, call: HostCall):
        self._executor, self.plan, self.call = executor, plan, call
        self._function: Callable[[int, int, int, int], int] | None = None
        self._record = array("q")
        self._record_address = 0

    def run(
        self,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        norm: NormTensors | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """Run the call on contiguous CPU tensors; block until it is done or has failed (:meth:`CpuExecutor.fault`).

        ``x`` and ``out`` have the sizes given by the plan; pass None for a tensor that the operation lacks. Without
        ``out``, a broadcast or all_reduce is in place. Fused operations write the tensors in ``norm``, and no ``out``.
        For an uneven all_to_all, ``sizes`` replace the plan's sizes. Raises ClosedError.
        """
        executor, plan = self._executor, self.plan
        if self._function is None or executor.closed:
            self.load()
        if sizes and not self.call.header_only:
            executor.put_sizes(self._record, plan, sizes)
        assert self._function is not None
        if norm is not None and plan.norm is not None:
            put_tensors(executor.context, norm, plan.norm)
        elif self.call.norms:
            raise ConfigError(f"{plan.op.label}: the residual and what else belongs to the norm is missing")
        source = 0 if x is None else x.data_ptr()
        target = source if out is None or out is x else out.data_ptr()
        interruption: BaseException | None = None
        try:
            status = self._function(executor.context_address, self._record_address, source, target)
        except BaseException as error:  # a signal handler raised while the compiled code waited, or just afterwards
            status, interruption = INTERRUPTED, error
        if status != DONE:
            executor.fail(status, dataclasses.replace(plan, sizes=sizes) if sizes else plan, self.header)
            if norm is None:
                in_place = out is None and plan.op in (Op.ALL_REDUCE, Op.BROADCAST)
                written = [x if in_place else out]
            else:
                # A dynamic scale is an output; a static one belongs to the caller.
                by_row = plan.norm is not None and plan.norm.quantize == "dynamic"
                written = [norm.new_residual, norm.normed, norm.quantized, norm.scale if by_row else None]
            for tensor in written:
                fill_with_nan(tensor)
        if interruption is not None:
            raise interruption

    def load(self) -> None:
        """Compile or load the call's functions, and write its record. Raises ClosedError."""
        if self._executor.closed:
            raise ClosedError("this communicator was closed")
        self._record = self._executor.record(self.plan, self.call)
        self._record_address = self._record.buffer_info()[0]
        self._function = self.call.schedule.get()

    @property
    def header(self) -> HeaderWords:
        return HeaderWords(*self._record[layout.HEADER // 8 : layout.HEADER // 8 + 2])


class CpuExecutor:
    """Runs the calls of a communicator whose ranks are processes on one machine.

    Construction is collective. Each rank takes at most ``max_bytes`` of shared memory. It needs at least about 200 KiB
    and at most about 4 MiB, regardless of message size: messages pass through it in chunks that stay in cache. The
    constructor raises the errors of :class:`ShmBuffer`.

    A call does not raise if its peers are late or make a different call: it ends with :meth:`fault` set on all ranks
    and NaN in a floating-point ``out``, until :meth:`clear`. An executor runs one call at a time.
    """

    kind = "cpu"
    """The part of an algorithm's description that holds its compiled code."""
    heap_nbytes = _HEAP_BYTES

    def __init__(self, group: StoreGroup, max_bytes: int, timeout_s: float, algorithms: Any):
        self._rank, self._world_size = group.rank, group.world_size
        self._sender = group.rank  # as headers name it
        self._algorithms = algorithms
        world_size = self._world_size
        piece = max(_MIN_PIECE, min(_MAX_PIECE, max_bytes // (16 * world_size))) // LINE_BYTES * LINE_BYTES
        outboxes = world_size * layout.OUTBOX_SLOTS * (piece + layout.OUTBOX_HEADER_BYTES)
        generation = max(_MIN_GENERATION, min(_MAX_GENERATION, (max_bytes - outboxes) // 2))
        self._generation = generation // 4096 * 4096

        self.capacity = sys.maxsize
        workspace = layout.CONTROL_BYTES + 2 * self._generation + outboxes
        self._buffer = ShmBuffer(group, workspace, self.heap_nbytes)
        self.held_bytes = self._buffer.nbytes
        regions = self._buffer.addresses
        self.context = array("q", [0] * layout.CONTEXT_WORDS)
        self.context_address = self.context.buffer_info()[0]
        self._set(layout.RANK, self._rank)
        self._set(layout.WORLD, world_size)
        self._set(layout.SPINS, _SPINS if world_size <= available_cores() else _SPINS_ON_SHARED_CORES)
        self._set(layout.GENERATION, self._generation)
        self._set(layout.OUTBOX_CHUNK, piece)
        for rank, address in enumerate(regions):
            self._set(layout.REGIONS + 8 * rank, address)
        self.set_timeout(timeout_s)

        self._regions = regions
        self._abort_words = [ctypes.c_uint64.from_address(address + layout.ABORT) for address in regions]
        abort_word = self.stopped_word = self._abort_words[self._rank]
        self._heap = self._buffer.heap
        if self._heap is not None:
            self._set(layout.HEAP, self._heap.start)
            self._set(layout.HEAP_END, self._heap.end)
            self._heap.is_stopped = lambda: abort_word.value != 0  # the heap may outlive this executor
        self._message_headers: tuple[int, list[HeaderWords | None]] | None = None
        self._parts: tuple[int, dict[int, str]] = (0, {})
        self._marking = threading.Lock()
        self._looking = threading.Lock()  # held while another thread reads shared memory
        self.closed = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        if self.closed:
            raise ClosedError("this communicator was closed")
        heap = self._heap
        return None if heap is None else heap.empty(shape, dtype)

    # -- calls ---------------------------------------------------------------------------------------------------

    def bind(self, plan: CallPlan) -> CpuBoundCall:
        """Bind a plan to a call that can be repeated.

        Raises ConfigError if there is no such algorithm, peer or row, and UnsupportedError for an unsupported dtype.
        """
        return CpuBoundCall(self, plan, self._call_of(plan, self.kind, self._world_size))

    def _call_of(self, plan: CallPlan, kind: str, ranks: int) -> HostCall:
        """Look up the host call of a plan between ``ranks`` ranks. Raises the errors of :meth:`bind`."""
        call: HostCall = self._algorithms.kernel(plan, kind)
        if ranks == 1 and call.alone is not None:
            call = call.alone
        if plan.op in _SEND_RECV and not (0 <= plan.root < ranks and plan.root != self._sender):
            raise ConfigError(f"{plan.op.label}: rank {plan.root} is no peer of rank {self._sender}")
        if call.norms:
            self._check_rows(plan)
        call.arithmetic(plan)
        return call

    def variants(self, plan: CallPlan) -> tuple[str, ...]:
        norm = "" if plan.norm is None else f"{plan.norm.kind} of {plan.norm.weight or plan.dtype}"
        return (f"{plan.op.label}/{plan.algorithm}/{plan.dtype}/{plan.reduction}/{norm}",)

    def record(self, plan: CallPlan, call: HostCall) -> array[int]:
        """Build the record of a call as compiled code reads it. This compiles or loads the arithmetic."""
        # The header of a message names its sender on both sides.
        header = self._algorithms.header(dataclasses.replace(plan, root=self._sender) if plan.op is Op.SEND else plan)
        itemsize = wire.DTYPES[plan.dtype] if plan.op is not Op.BARRIER else 1
        record = array("q", [0] * layout.PLAN_WORDS)

        def put(offset: int, value: int) -> None:
            record[offset // 8] = value

        put(layout.HEADER, header.size)
        put(layout.HEADER + 8, header.call)
        put(layout.NBYTES, 0 if call.header_only else plan.nbytes)
        put(layout.CHUNK, self._chunk_bytes(plan, call))
        put(layout.ROOT, plan.root)
        put(layout.ITEMSIZE, itemsize)
        for offset, arithmetic in call.arithmetic(plan).items():
            put(offset, arithmetic.address())
        if plan.norm is not None:
            put(layout.HIDDEN, plan.norm.hidden)
        if not call.header_only:
            self._put_parts(record, plan)
        return record

    def _put_parts(self, record: array[int], plan: CallPlan) -> None:
        """Write the offset and the size in bytes of each rank's part."""
        if plan.op is Op.ALL_TO_ALL_UNEVEN:
            record.extend([0] * 2 * self._world_size)
            self.put_sizes(record, plan, plan.sizes)
            return
        sizes = parts_of(plan, self._world_size)
        for rank, (size, end) in enumerate(zip(sizes, itertools.accumulate(sizes), strict=True)):
            record[layout.EXTENTS // 8 + rank] = size
            record[layout.OFFSETS // 8 + rank] = end - size

    def put_sizes(self, record: array[int], plan: CallPlan, sizes: Sequence[int]) -> None:
        """Write the parts of an uneven all_to_all, from elements sent to each rank, then received from each."""
        item = wire.DTYPES[plan.dtype]
        end, at = 0, layout.PARTS // 8
        for size in sizes[: self._world_size]:
            record[at], record[at + 1] = end, size * item
            end, at = end + size * item, at + 2
        end, extent, offset = 0, layout.EXTENTS // 8, layout.OFFSETS // 8
        for rank, size in enumerate(sizes[self._world_size :]):
            record[extent + rank], record[offset + rank] = size * item, end
            end += size * item

    def _check_rows(self, plan: CallPlan) -> None:
        hidden = 0 if plan.norm is None else plan.norm.hidden
        if hidden < 1 or plan.nbytes % (hidden * wire.DTYPES[plan.dtype]):
            raise ConfigError(
                f"{plan.op.label} takes whole rows of at least one element: {plan.nbytes} bytes of {plan.dtype} are no "
                f"rows of {hidden}"
            )

    def _chunk_bytes(self, plan: CallPlan, call: HostCall) -> int:
        """Compute the bytes of a pipeline step: the plan's value or the default, limited to what a generation holds."""
        most, default, multiple = call.chunk(plan, self._world_size, self._generation)
        chunk = min(plan.launch.chunk_bytes or default, most)
        row = plan.norm.hidden * wire.DTYPES[plan.dtype] if plan.norm is not None else 0
        if 0 < row <= chunk:
            # Whole rows, so that each one is normalized in the step that sums it.
            return chunk // row * row
        return max(multiple, chunk // multiple * multiple)

    # -- faults --------------------------------------------------------------------------------------------------

    def fault(self) -> Fault | None:
        if self.closed or not (word := self.stopped_word.value):
            return None
        return Fault.decode(word)

    @property
    def stopped(self) -> bool:
        return self.fault() is not None

    def waiting(self, nbytes: int) -> int:
        """Compute how many messages of ``nbytes`` may sit in an outbox while their sender continues."""
        return layout.OUTBOX_SLOTS // max(1, math.ceil(nbytes / self.context[layout.OUTBOX_CHUNK // 8]))

    def headers(self, epoch: int) -> list[HeaderWords | None]:
        """Collect each rank's header of call ``epoch``, None for a rank that has not made that call; after a mismatch
        between a send and a recv, the receiver gets those of the two ranks.
        """
        if self.closed:
            raise ClosedError("this communicator was closed")
        if self._message_headers is not None and self._message_headers[0] == epoch:
            return list(self._message_headers[1])
        cells = (_words_at(address + layout.HEADERS + 16 * (epoch & 1)) for address in self._regions)
        return [HeaderWords.of_cells(pair, epoch) for pair in cells]

    def wait(self) -> Wait | None:
        with self._looking:
            if self.closed:
                return None
            seen_s = (time.monotonic_ns() - self._word(self._rank, layout.HEARTBEAT)) / 1e9
            deadline = self.context[layout.DEADLINE // 8]
            if seen_s > _SEEN_S or not deadline:
                return None
            since = (deadline - self.context[layout.TIMEOUT // 8]) / 1e9
            peer = self._word(self._rank, layout.WAITS_FOR) - 1
            if peer >= 0:
                return Wait("send or recv", 0, since, (self._known(peer),))
            epoch = self.epoch
            header = CpuExecutor.headers(self, epoch)[self._rank]
            return None if header is None else Wait(Header.decode(header).op, epoch, since)

    def awaited(self, wait: Wait) -> list[int]:
        with self._looking:
            return list(wait.peers) or self._absent()

    def _known(self, rank: int) -> int:
        """Map a rank in the shared memory to its rank in the communicator."""
        return rank

    def _word(self, rank: int, offset: int) -> int:
        return ctypes.c_int64.from_address(self._regions[rank] + offset).value

    def _progress(self, rank: int) -> int:
        return self._word(rank, layout.PROGRESS)

    def fail(self, status: int, plan: CallPlan, header: HeaderWords) -> None:
        """Tell all ranks why a call on this rank failed."""
        if status != ABORTED:
            if status == INTERRUPTED:
                guilty = [self._rank]
            elif plan.op in _SEND_RECV:
                guilty = [plan.root]
                if status == MISMATCHED:
                    self._keep_message_headers(plan, header)
            elif status == PEER_GONE:
                gone = [rank for rank in range(self._world_size) if self.context[layout.GONE // 8] >> rank & 1]
                guilty = [rank for rank in gone if rank in self._absent()] or gone
            elif status == TIMED_OUT:
                guilty = self._absent()
            elif status == PARTS_DIFFER:
                guilty = self._keep_parts(plan)
            else:
                guilty = self._differing()
            self._stop(wire.encode_fault(_KINDS[status], int(plan.op), guilty, self.epoch))

    def _stop(self, word: int) -> None:
        self._mark_fault(word)
        logger.info("rank %d stops: %s", self._sender, self.fault())

    def _mark_fault(self, word: int) -> None:
        """Stop the calls of the ranks in this memory. The first fault is kept, as it is the cause of later ones."""
        for abort_word in self._abort_words:
            if abort_word.value == 0:
                abort_word.value = word

    def interrupt(self) -> None:
        """End the current call on all ranks with a fault that names this rank. Any thread may call it."""
        if self.closed:
            return
        header = CpuExecutor.headers(self, self.epoch)[self._rank]
        op = Op.BARRIER if header is None else Op(header.call >> wire.OP_AT & 63)
        self._stop(wire.encode_fault(wire.INTERRUPTED, int(op), [self._sender], self.epoch))

    def _absent(self) -> list[int]:
        """List the ranks that have not reached this call or, if all have, the ranks that are furthest behind in it."""
        peers = [rank for rank in range(self._world_size) if rank != self._rank]
        headers = self.headers(self.epoch)
        absent = [rank for rank in peers if headers[rank] is None]
        if absent:
            return absent
        own = self._progress(self._rank)
        behind = {rank: self._progress(rank) - own for rank in peers}
        return [rank for rank in peers if behind[rank] == min(behind.values())]

    def _differing(self) -> list[int]:
        """List the ranks whose header is not the most frequent one, after a short wait for missing headers."""
        until = time.monotonic() + min(_GRACE_S, self.timeout_s / 2)
        headers = self.headers(self.epoch)
        while None in headers and time.monotonic() < until and not self.stopped_word.value:
            time.sleep(0.001)
            headers = self.headers(self.epoch)
        known = [header for header in headers if header is not None]
        usual = max(known, key=known.count)
        return [rank for rank, header in enumerate(headers) if header is not None and header != usual]

    def _keep_parts(self, plan: CallPlan) -> list[int]:
        """Record which part has a different size than this rank expects, and return its sender."""
        peer, sent = (self.context[word // 8] for word in (layout.PARTS_PEER, layout.PARTS_SENT))
        item = wire.DTYPES[plan.dtype]
        expected = plan.sizes[self._world_size + peer]
        self._parts = (
            self.epoch,
            {
                peer: f"sends {sent // item} of {plan.dtype} to rank {self._rank}",
                self._rank: f"expects {expected} from rank {peer}",
            },
        )
        return [peer]

    def parts(self, epoch: int) -> dict[int, str]:
        return self._parts[1] if self._parts[0] == epoch else {}

    def _keep_message_headers(self, plan: CallPlan, header: HeaderWords) -> None:
        sender, receiver = plan.root, self._rank
        received = self._word(receiver, layout.RECEIVED + layout.LINE * sender)
        slot_bytes = layout.OUTBOX_HEADER_BYTES + self.context[layout.OUTBOX_CHUNK // 8]
        slot = receiver * layout.OUTBOX_SLOTS + received % layout.OUTBOX_SLOTS
        address = self._regions[sender] + layout.CONTROL_BYTES + 2 * self._generation + slot * slot_bytes
        headers: list[HeaderWords | None] = [None] * self._world_size
        headers[sender] = HeaderWords.of_cells(_words_at(address))
        headers[receiver] = header
        self._message_headers = (self.epoch, headers)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of collective calls started so far, counted from 1; 64 bits."""
        return self.context[layout.EPOCH // 8]

    def set_epoch(self, value: int) -> None:
        self._set(layout.EPOCH, value)

    def set_timeout(self, seconds: float) -> None:
        """Make every later call fail after it has waited ``seconds`` for its peers."""
        if not seconds > 0:
            raise ConfigError(f"a timeout is more than 0 seconds: {seconds}")
        self.timeout_s = min(seconds, 1e9)
        self._set(layout.TIMEOUT, int(self.timeout_s * 1e9))

    def mark_gone(self, rank: int) -> None:
        """End current and future calls that wait for ``rank``, whose process has ended. Any thread may call it."""
        with self._marking:
            self._set(layout.GONE, self.context[layout.GONE // 8] | 1 << rank)

    def more_bytes(self, capacity: int) -> int:
        return 0

    def keep(self) -> None:
        """Do nothing: no graph has these addresses."""

    def idle(self) -> bool:
        return True

    def drain(self) -> None:
        """Return at once, since calls block."""

    def clear(self, epoch: int) -> None:
        """Clear faults, headers, progress and messages, and set the number of the last call to ``epoch``.

        Call it on every rank, between two host barriers.
        """
        if self.closed:
            raise ClosedError("this communicator was closed")
        ctypes.memset(self._regions[self._rank], 0, layout.CONTROL_BYTES)
        if self._heap is not None:
            self._heap.resume()
        self._message_headers = None
        self._set(layout.STEP, 0)
        self._set(layout.EPOCH, epoch)

    def close(self) -> None:
        """Free the shared memory. A second call does nothing. Do not close during a call."""
        with self._looking:
            if self.closed:
                return
            self.closed = True
            self._heap = None  # live tensors keep it alive
            self._buffer.close()

    def _set(self, offset: int, value: int) -> None:
        self.context[offset // 8] = value


def build(ranks: Ranks) -> Built:
    """Build the executor for CPU ranks on one host."""
    if why := ranks.beyond(wire.MAX_WORLD_SIZE):
        return Built(None, why)
    return Built(CpuExecutor(ranks.host, ranks.max_bytes, ranks.timeout_s, ranks.algorithms))
