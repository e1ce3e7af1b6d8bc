"""Collectives of large messages on the GPUs' copy engines, which leave the SMs to a GEMM that runs meanwhile.

    reduce_scatter:  each rank copies part j to rank j, which adds up:  out_i = x_0[i] + x_1[i] + ...  in rank order,
                     or applies another reduction
    all_reduce:      the same by slices, and then rank j copies its sum to all
    all_gather:      each rank copies x to all
    all_to_all:      each rank copies part j to rank j

A message passes in chunks, usually one, through places in the region of each rank: two for parts, and two for the sums
of an all_reduce, which take turns. Between two meetings of all ranks, in *phase* p, a rank

    adds up chunk p-2, which came in phase p-1, and copies the sums of chunk p-3 to out
    copies chunk p-1 to the others, and the sums of chunk p-2 once they are made

or copies chunk p-2 to out if there are no sums. Both lines run at once, on two streams; CPU ranks of the interpreter do
the same steps in turn. ``docs/reference/protocols.md`` ("Copies between meetings") says why that is correct.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import INTERPRETED, kernel
from shotcast.device.triton.launch import Launch
from shotcast.device.triton.reductions import reduce_words, reduced_unless_stopped
from shotcast.device.triton.words import load_words, store_words
from shotcast.errors import ConfigError
from shotcast.memory import driver
from shotcast.memory.streams import SideLane
from shotcast.transport.triton import few_sms, layout, sync
from shotcast.transport.triton.barrier import GATE_REGISTERS
from shotcast.transport.triton.binding import EnqueuedCall, KernelContext, TileShape, reduction_arguments
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan, Op

BESIDE_PRODUCTS = {"maxnreg": GATE_REGISTERS}
"""Options of one-warp kernels, which start next to those GEMMs of the vendor's library that leave room for a warp."""
_MEETINGS = 4
"""Meeting kernels that take turns; the headers of neighbors differ."""


@dataclass(frozen=True, slots=True)
class CopyMeetingShape:
    """The argument SHAPE of a meeting."""

    WORLD: int
    WARPS: int
    PDL: bool


@kernel(shape=CopyMeetingShape)
def meeting(entry: Entry, SHAPE: tl.constexpr):
    """Wait until every rank has come, or all have been told why not."""
    call = sync.enter(entry, SHAPE.WARPS, SHAPE.PDL)
    sync.exchange_headers(call, call.rank * 0, False, SHAPE.WORLD, SHAPE.WARPS, SHAPE.PDL)
    fault = sync.any_abort_word(call.own)
    if fault != 0:
        for r in range(SHAPE.WORLD):
            sync.write_abort_words(sync.region_address(call.peers, r), fault, True)


@dataclass(frozen=True, slots=True)
class CopiedSumShape(TileShape):
    """A sum of a rank's chunk and the chunks copied to it."""

    REDUCTION: int


@triton.jit
def own_region(entry):
    """Return a pointer to this rank's region."""
    return tl.multiple_of(entry.own.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)


@kernel(shape=CopiedSumShape)
def sum_of_copies(x, out, came, nbytes: tl.int64, entry: Entry, stride, SHAPE: tl.constexpr):
    """Reduce ``nbytes`` at ``x`` with the other ranks' bytes into ``out``.

    The others' bytes lie in this rank's region, at the address ``came`` and ``stride`` quads apart by rank.
    """
    WORLD: tl.constexpr = SHAPE.WORLD
    rank = entry.rank
    live = (sync.read_abort_word(own_region(entry), SHAPE.WARPS) == 0).to(tl.int32)
    nbytes = nbytes.to(tl.int32)
    for at in range(tl.program_id(0) * SHAPE.BLOCK, few_sms.words_in(nbytes), tl.num_programs(0) * SHAPE.BLOCK):
        offs = at + tl.arange(0, SHAPE.BLOCK)
        own_words = load_words(x, 0, offs, nbytes, SHAPE.UNIT)
        others = ()
        for i in tl.static_range(WORLD - 1):
            source = sync.words_at(came, (i + (i >= rank).to(tl.int32)) * stride)
            words = tl.load(source + offs, mask=offs < few_sms.words_in(nbytes), other=0, cache_modifier=".cg")
            others = others + (words,)
        words = reduce_words(few_sms.by_rank(others, own_words, rank, WORLD), WORLD, SHAPE.DTYPE, SHAPE.REDUCTION)
        store_words(out, 0, offs, reduced_unless_stopped(live, words, SHAPE.DTYPE), nbytes, SHAPE.UNIT)


@kernel(shape=TileShape)
def nan_if_stopped(out, nbytes: tl.int64, entry: Entry, SHAPE: tl.constexpr):
    """Make the floats of ``out`` NaN, and tell the host, if the communicator was stopped.

    Types that are only copied keep their numbers. One warp does this, because it finds room on an SM first.
    """
    own = own_region(entry)
    fault = sync.any_abort_word(own)
    if fault != 0:
        sync.report_fault(own, fault)
        if SHAPE.DTYPE.is_floating():  # of 16 bits or more
            offs = tl.arange(0, SHAPE.BLOCK)
            words = reduced_unless_stopped(offs * 0, offs, SHAPE.DTYPE)
            start = nbytes * 0
            while start < nbytes:
                size = tl.minimum(nbytes - start, 4 * SHAPE.BLOCK).to(tl.int32)
                store_words(out, start, offs, words, size, SHAPE.UNIT)
                start += 4 * SHAPE.BLOCK


REGION, X, OUT = range(3)
"""Origins of addresses: none, ``x`` or ``out``."""


class Copy(NamedTuple):
    """A copy of ``nbytes``; each address comes with its origin."""

    target_base: int
    target: int
    source_base: int
    source: int
    nbytes: int


class Sum(NamedTuple):
    """The reduction of a chunk of ``nbytes``, at offsets into ``x`` and ``out``, with those that came to an address."""

    x: int
    out: int
    came: int
    nbytes: int


class Phase(NamedTuple):
    """The work of a rank between two meetings: it takes what came before, and sends.

    ``early`` copies wait for nothing; ``late`` copies wait for the sums.
    """

    sums: tuple[Sum, ...]
    taken: tuple[Copy, ...]
    early: tuple[Copy, ...]
    late: tuple[Copy, ...]


@dataclass(frozen=True)
class CopiedParts:
    """A message in parts and chunks, and their destinations.

    Copies go to each rank's region from ``regions`` on. All sizes are in bytes.
    """

    op: Op
    nbytes: int
    part: int
    chunk: int
    rank: int
    regions: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """The number of chunks in a part."""
        return -(-self.part // self.chunk)

    def place(self, chunk: int, at: int, of: int, sums: bool = False) -> int:
        """Return the address of the place at rank ``at`` for a chunk that rank ``of`` copies, or for its sums."""
        turns = min(self.chunks, 2)
        return self.regions[at] + ((chunk % turns + turns * sums) * len(self.regions) + of) * self.chunk

    def size(self, chunk: int, of: int) -> int:
        """Return the size of a chunk of rank ``of``'s part."""
        start = chunk * self.chunk
        return max(0, min(self.nbytes - of * self.part, self.part, start + self.chunk) - start)

    def phases(self) -> Iterator[Phase]:
        """Yield the work of this rank after each meeting."""
        yield from map(self._phase, range(1, self.chunks + (3 if self.op is Op.ALL_REDUCE else 2)))

    def _phase(self, number: int) -> Phase:
        rank, op, part = self.rank, self.op, self.part
        world_size, chunks = len(self.regions), self.chunks
        peers = [(rank + i) % world_size for i in range(1, world_size)]  # so only one rank at a time writes to each
        sent, came, first = number - 1, number - 2, number - 3
        sums, taken, early, late = list[Sum](), list[Copy](), list[Copy](), list[Copy]()
        if sent < chunks:
            start, size = sent * self.chunk, self.size(sent, rank)
            for r in peers:
                source, count = (start, size) if op is Op.ALL_GATHER else (r * part + start, self.size(sent, r))
                early.append(Copy(REGION, self.place(sent, r, rank), X, source, count))
            own = rank * part + start
            if op in (Op.ALL_GATHER, Op.ALL_TO_ALL):
                taken.append(Copy(OUT, own, X, start if op is Op.ALL_GATHER else own, size))
        if 0 <= came < chunks and op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            start, size = came * self.chunk, self.size(came, rank)
            to = start if op is Op.REDUCE_SCATTER else rank * part + start
            sums.append(Sum(rank * part + start, to, self.place(came, rank, 0), size))
            if op is Op.ALL_REDUCE:
                late += [Copy(REGION, self.place(came, r, rank, True), OUT, to, size) for r in peers]
        last = first if op is Op.ALL_REDUCE else came
        if 0 <= last < chunks and op is not Op.REDUCE_SCATTER:
            for r in peers:
                place = self.place(last, rank, r, op is Op.ALL_REDUCE)
                taken.append(Copy(OUT, r * part + last * self.chunk, REGION, place, self.size(last, r)))
        return Phase(tuple(sums), tuple(taken), tuple(early), tuple(late))


class CopyEngineCall:
    """The phases of a call, enqueued the way a kernel is.

    Args:
        meetings: kernels that meet in turn.
        reduce: the kernel of sums; None if there are none.
        last: the kernel that turns floats into NaN if a meeting failed.
        nbytes: the size of ``out``.
        own: the range of bytes of ``out``, from start to end, that an in-place call leaves alone.
        lane: the stream for work next to the call's stream; None if there is no such work.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        meetings: Sequence[Launch],
        reduce: Launch | None,
        last: Launch,
        nbytes: int,
        own: tuple[int, int],
        lane: SideLane | None,
    ):
        self._phases, self._meetings, self._reduce, self._last = phases, meetings, reduce, last
        self._nbytes, self._own, self._lane = nbytes, own, lane
        self.launches = (*meetings, last) if reduce is None else (*meetings, reduce, last)

    def __call__(self, stream: int, call_values: Sequence[int]) -> None:
        """Enqueue the call with the addresses of ``x`` and ``out``."""
        x, out = call_values
        for launch in self.launches:
            launch.load()  # nothing is compiled behind a meeting that waits
        lane = None if self._lane is None else self._lane.of(stream)
        self._meet(0, stream)
        for number, phase in enumerate(self._phases, 1):
            if lane is not None:
                self._two_streams(phase, stream, lane, x, out)
            else:
                self._sum(phase.sums, stream, x, out)
                for copies in (phase.taken, phase.early, phase.late):
                    _copy(copies, stream, x, out)
            if number < len(self._phases):
                self._meet(number, stream)
        begin, end = self._own
        for start, stop in ((0, begin), (end, self._nbytes)) if x == out + begin else ((0, self._nbytes),):
            if stop > start:
                self._last(stream, (out + start, stop - start))

    def _two_streams(self, phase: Phase, stream: int, lane: SideLane, x: int, out: int) -> None:
        side = lane.after(stream) if phase.sums or phase.taken else 0
        if phase.sums:
            self._sum(phase.sums, side, x, out)
            summed = lane.mark()
        _copy(phase.taken, side, x, out)
        _copy(phase.early, stream, x, out)
        if phase.late:
            lane.wait(stream, summed)
            _copy(phase.late, stream, x, out)
        if side:
            lane.wait(stream, lane.mark())

    def _meet(self, number: int, stream: int) -> None:
        self._meetings[number % len(self._meetings)](stream, ())

    def _sum(self, sums: Sequence[Sum], stream: int, x: int, out: int) -> None:
        for each in sums:
            if each.nbytes and self._reduce is not None:
                self._reduce(stream, (x + each.x, out + each.out, each.came, each.nbytes))


def _copy(copies: Sequence[Copy], stream: int, x: int, out: int) -> None:
    """Enqueue copies, except those onto their source."""
    bases = 0, x, out
    for copy in copies:
        target, source = bases[copy.target_base] + copy.target, bases[copy.source_base] + copy.source
        if not copy.nbytes or target == source:
            continue
        if INTERPRETED:
            ctypes.memmove(target, source, copy.nbytes)
            continue
        arguments = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(copy.nbytes)
        if error := driver.library().cuMemcpyAsync(*arguments, ctypes.c_void_p(stream)):
            driver.check(error, "copying")


def bind(plan: CallPlan, context: KernelContext) -> EnqueuedCall:
    """Return the call of an all_reduce, a reduce_scatter, an all_gather or an all_to_all.

    Raises ConfigError if there is no room for the launch's chunks. (In a region with none, a call can only be loaded.)
    """
    world_size, chunk = context.world_size, plan.launch.chunk_bytes
    capacity = context.layout.copies_quads * layout.QUAD
    part = wire.slice_bytes(plan.nbytes, world_size) if plan.op is Op.ALL_REDUCE else plan.nbytes // world_size
    if (
        chunk < layout.QUAD
        or chunk % layout.QUAD
        or 0 < capacity < layout.places_of_copies(plan.op, -(-part // chunk)) * world_size * chunk
    ):
        raise ConfigError(f"copy_engines: chunks of {chunk} bytes (a multiple of 16) do not go into {capacity}")
    at = context.layout.copies_at * layout.QUAD
    regions = tuple(address + at for address in context.addresses)
    parts = CopiedParts(plan.op, plan.nbytes, part, chunk, context.rank, regions)
    # a kernel that begins early would wait only for the kernel before it in its stream, not for the copies
    waits: dict[str, Any] = {"options": {"launch_pdl": False}, "PDL": False}
    meetings = []
    for piece in range(_MEETINGS):
        named = dataclasses.replace(plan, piece=piece)
        bound = context.launch(meeting, named, programs=1, num_warps=1, tensors="none", **waits)
        meetings.append(Launch(bound.kernel, 1, bound.arguments, (), bound.options | BESIDE_PRODUCTS, padding_bytes=0))
    reduce, found = None, dict[str, Any]()
    if plan.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
        found = reduction_arguments(plan, context)
    shape = plan.launch
    waits |= {"BLOCK": shape.block_words, "nbytes": plan.nbytes} | {k: v for k, v in found.items() if k == "DTYPE"}
    if context.unit(plan) != layout.QUAD or found.get("CELLS") or plan.reduction not in ("sum", "avg"):
        waits["BLOCK"] = min(shape.block_words, 64 * shape.num_warps)  # each word takes several registers
    if found:
        stride = chunk // layout.QUAD
        came, reduction = context.own_address, found["REDUCTION"]
        bound = context.launch(
            sum_of_copies, plan, programs=shape.programs, came=came, stride=stride, REDUCTION=reduction, **waits
        )
        names = "x", "out", "came", "nbytes"
        reduce = Launch(bound.kernel, bound.programs, bound.arguments, names, bound.options)
    waits |= {"BLOCK": 128, "num_warps": 1}
    bound = context.launch(nan_if_stopped, dataclasses.replace(plan, reduction="sum"), programs=1, **waits)
    last = Launch(bound.kernel, 1, bound.arguments, ("out", "nbytes"), bound.options | BESIDE_PRODUCTS, padding_bytes=0)
    nbytes = part if plan.op is Op.REDUCE_SCATTER else plan.nbytes
    own = (context.rank * part, (context.rank + 1) * part) if plan.op is Op.ALL_GATHER else (nbytes, nbytes)
    call = CopyEngineCall(tuple(parts.phases()), meetings, reduce, last, nbytes, own, context.lane)
    return EnqueuedCall(call, "x and out")
