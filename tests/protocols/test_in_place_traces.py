"""The kernel on few SMs in place does what its model says: traces of its programs are held against the model's steps.

The model is that of :mod:`.test_in_place`: tell the places, begin, look at those of all ranks, read and write the
tensors, meet again. A word of progress that a program polls comes last once, so a wait for fewer ranks shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast import wire
from shotcast.transport.triton.layout import PROGRESS_STEP_BITS
from shotcast.wire import CallPlan, LaunchShape, Op

from .kernel_traces import Change, Circumstances, Event, traced

TILE_WORDS = 16
LAUNCH = LaunchShape(programs=2, block_words=TILE_WORDS, num_warps=1, chunk_bytes=64)


class TraceError(AssertionError):
    """A program does what the model does not, or leaves out what it does."""


def plan_of(op: Op, ranks: int, quads: int) -> CallPlan:
    """Return a call whose part of each rank has so many quads."""
    return CallPlan(op, "few_sms", "float32", 16 * quads * ranks, launch=LAUNCH)


def tiles_of(words: int, program: int) -> set[int]:
    """Return the words of a part that a program has."""
    return {word for word in range(words) if word // TILE_WORDS % LAUNCH.programs == program}


def accesses(plan: CallPlan, rank: int, ranks: int, program: int) -> tuple[set[tuple[int, str, int]], ...]:
    """Return the words of tensors that a program loads and those that it stores, as (owner, tensor, word)."""
    part = (wire.slice_bytes(plan.nbytes, ranks) if plan.op is Op.ALL_REDUCE else plan.nbytes // ranks) // 4
    whole = plan.nbytes // 4
    own = range(ranks), tiles_of(min(part, max(0, whole - rank * part)), program)
    if plan.op is Op.ALL_GATHER:
        loads = {(peer, "x", word) for peer in own[0] for word in tiles_of(part, program)}
        return loads, {(rank, "out", peer * part + word) for peer, _, word in loads}
    loads = {(peer, "x", rank * part + word) for peer in own[0] for word in own[1]}
    if plan.op is Op.ALL_TO_ALL:
        return loads, {(rank, "out", peer * part + word - rank * part) for peer, _, word in loads}
    if plan.op is Op.REDUCE_SCATTER:
        return loads, {(rank, "out", word) for word in own[1]}
    return loads, {(peer, "out", word) for peer, _, word in loads}


def check_program(events: Sequence[Event], plan: CallPlan, rank: int, ranks: int, program: int, epoch: int) -> None:
    """Hold the trace of a program against the model.

    Raises:
        TraceError: it differs.
    """
    row = 2 * program + epoch % 2
    everybody = range(ranks)
    places = {(owner, "place", 2 * rank + word, row) for owner in everybody for word in (0, 1)}
    told: set[object] = set()
    seen: set[object] = set()
    loads: set[object] = set()
    stores: set[object] = set()
    said = waited = -1
    after_barrier = waiting = False
    for event in events:
        regions = {place[1] for place in event.words}
        if event.action == "barrier":
            after_barrier = True
            if waiting:
                waited, waiting = said, False
        elif regions == {"place"} and event.action == "store":
            told |= set(event.words)
            after_barrier = False
        elif regions == {"place"}:
            if waited != 0:
                raise TraceError("it looks where tensors lie before all ranks have said so")
            seen |= set(event.words)
        elif regions == {"progress"} and event.action == "release":
            steps = {word & (1 << PROGRESS_STEP_BITS) - 1 for word in event.words.values()}
            if steps != {said + 1} or not after_barrier or told != places:
                raise TraceError(f"it says {steps} after {said}, without a barrier or the places of its tensors")
            if {place[0] for place in event.words} != set(everybody):
                raise TraceError(f"it does not tell all ranks: {event.words}")
            said += 1
        elif regions == {"progress"}:
            late = [word for word in event.words.values() if word & (1 << PROGRESS_STEP_BITS) - 1 < said]
            waiting = not late and {place[2] for place in event.words} == set(everybody)
        elif regions <= {"x", "out"} and regions:
            if waited != 0 or said != 0:
                raise TraceError("it uses tensors before all ranks have begun, or after it has said that it is done")
            (stores if event.action == "store" else loads).update(event.words)
            after_barrier = False
    words = (0, 1) if plan.op is Op.ALL_REDUCE else (0,)
    known = {(rank, "place", 2 * owner + word, row) for owner in everybody for word in words}
    if seen != known:
        raise TraceError(f"it looks at places {seen}, not {known}")
    if (said, waited) != (1, 1):
        raise TraceError(f"it has said {said} and waited for {waited}")
    if (loads, stores) != accesses(plan, rank, ranks, program):
        raise TraceError(f"rank {rank}, program {program}: it loads {loads} and stores {stores}")


def check(plans: Sequence[CallPlan], ranks: int, change: Change | None = None) -> None:
    circumstances = Circumstances(change=change, mapped=tuple(range(ranks)))
    traces = interpret(traced, ranks, [list(plans)] * ranks, circumstances, env=GPU_COLLECTIVES)
    for rank, trace in enumerate(traces):
        for number, plan in enumerate(plans):
            for program in range(LAUNCH.programs):
                events = [event for event in trace if (event.call, event.program) == (number, program)]
                check_program(events, plan, rank, ranks, program, number + 1)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_programs_do_what_the_model_does(ranks: int) -> None:
    ops = Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL
    check([plan_of(op, ranks, quads) for op in ops for quads in (13, 1)], ranks)


CHANGES = {
    "no meeting at the end": Change(
        "few_sms",
        "    call = sync.await_progress(call, progress, 1, WORLD, SHAPE.WARPS)\n    if KIND",
        "    if KIND",
    ),
    "a rank by itself": Change(
        "few_sms",
        "    for r in tl.static_range(WORLD):\n        mapped = mapped & (sync.place_of(call, row, r, False)",
        "    for r in tl.static_range(1):\n        mapped = mapped & (sync.place_of(call, row, rank, False)",
    ),
    "one row of places": Change(
        "few_sms", "(worker * 2 + (call.epoch & 1).to(tl.int32)) * PLACE_ROW_QUADS", "worker * 2 * PLACE_ROW_QUADS"
    ),
    "a look before the wait": Change(
        "few_sms",
        "    call = sync.await_progress(call, progress, 0, WORLD, WARPS)",
        "    sync.place_of(call, row, rank, False)\n    call = sync.await_progress(call, progress, 0, WORLD, WARPS)",
    ),
    "sums for this rank alone": Change(
        "few_sms",
        "                    store_words(outs[i], target, offs, words, own_size, UNIT)",
        " " * 20 + "pass",
    ),
}


@pytest.mark.parametrize(
    "name", [name if number < 1 else pytest.param(name, marks=pytest.mark.full) for number, name in enumerate(CHANGES)]
)
def test_changed_kernels_are_found(name: str) -> None:
    with pytest.raises(TraceError):
        check([plan_of(Op.ALL_REDUCE, 2, 13), plan_of(Op.ALL_REDUCE, 2, 5)], 2, CHANGES[name])
