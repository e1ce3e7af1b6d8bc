"""The executor that runs call plans with the Triton kernels: on a GPU, or on CPU ranks under Triton's interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import operator
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from shotcast import wire
from shotcast.device.triton.intrinsics import INTERPRETED
from shotcast.device.triton.launch import Launch, load_all
from shotcast.errors import ConfigError
from shotcast.kernels.triton.norm import norm_addresses
from shotcast.memory import driver
from shotcast.memory.arena import Lease, arena_of
from shotcast.memory.block_heap import BlockHeap, GpuBlock, HostBlock
from shotcast.memory.operands import NormTensors
from shotcast.memory.streams import current_device, raw_stream
from shotcast.memory.symmetric import raise_failures, shortage
from shotcast.transport.transport import Ranks
from shotcast.transport.triton import barrier, layout
from shotcast.transport.triton.barrier import gate_of
from shotcast.transport.triton.binding import TENSORS, Enqueue, EnqueuedCall, KernelLaunch
from shotcast.transport.triton.layout import WorkspaceLayout, bytes_of_copies
from shotcast.transport.triton.workspace import GpuWorkspace
from shotcast.units import align_up
from shotcast.wire import CallPlan, Fault, HeaderWords, Op, Wait

if TYPE_CHECKING:
    from shotcast.memory.nvshmem import HeapLease

_SETTLE_S = 0.3
"""The time from the end of a process to the mark that ends waits for it. Within that time, a program that looked
for a word before the rank sent it and ended looks again."""


class _Piece(NamedTuple):
    """One kernel of a call, or everything that copy engines do, for the tensors from byte ``start`` on.

    ``gate`` is launched before it, unless it is None.
    """

    gate: Launch | None
    launch: Enqueue
    start: int


class TritonBoundCall:
    """A call with its kernels, still open for tensor addresses and for the sizes of parts that only two ranks know."""

    __slots__ = ("_executor", "_of_sizes", "_pieces", "_plan", "_sizes", "_tensors")

    def __init__(self, executor: TritonExecutor, plan: CallPlan):
        self._executor, self._plan = executor, plan
        self._pieces: dict[bool, tuple[_Piece, ...]] = {}
        self._tensors = ""
        self._sizes = plan.sizes if plan.op is Op.ALL_TO_ALL_UNEVEN else ()
        self._of_sizes: Callable[[tuple[int, ...]], Sequence[int]] | None = None

    def run(
        self,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        norm: NormTensors | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """Launch the kernels on the current stream. ``x`` and ``out`` must be contiguous and of the plan's sizes.

        The tensors of a fused call (``norm``), and its ``x``, must begin at multiples of 16 bytes. ``sizes`` replace
        the plan's in an uneven all_to_all.
        """
        executor = self._executor
        own = executor.own_address
        # an address that no kernel uses must still be one
        source = (x.data_ptr() if x is not None else 0) or own
        target = (out.data_ptr() if out is not None else 0) or own
        stream = 0
        if not INTERPRETED:
            index = executor.device.index
            if current_device() != index:
                with torch.cuda.device(executor.device):
                    self.run(x, out, norm, sizes)
                return
            stream = raw_stream(index)
        aligned = not (source | target) & 15
        if sizes := sizes or self._sizes:
            aligned = aligned and not wire.DTYPES[self._plan.dtype] * functools.reduce(operator.or_, sizes) & 15
        pieces = self._pieces.get(aligned) or self._bind(aligned)
        for gate, launch, start in pieces:
            if gate is not None:
                gate(stream, ())
            if self._tensors == "x and out":
                launch(stream, (source + start, target + start))
            elif self._tensors == "x and out in place":
                launch(stream, (source + start, target + start, *executor.places(source + start, target + start)))
            elif self._of_sizes is not None:
                launch(stream, (source, target, *self._of_sizes(sizes)))
            elif self._tensors == "x and norm":
                assert norm is not None
                launch(stream, (source, *norm_addresses(norm, own)))
            else:
                launch(stream, {"x": (source,), "out": (target,), "none": ()}[self._tensors])

    def load(self) -> None:
        """Compile every form of the kernels that the call may need on any rank, and load them."""
        if not INTERPRETED:
            self._executor.load_kernels(self.launches())

    def launches(self) -> list[Enqueue]:
        """Return every form of what the call may enqueue on any rank."""
        pieces = [piece for aligned in (True, False) for piece in self._pieces.get(aligned) or self._bind(aligned)]
        return [each for gate, launch, _ in pieces for each in (gate, launch) if each is not None]

    def _bind(self, aligned: bool) -> tuple[_Piece, ...]:
        pieces = []
        for plan, start in self._executor.pieces(self._plan):
            bound = self._executor.kernel(plan, aligned)
            self._tensors = bound.tensors
            if isinstance(bound, EnqueuedCall):
                pieces.append(_Piece(None, bound.enqueue, start))
                continue
            self._of_sizes = bound.of_sizes
            launch = _launch(bound)
            pieces.append(_Piece(self._executor.gate(plan, launch), launch, start))
        self._pieces[aligned] = tuple(pieces)
        return self._pieces[aligned]


def _launch(bound: KernelLaunch) -> Launch:
    """Prepare the launch that enqueues a kernel, given the addresses of its tensors."""
    return Launch(bound.kernel, bound.programs, bound.arguments, TENSORS[bound.tensors], bound.options)


class TritonHeaderExchange:
    """A header exchange that the host waits for."""

    __slots__ = ("_device", "launch")

    def __init__(self, launch: Launch, device: torch.device):
        self.launch, self._device = launch, device

    def load(self) -> None:
        with _current(self._device):
            self.launch.load()

    def run(self) -> None:
        with _current(self._device):
            self.launch(0 if INTERPRETED else raw_stream(self._device.index), ())
        _wait_for_stream(self._device)


def _current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a GPU the current device within the context."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _host_words(device: torch.device) -> torch.Tensor:
    """Return the words of host memory that kernels of ``device`` store to and read."""
    words = torch.zeros(layout.HOST_WORDS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    _words_in_use[words.data_ptr()] = words
    return words


_words_in_use: dict[int, torch.Tensor] = {}
"""Host words by address, kept until their executor is closed. If it never is, kernels may go on storing there."""


def _interrupted(executor: TritonExecutor | None, number: int) -> None:
    """Tell an executor, if it still exists, that a rank was interrupted, but not on the thread that listens for all."""
    if executor is not None:
        threading.Thread(
            target=executor.interrupted_by, args=(number,), name="shotcast interrupted", daemon=True
        ).start()


def _wait_for_stream(device: torch.device) -> None:
    """Wait only for the current stream: kernels on other streams may wait for calls that this rank has yet to make."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class TritonExecutor:
    """This rank's side of a communicator whose calls are Triton kernels.

    It begins with a workspace for messages up to :data:`.layout.FIRST_CAPACITY`, and gets larger ones when calls need
    them (:meth:`grow`). All collective calls use the last workspace, so calls of different sizes meet there, and are
    found to differ. The first one stays for send and recv, whose messages may lie in its mailboxes, and those in
    between if captured graphs use them. Ranks on ``cpu`` need Triton's interpreter (TRITON_INTERPRET=1 at import). The
    ``nodes`` have equally many consecutive ranks. ``lease(nbytes)`` provides symmetric memory. Construction is
    collective; it raises ConfigError on all ranks if one has too little memory.

    Attributes:
        workspaces: the first, those that captured graphs use, and the one for collective calls, in ascending size.
        own_address: the address of this rank's region in the first workspace.
    """

    _puts = False
    """Ranks of other nodes are reached by staged puts."""
    _clears = 0
    """The number of resets so far, the same on all ranks."""

    def __init__(self, ranks: Ranks, lease: Callable[[int], Lease | HeapLease], nodes: int = 1):
        group, device, exclusive = ranks.host, ranks.device, ranks.exclusive
        self._rank = group.rank
        self._place_on_host = ranks.place_on_host
        on_gpu = device.type == "cuda"
        if on_gpu == INTERPRETED:
            where = "the interpreter (TRITON_INTERPRET=1)" if INTERPRETED else "a GPU"
            raise ConfigError(f"Triton was imported to run kernels on {where}; it cannot serve {device.type} ranks now")
        self._lease, self._group, self._capacities = lease, group, layout.capacities(ranks.max_bytes)
        self.device = device
        self._algorithms, self._nodes, self._exclusive = ranks.algorithms, nodes, exclusive
        failure = ""
        try:
            self._use_words(_host_words(device))
            self._blocks = torch.zeros(wire.MAX_WORLD_SIZE * layout.BLOCKS, dtype=torch.int64, device=device)
            if on_gpu:
                driver.side_stream(device.index)  # made here, as other threads have no context
        except RuntimeError as error:
            failure = shortage(device, "a communicator", error)
        raise_failures(group, failure)
        self.timeout_s = ranks.timeout_s
        self._wait: Wait | None = None
        self._awaited: Sequence[int] = ()
        self._marking, self._closed = threading.Lock(), False
        self._watch = ranks.peers
        if ranks.peers is not None:
            me = weakref.ref(self)
            ranks.peers.hear("interrupted", lambda number, _: _interrupted(me(), number))
        self.workspaces: list[GpuWorkspace] = []
        self.heap = self._block_heap(ranks)
        self._captured = False
        self.capacity = 0
        self.grow(1)
        self.own_address = self.workspaces[0].context.own_address
        arena_of(device).count(exclusive, 1)

    def _block_heap(self, ranks: Ranks) -> BlockHeap | None:
        """Make the heap for tensors in memory that all ranks map; None for puts."""
        if ranks.peers is None or self._puts or self._group.world_size == 1:
            return None
        address, index = self._blocks.data_ptr(), self.device.index

        def tell(rank: int, number: int, place: int) -> None:
            word = address + 8 * (rank * layout.BLOCKS + number)
            if INTERPRETED:
                ctypes.c_int64.from_address(word).value = place
                return
            driver.side_stream(index).write_word(word, place)
            driver.side_stream(index).read_words(word, 1)  # it is there before another rank hears of it

        make = HostBlock if INTERPRETED else functools.partial(GpuBlock, self.device)
        current = None if INTERPRETED else functools.partial(torch.cuda.current_stream, self.device)
        group = self._group
        heap = BlockHeap(ranks.peers, group.rank, group.world_size, layout.BLOCKS, make, tell, current)
        stopped = self.stopped_word
        heap.is_stopped = lambda: stopped.value != 0
        return heap

    def _use_words(self, words: torch.Tensor) -> None:
        self._host_words = words
        self.stopped_word, self._gone_word, self._wait_word = (
            ctypes.c_int64.from_address(words.data_ptr() + 8 * at)
            for at in (layout.HOST_FAULT, layout.HOST_GONE, layout.HOST_WAIT)
        )

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        if self.heap is None or (not INTERPRETED and torch.cuda.is_current_stream_capturing()):
            return None
        with _current(self.device):
            return self.heap.empty(shape, dtype)

    # -- calls ------------------------------------------------------------------------------------------------------

    def bind(self, plan: CallPlan) -> TritonBoundCall:
        return TritonBoundCall(self, plan)

    def kernel(self, plan: CallPlan, aligned: bool) -> KernelLaunch | EnqueuedCall:
        """Return the kernel of a piece, or of a plan whose message fits the last workspace.

        Raises ConfigError if the workspace has no room for it yet.
        """
        if plan.capacity > self.capacity:
            raise ConfigError(
                f"{plan.op.label} needs a workspace for messages of {plan.capacity} bytes, not {self.capacity}"
            )
        return self._kernel(plan, aligned)

    def _kernel(self, plan: CallPlan, aligned: bool) -> KernelLaunch | EnqueuedCall:
        workspace = self.workspaces[0 if plan.op in (Op.SEND, Op.RECV) else -1]
        context = dataclasses.replace(workspace.context, aligned=aligned)
        bound: KernelLaunch | EnqueuedCall = self._algorithms.kernel(plan, "triton")(plan, context)
        return bound

    def load(self, call: TritonBoundCall, plans: Sequence[CallPlan]) -> None:
        """Load a call, a header exchange, and the kernels of plans of any size for tensors at multiples of 16 bytes.

        CUDA loads no kernel while another runs, so calls load what later ones may need next to waiting kernels.
        """
        bound = [self._kernel(plan, True) for plan in plans]
        others = [each.enqueue if isinstance(each, EnqueuedCall) else _launch(each) for each in bound]
        self.load_kernels([*call.launches(), self.header_exchange(plans[0]).launch, *others])

    def load_kernels(self, calls: Sequence[Enqueue]) -> None:
        """Compile and load the kernels of calls."""
        with _current(self.device):
            load_all([launch for call in calls for launch in call.launches], *self._place_on_host)

    def gate(self, plan: CallPlan, launch: Launch) -> Launch | None:
        """Return the gate of a plan or a piece, or None if its kernel may wait for other ranks."""
        # a message waits for one rank, in few programs (send_recv.py)
        return None if self._exclusive or plan.op in (Op.SEND, Op.RECV) else gate_of(launch)

    def variants(self, plan: CallPlan) -> tuple[str, ...]:
        """Return a name for each kernel of ``plan``, formed from everything that decides its compile-time values."""
        shape, context = plan.launch, self.workspaces[0].context
        # parts to and from a root are as large as those of an all_gather
        alike = dataclasses.replace(plan, op=Op.ALL_GATHER) if plan.op in (Op.GATHER, Op.SCATTER) else None
        pieces = [alike] if alike is not None else [piece for piece, _ in self.pieces(plan)]
        parts = [plan.op.label, plan.algorithm, plan.dtype, plan.reduction, shape.block_words, shape.num_warps]
        parts += [plan.norm.hidden, plan.norm.code, shape.chunk_bytes] if plan.norm else []
        name = "/".join(map(str, parts))
        kinds = {(context.clears(piece), context.unit(piece), context.in_one_step(piece)) for piece in pieces}
        return tuple(f"{name}/{kind}" for kind in sorted(kinds))

    def pieces(self, plan: CallPlan) -> list[tuple[CallPlan, int]]:
        """Return the calls that make up ``plan``, with the byte at which each begins.

        There are several if a message exceeds the workspace that it is planned for and the algorithm divides it, or if
        it exceeds the slots between nodes. They are equally long, since the programs of a piece clear the slots of the
        one before.
        """
        form = self._algorithms.form(plan)
        capacity = next(size for size in self._capacities if size >= plan.capacity)
        most = self._layout(capacity).piece_bytes if form.between_nodes else layout.piece(plan.dtype, capacity)
        if plan.nbytes <= most or not form.divides:
            return [(plan, 0)]
        pieces = []
        each = align_up(math.ceil(plan.nbytes / math.ceil(plan.nbytes / most)), layout.QUAD)
        for number, start in enumerate(range(0, plan.nbytes, each)):
            nbytes = min(each, plan.nbytes - start)
            tiles = math.ceil(nbytes / (4 * plan.launch.block_words * (self._group.world_size // self._nodes)))
            programs = min(plan.launch.programs, max(1, tiles))
            launch = dataclasses.replace(plan.launch, programs=programs)
            piece = dataclasses.replace(plan, nbytes=nbytes, launch=launch, whole_nbytes=plan.nbytes, piece=number)
            pieces.append((piece, start))
        return pieces

    def places(self, *addresses: int) -> list[int]:
        """Return the places of tensors in the form that kernels take; 0 for tensors that the other ranks do not map."""
        if self.heap is None or not self.heap.ranges:
            return [0] * len(addresses)
        found = [None if address & 15 else self.heap.place(address) for address in addresses]
        return [0 if place is None else (place[0] + 1 << layout.PLACE_AT) + place[1] for place in found]

    # -- growth -----------------------------------------------------------------------------------------------------

    def header_exchange(self, plan: CallPlan) -> TritonHeaderExchange:
        """Return a kernel that exchanges the header of ``plan`` between all ranks and does nothing else."""
        return TritonHeaderExchange(_launch(barrier.bind(plan, self.workspaces[-1].context)), self.device)

    @torch.inference_mode(False)  # later calls write into its tensors in any mode
    def grow(self, capacity: int) -> None:
        """Switch later calls to a new workspace, for messages of ``capacity`` bytes or more. Collective.

        It waits for the other ranks and the current stream, but not for other streams, whose calls may wait for what
        this rank has yet to do. The memory of the previous workspace is therefore given back but not released
        (:mod:`shotcast.memory.arena`), and calls that were bound earlier keep using it. Raises ConfigError on all ranks
        if one has too little memory, and CollectiveTimeout for ranks that did not come.
        """
        where = self._layout(capacity)
        memory = self._lease(where.nbytes)
        failure = ""
        try:
            try:
                words, blocks = self._host_words.data_ptr(), self._blocks.data_ptr()
                header_of = self._algorithms.header
                workspace = GpuWorkspace(memory, where, self._group, words, self.device, header_of, self._nodes, blocks)
                workspace.clear(self.workspaces[-1].epoch if self.workspaces else 0, self.timeout_s)
                _wait_for_stream(self.device)
            except RuntimeError as error:
                failure = shortage(self.device, "a workspace", error)
            raise_failures(self._group, failure)
        except BaseException:
            memory.abandon()
            raise
        unused = None
        with self._marking:
            if len(self.workspaces) > 1 and not self._captured:
                unused = self.workspaces.pop()
            self.workspaces.append(workspace)
        if unused is not None:
            unused.close()
        self._captured, self.capacity = False, where.max_bytes

    def more_bytes(self, capacity: int) -> int:
        return 0 if capacity <= self.capacity else self._layout(capacity).nbytes

    def _layout(self, capacity: int) -> WorkspaceLayout:
        size = next(size for size in self._capacities if size >= capacity)
        ranks_per_node = self._group.world_size // self._nodes
        engines = bytes_of_copies(self._exclusive) if self._nodes == 1 else 0
        return WorkspaceLayout.for_messages(size, not self.workspaces, self._nodes, ranks_per_node, self._puts, engines)

    def keep(self) -> None:
        self._captured = True

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """The bytes of symmetric memory that the workspaces take on each rank."""
        return sum(one.where.nbytes for one in self.workspaces)

    @property
    def multicast(self) -> bool:
        """True if kernels use multicast addresses: the memory of all ranks has one, and no rank was told not to."""
        return self.workspaces[0].context.multicast

    def waiting(self, nbytes: int) -> int:
        """Return how many messages of ``nbytes`` may lie in a mailbox without holding up their sender."""
        return min(
            layout.MESSAGE_SLOTS, layout.CHUNKS_IN_FLIGHT // max(1, math.ceil(nbytes / (4 * layout.CHUNK_WORDS)))
        )

    def fault(self) -> Fault | None:
        """Return the fault that a finished kernel of this rank has seen, or None. Never synchronizes."""
        word = self.stopped_word.value
        return Fault.decode(word & 0xFFFFFFFFFFFFFFFF) if word else None

    def wait(self) -> Wait | None:
        """Return the wait that this rank is in, if it has lasted for :data:`.layout.WAIT_NOTICE_NS`.

        One thread calls it repeatedly. Kernels report a wait, like the fault at the deadline, thousands of times a
        second; None means that none has since the last look.
        """
        notice = Fault.decode(self._wait_word.value & 0xFFFFFFFFFFFFFFFF)
        self._wait_word.value = 0
        if not notice.ranks:
            self._wait = None
        else:
            self._awaited = notice.ranks
            if self._wait is None or (self._wait.op, self._wait.epoch) != (notice.op, notice.epoch32):
                since = time.monotonic() - layout.WAIT_NOTICE_NS / 1e9
                self._wait = Wait(notice.op, notice.epoch32, since)
        return self._wait

    def awaited(self, wait: Wait) -> list[int]:
        return list(self._awaited)

    @property
    def stopped(self) -> bool:
        """True if this rank or another has stopped the calls; :meth:`fault` knows it once a kernel has seen it."""
        return any(one.stopped for one in self.workspaces)

    @property
    def _stopped_or_last(self) -> GpuWorkspace:
        last = self.workspaces[-1]
        return last if last.stopped else next((one for one in self.workspaces if one.stopped), last)

    def headers(self, epoch: int) -> list[HeaderWords | None]:
        return self._stopped_or_last.headers(epoch)

    def parts(self, epoch: int) -> dict[int, str]:
        return self._stopped_or_last.parts(epoch)

    @property
    def epoch(self) -> int:
        """The number of collective calls begun so far, in the workspace whose call was stopped or else in the last one.

        Replays of graphs with an earlier workspace count separately.
        """
        return self._stopped_or_last.epoch

    def set_epoch(self, epoch: int) -> None:
        for workspace in self.workspaces:
            workspace.set_epoch(epoch)

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        for workspace in self.workspaces:
            workspace.set_timeout(timeout_s)

    def mark_gone(self, rank: int) -> None:
        """End calls that wait for ``rank``, now and later, because its process has ended. Any thread may call it.

        It takes effect after _SETTLE_S: a program that has just found a word missing might see the mark at once.
        """
        timer = threading.Timer(_SETTLE_S, self._mark_gone, (rank,))
        timer.daemon = True
        timer.start()

    def stop(self, fault: int) -> None:
        with self._marking:
            if not self._closed:
                for workspace in self.workspaces:
                    workspace.stop(fault)

    def interrupt(self) -> None:
        """End the kernels of this machine's ranks with a fault that names this rank. Any thread may call it."""
        self._stop_for(self._rank)
        if self._watch is not None:
            for rank in range(self._group.world_size):
                if rank != self._rank:
                    self._watch.send(rank, "interrupted", self._clears << 8 | self._rank)

    def interrupted_by(self, number: int) -> None:
        if number >> 8 == self._clears:
            self._stop_for(number & 255)

    def _stop_for(self, rank: int) -> None:
        with self._marking:
            if self._closed:
                return
            epoch = self.epoch
            header = self.headers(epoch)[self._rank]
        op = Op.BARRIER if header is None else Op(header.call >> wire.OP_AT & 63)
        self.stop(wire.encode_fault(wire.INTERRUPTED, op, [rank], epoch))

    def _mark_gone(self, rank: int) -> None:
        with self._marking:
            self._gone_word.value |= 1 << rank

    def idle(self) -> bool:
        """Return whether all work of the current stream has ended."""
        return self.device.type != "cuda" or torch.cuda.current_stream(self.device).query()

    def drain(self) -> None:
        """Wait for this rank's kernels, and release memory that was given back."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        arena_of(self.device).release()

    def clear(self, epoch: int) -> None:
        with self._marking:
            self._clears += 1
            for workspace in self.workspaces:
                workspace.clear(epoch, self.timeout_s)
            self.stopped_word.value = self._wait_word.value = 0
            if self.heap is not None:
                self.heap.resume()
            self.drain()  # peers may store there once all ranks have cleared theirs

    def close(self) -> None:
        """Give the memory back. This rank must have drained; other ranks may not have. A second call does nothing."""
        with self._marking:
            if not self._closed:
                arena_of(self.device).count(self._exclusive, -1)
            self._closed = True
        for workspace in self.workspaces:
            workspace.close()
        if self.heap is not None:
            self.heap.close()
        _words_in_use.pop(self._host_words.data_ptr(), None)
        arena_of(self.device).release()
