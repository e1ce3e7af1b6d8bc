"""Copies by the copy engines of the GPUs, which are meant to take no SM but for the meetings of the ranks.

    all_gather:  each rank copies x into its window; then each copies it from the windows of the others into out
    all_to_all:  the same, with a part for each rank

A message passes through four places of the window in turn. In round i a rank copies its bytes into place i % 4, meets
the others in a kernel of one warp, which exchanges headers as every call does, and copies from theirs. A kernel begins
when the copies before it in its stream have ended, so a header says that the bytes of the round are there. The meeting
of round i also waits until this rank has ended its copies of round i - 2. So a rank that has met in round i - 2 may
write into the place that round i - 4 used. A last meeting leaves the window quiet for the calls after.

Three kinds of streams, forked from that of the call and joined to it, are to keep the engines busy: rounds are staged
ahead, and a meeting goes on beside the copies of the round before (:mod:`.lanes`). CPU ranks of the
interpreter do the same in turn.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shotcast import wire
from shotcast.device.triton.intrinsics import INTERPRETED
from shotcast.device.triton.launch import Launch
from shotcast.errors import ConfigError
from shotcast.memory import driver, streams
from shotcast.transport.triton import layout
from shotcast.transport.triton.barrier import barrier
from shotcast.transport.triton.binding import EnqueuedCall, KernelContext
from shotcast.transport.triton.lanes import LanesOfCalls
from shotcast.wire import CallPlan, Op

PLACES = layout.COPY_PLACES


class Copy(NamedTuple):
    """One copy of a round; ``source`` and ``target`` are addresses, or bytes into ``x`` or ``out``."""

    target: int
    source: int
    nbytes: int


class Round(NamedTuple):
    """The copies of a round: from x into the own window, from x to out, and by rank from its window into out."""

    staged: tuple[Copy, ...]
    kept: tuple[Copy, ...]
    pulled: tuple[tuple[Copy, ...], ...]


class EngineCopies:
    """The rounds of a call, which are enqueued as a kernel is.

    Args:
        rounds: the copies.
        meetings: kernels that exchange the headers of rounds, which take turns.
        peers: the number of other ranks.
        lanes: the streams that calls take.
    """

    def __init__(self, rounds: Sequence[Round], meetings: Sequence[Launch], peers: int, lanes: LanesOfCalls):
        self._rounds, self._meetings, self._peers, self._lanes = rounds, meetings, peers, lanes

    def load(self) -> None:
        """Compile and load the kernel of the meetings."""
        for meeting in self._meetings:
            meeting.load()

    def __call__(self, stream: int, call_values: Sequence[int]) -> None:
        """Enqueue the call on the current stream, with the addresses of ``x`` and ``out``."""
        x, out = call_values
        if INTERPRETED:
            for number, one in enumerate(self._rounds):
                for copy in one.staged:
                    ctypes.memmove(copy.target, x + copy.source, copy.nbytes)
                for copy in one.kept:
                    ctypes.memmove(out + copy.target, x + copy.source, copy.nbytes)
                self._meet(number, 0)
                for copy in (copy for pulls in one.pulled for copy in pulls):
                    ctypes.memmove(out + copy.target, copy.source, copy.nbytes)
            self._meet(len(self._rounds), 0)
            return
        if not self._rounds:
            self._meet(0, stream)
            return
        main = torch.cuda.current_stream()
        lane = self._lanes.take(main, self._peers, streams.capturing())
        lane.start.record(main)
        for each in (lane.stage, lane.meet, *lane.pull):
            each.wait_event(lane.start)
        for number, one in enumerate(self._rounds):
            turn, before = number % PLACES, (number - 2) % PLACES
            if number >= 2:
                lane.stage.wait_event(lane.met[before])
            for copy in one.staged:
                _enqueue(copy.target, x + copy.source, copy.nbytes, lane.stage)
            for copy in one.kept:
                _enqueue(out + copy.target, x + copy.source, copy.nbytes, lane.stage)
            lane.staged[turn].record(lane.stage)
            lane.meet.wait_event(lane.staged[turn])
            if number >= 2:
                for event in lane.pulled[before]:
                    lane.meet.wait_event(event)
            self._meet(number, lane.meet.cuda_stream)
            lane.met[turn].record(lane.meet)
            for own, event, pulls in zip(lane.pull, lane.pulled[turn], one.pulled, strict=True):
                own.wait_event(lane.met[turn])
                for copy in pulls:
                    _enqueue(out + copy.target, copy.source, copy.nbytes, own)
                event.record(own)
        for event in lane.pulled[(len(self._rounds) - 1) % PLACES]:
            lane.meet.wait_event(event)
        self._meet(len(self._rounds), lane.meet.cuda_stream)
        lane.start.record(lane.meet)
        main.wait_event(lane.start)

    def _meet(self, number: int, stream: int) -> None:
        self._meetings[number % len(self._meetings)](stream, ())


def _enqueue(target: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
    """Enqueue a copy between addresses of GPUs; nothing if they are one."""
    if nbytes and target != source:
        arguments = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
        driver.check(driver.library().cuMemcpyAsync(*arguments, ctypes.c_void_p(stream.cuda_stream)), "copying")


def rounds_of(plan: CallPlan, context: KernelContext) -> list[Round]:
    """Return the copies of a call on this rank, by rounds of ``plan.launch.chunk_bytes`` for each part."""
    item, world_size, rank = wire.DTYPES[plan.dtype], context.world_size, context.rank
    chunk, exchanges = plan.launch.chunk_bytes, plan.op is Op.ALL_TO_ALL
    sizes = [size * item for size in plan.sizes] or [plan.nbytes // world_size] * world_size
    starts = [sum(sizes[:r]) for r in range(world_size)]
    place_nbytes = chunk * (world_size if exchanges else 1)
    window = context.layout.window_at * layout.QUAD
    if chunk < 1 or PLACES * place_nbytes > context.layout.window_quads * layout.QUAD:
        raise ConfigError(
            f"copy_engines: {PLACES} places of {place_nbytes} bytes do not go into a window of "
            f"{context.layout.window_quads * layout.QUAD}"
        )
    found = []
    for number, start in enumerate(range(0, max(sizes), chunk)):
        place = window + number % PLACES * place_nbytes
        own = min(max(sizes[rank] - start, 0), chunk)
        peers = [r for r in range(world_size) if r != rank]
        if exchanges:
            staged = [Copy(context.own_address + place + r * chunk, starts[r] + start, own) for r in peers]
        else:
            staged = [Copy(context.own_address + place, start, own)]
        kept = Copy(starts[rank] + start, starts[rank] + start if exchanges else start, own)
        pulled = []
        for r in peers:
            source = context.addresses[r] + place + (rank * chunk if exchanges else 0)
            pulled.append((Copy(starts[r] + start, source, min(max(sizes[r] - start, 0), chunk)),))
        found.append(Round(tuple(staged), (kept,), tuple(pulled)))
    return found


def bind(plan: CallPlan, context: KernelContext) -> EnqueuedCall:
    """Return the copies of an all_gather or an all_to_all."""
    meetings = []
    for piece in range(PLACES):
        # a kernel that begins early would wait for the kernel before it in its stream alone, and not for the copies
        bound = context.launch(
            barrier,
            dataclasses.replace(plan, piece=piece),
            programs=1,
            num_warps=1,
            tensors="none",
            options={"launch_pdl": False},
            PDL=False,
        )
        meetings.append(Launch(bound.kernel, bound.programs, bound.arguments, (), bound.options))
    copies = EngineCopies(rounds_of(plan, context), meetings, context.world_size - 1, context.lanes)
    return EnqueuedCall(copies, "x and out")
