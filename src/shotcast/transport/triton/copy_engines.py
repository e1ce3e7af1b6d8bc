"""Collectives of large messages by the copy engines of the GPUs, which leave the SMs to a product that runs meanwhile.

    reduce_scatter:  each rank copies part j to rank j, which adds up:  out_i = x_0[i] + x_1[i] + ...  in rank order,
                     or makes another reduction
    all_reduce:      the same by slices, and then rank j copies its sum to all
    all_gather:      each rank copies x to all
    all_to_all:      each rank copies part j to rank j

A message passes in rounds through two generations of copies in the region of each rank, with a place for each other
rank. In a step, ranks write into one generation of the others, meet, and take what came: a sum is made, or it is copied
to ``out``. Steps use the generations in turn. The ranks meet before the first step as well.

- A kernel begins when the copies before it in its stream have ended, so a meeting says that what was copied is there.
- A rank that has passed the meeting of step s knows that all have taken what came in step s - 1, as they do before they
  come to that meeting. So it may write into that generation again, in step s + 1.
- The first meeting says the same of the call before, of this algorithm or another, and keeps ranks that are ahead from
  writing. Nothing is enqueued on other streams, so a graph captures a call as it is.

A meeting is an exchange of headers, as every call has one, with an epoch of its own; it is one program of one warp. A
failed meeting stops the copies of no engine: what they then bring to ``out`` a last kernel replaces with NaN.
CPU ranks of the interpreter do the same in turn.
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
from shotcast.transport.triton import few_sms, layout, sync
from shotcast.transport.triton.barrier import GATE_REGISTERS, barrier
from shotcast.transport.triton.binding import EnqueuedCall, KernelContext, TileShape
from shotcast.transport.triton.reductions import reduction_arguments
from shotcast.transport.triton.sync import Entry
from shotcast.wire import CallPlan, Op

_MEETINGS = 4
"""Kernels that meet in turn; the headers of neighbors differ."""
_GENERATIONS = 2


@dataclass(frozen=True, slots=True)
class CopiedSumShape(TileShape):
    """A sum of a rank's chunk and those that were copied to it."""

    REDUCTION: int


@triton.jit
def _live(entry, WARPS: tl.constexpr):
    """Return 1 unless the communicator was stopped."""
    own = tl.multiple_of(entry.own.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
    return (sync.read_abort_word(own, WARPS) == 0).to(tl.int32)


@kernel(shape=CopiedSumShape)
def sum_of_copies(x, out, came, nbytes: tl.int64, entry: Entry, stride, SHAPE: tl.constexpr):
    """Reduce ``nbytes`` at ``x`` with those of the other ranks into ``out``.

    Theirs lie in this rank's region, at the address ``came`` and ``stride`` quads apart by rank.
    """
    WORLD: tl.constexpr = SHAPE.WORLD
    rank = entry.rank
    live = _live(entry, SHAPE.WARPS)
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
    """Make the floats of ``out`` NaN if the communicator was stopped. One program does it."""
    if _live(entry, SHAPE.WARPS) == 0:
        start = nbytes * 0
        while start < nbytes:
            size = tl.minimum(nbytes - start, 4 * SHAPE.BLOCK).to(tl.int32)
            offs = tl.arange(0, SHAPE.BLOCK)
            words = load_words(out, start, offs, size, SHAPE.UNIT)
            store_words(out, start, offs, reduced_unless_stopped(size * 0, words, SHAPE.DTYPE), size, SHAPE.UNIT)
            start += 4 * SHAPE.BLOCK


REGION, X, OUT = range(3)
"""What an address counts from: nothing, ``x``, or ``out``."""


class Copy(NamedTuple):
    """A copy of ``nbytes``; each address has what it counts from."""

    target_base: int
    target: int
    source_base: int
    source: int
    nbytes: int


class Sum(NamedTuple):
    """The reduction of a chunk of ``nbytes``, at bytes of ``x`` and ``out``, with those that came to an address."""

    x: int
    out: int
    came: int
    nbytes: int


class Meeting(NamedTuple):
    """A meeting of all ranks."""

    number: int


Step = Copy | Sum | Meeting


class Shared(NamedTuple):
    """What a plan has in common for all ranks: bytes of parts and chunks, and the addresses of the generations."""

    nbytes: int
    part: int
    chunk: int
    rank: int
    generations: tuple[tuple[int, ...], ...]  # by number, by rank

    @property
    def peers(self) -> list[int]:
        """The other ranks, the next one first: so each is written to by one at a time."""
        world_size = len(self.generations[0])
        return [(self.rank + i) % world_size for i in range(1, world_size)]

    def of_part(self, rank: int, start: int) -> int:
        """Return the bytes of a rank's part in the chunk from ``start`` on."""
        return max(0, min(self.nbytes - rank * self.part, self.part, start + self.chunk) - start)

    def place(self, generation: int, at: int, of: int) -> int:
        """Return the address of the place at rank ``at`` for what rank ``of`` copies."""
        return self.generations[generation % _GENERATIONS][at] + of * self.chunk


def steps_of(op: Op, shared: Shared) -> Iterator[Step]:
    """Yield what a rank does in a call, in order."""
    rank, part, peers, own = shared.rank, shared.part, shared.peers, shared.rank * shared.part
    met = 1
    yield Meeting(0)
    for start in range(0, part, shared.chunk):
        size = shared.of_part(rank, start)
        if op is Op.ALL_GATHER:
            for r in peers:
                yield Copy(REGION, shared.place(met, r, rank), X, start, size)
            yield Copy(OUT, own + start, X, start, size)
        else:
            for r in peers:
                yield Copy(REGION, shared.place(met, r, rank), X, r * part + start, shared.of_part(r, start))
            if op is Op.ALL_TO_ALL:
                yield Copy(OUT, own + start, X, own + start, size)
        yield Meeting(met)
        if op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            to = start if op is Op.REDUCE_SCATTER else own + start
            yield Sum(own + start, to, shared.place(met, rank, 0), size)
        if op is Op.ALL_REDUCE:
            met += 1
            for r in peers:
                yield Copy(REGION, shared.place(met, r, rank), OUT, own + start, size)
            yield Meeting(met)
        if op is not Op.REDUCE_SCATTER:
            for r in peers:
                size = shared.of_part(r, start)
                yield Copy(OUT, r * part + start, REGION, shared.place(met, rank, r), size)
        met += 1


class CopyEngineCall:
    """The steps of a call, which are enqueued as a kernel is.

    Args:
        meetings: kernels that meet in turn.
        reduce: the kernel of sums; None where there are none.
        last: the kernel that makes floats NaN where a meeting failed.
        nbytes: of ``out``.
        own: the bytes of ``out``, from where to where, that a call in place leaves alone.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        meetings: Sequence[Launch],
        reduce: Launch | None,
        last: Launch,
        nbytes: int,
        own: tuple[int, int],
    ):
        self._steps, self._meetings, self._reduce, self._last = steps, meetings, reduce, last
        self._nbytes, self._own = nbytes, own

    def load(self) -> None:
        """Compile and load the kernels."""
        for launch in (*self._meetings, self._reduce, self._last):
            if launch is not None:
                launch.load()

    def __call__(self, stream: int, call_values: Sequence[int]) -> None:
        """Enqueue the call with the addresses of ``x`` and ``out``."""
        x, out = call_values
        bases = 0, x, out
        for step in self._steps:
            if isinstance(step, Copy):
                _copy(bases[step.target_base] + step.target, bases[step.source_base] + step.source, step.nbytes, stream)
            elif isinstance(step, Meeting):
                self._meet(step.number, stream)
            elif step.nbytes and self._reduce is not None:
                self._reduce(stream, (x + step.x, out + step.out, step.came, step.nbytes))
        begin, end = self._own
        for start, stop in ((0, begin), (end, self._nbytes)) if x == out + begin else ((0, self._nbytes),):
            if stop > start:
                self._last(stream, (out + start, stop - start))

    def _meet(self, number: int, stream: int) -> None:
        self._meetings[number % len(self._meetings)](stream, ())


def _copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy; none from where it goes to."""
    if not nbytes or target == source:
        return
    if INTERPRETED:
        ctypes.memmove(target, source, nbytes)
        return
    arguments = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
    if error := driver.library().cuMemcpyAsync(*arguments, ctypes.c_void_p(stream)):
        driver.check(error, "copying")


def bind(plan: CallPlan, context: KernelContext) -> EnqueuedCall:
    """Return the call of an all_reduce, a reduce_scatter, an all_gather or an all_to_all.

    Raises ConfigError if the chunks of the launch have no room.
    """
    world_size, shape = context.world_size, plan.launch
    room = context.layout.copies_quads * layout.QUAD
    if not 0 < shape.chunk_bytes * world_size <= room or shape.chunk_bytes % layout.QUAD:
        raise ConfigError(
            f"copy_engines: {world_size} chunks of {shape.chunk_bytes} bytes (a multiple of 16) do not go into {room}"
        )
    part = wire.slice_bytes(plan.nbytes, world_size) if plan.op is Op.ALL_REDUCE else plan.nbytes // world_size
    at = context.layout.copies_at * layout.QUAD
    generations = tuple(tuple(address + at + room * g for address in context.addresses) for g in range(_GENERATIONS))
    shared = Shared(plan.nbytes, part, shape.chunk_bytes, context.rank, generations)
    # a kernel that begins early would wait for the kernel before it in its stream alone, and not for the copies
    waits: dict[str, Any] = {"options": {"launch_pdl": False}, "PDL": False}
    meetings = []
    for piece in range(_MEETINGS):
        named = dataclasses.replace(plan, piece=piece)
        bound = context.launch(barrier, named, programs=1, num_warps=1, tensors="none", **waits)
        options = bound.options | {"maxnreg": GATE_REGISTERS}
        meetings.append(Launch(bound.kernel, bound.programs, bound.arguments, (), options, padding_bytes=0))
    reduce, found = None, dict[str, Any]()
    if plan.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
        found = reduction_arguments(plan, context)
    waits |= {"BLOCK": shape.block_words, "nbytes": plan.nbytes} | {k: v for k, v in found.items() if k == "DTYPE"}
    if context.unit(plan) != layout.QUAD or found.get("CELLS") or plan.reduction not in ("sum", "avg"):
        waits["BLOCK"] = min(shape.block_words, 64 * shape.num_warps)  # each word takes several registers
    if found:
        stride = shape.chunk_bytes // layout.QUAD
        came, reduction = context.own_address, found["REDUCTION"]
        bound = context.launch(
            sum_of_copies, plan, programs=shape.programs, came=came, stride=stride, REDUCTION=reduction, **waits
        )
        names = "x", "out", "came", "nbytes"
        reduce = Launch(bound.kernel, bound.programs, bound.arguments, names, bound.options)
    bound = context.launch(nan_if_stopped, plan, programs=1, **waits)
    last = Launch(bound.kernel, bound.programs, bound.arguments, ("out", "nbytes"), bound.options)
    nbytes = part if plan.op is Op.REDUCE_SCATTER else plan.nbytes
    own = (context.rank * part, (context.rank + 1) * part) if plan.op is Op.ALL_GATHER else (nbytes, nbytes)
    call = CopyEngineCall(tuple(steps_of(plan.op, shared)), meetings, reduce, last, nbytes, own)
    return EnqueuedCall(call, "x and out")
