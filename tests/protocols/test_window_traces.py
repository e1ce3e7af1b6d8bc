"""The kernel on few SMs does what its model says: traces of its programs are compared with the model's steps.

Each program of a grid is the model's program for the chunks that it has. Between one progress of steps and the next, it
must send and read exactly the words of those chunks, in the places of the model. A word of progress that it polls comes
last once, so a wait for fewer steps, or for fewer ranks, shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast import wire
from shotcast.transport.triton.layout import PROGRESS_STEP_BITS, places_in_window
from shotcast.wire import CallPlan, LaunchShape, Op

from .kernel_traces import Change, Circumstances, Event, traced
from .machine import Await, Fence, Store
from .test_window import STEPS, Rules, stream
from .words import Call

CHUNK = 64
LAUNCH = LaunchShape(programs=2, block_words=16, num_warps=1, chunk_bytes=CHUNK)
QUADS_OF_PART = (21, 1, 8, 0, 37)
"""Quads of a rank's part: up to ten chunks, five of each program, so that places serve again; or none of a program."""


class TraceError(AssertionError):
    """A program does what the model does not, or leaves out what it does."""


class Phase(NamedTuple):
    """The work of a program between two marks of progress, and the mark that ends it.

    Attributes:
        sent: words stored at peers, by (owner, place, sender, word of the chunk).
        read: words loaded from the own window, likewise.
        mark: ("say" or "wait", the number of steps); ("end", 0).
    """

    sent: frozenset[Any]
    read: frozenset[Any]
    mark: tuple[str, int]


def plan_of(op: Op, ranks: int, quads: int) -> CallPlan:
    return CallPlan(op, "few_sms", "float32", 16 * quads * ranks, launch=LAUNCH)


def words_of_chunk(plan: CallPlan, ranks: int, part: int, chunk: int) -> int:
    """Return the words of a chunk of rank ``part``'s part."""
    width = wire.slice_bytes(plan.nbytes, ranks) if plan.op is Op.ALL_REDUCE else plan.nbytes // ranks
    nbytes = max(0, min(width, plan.nbytes - part * width) - chunk * CHUNK)
    return -(-min(nbytes, CHUNK) // 16) * 4


def expected(plan: CallPlan, rank: int, ranks: int, program: int) -> list[Phase]:
    """Return the phases of the model's program."""
    width = wire.slice_bytes(plan.nbytes, ranks) if plan.op is Op.ALL_REDUCE else plan.nbytes // ranks
    chunks = -(-(-(-width // CHUNK) - program) // LAUNCH.programs)
    name = "all_reduce" if plan.op is Op.ALL_REDUCE else "all_gather"
    sent: set[Any] = set()
    read: set[Any] = set()
    phases: list[Phase] = []

    def words(place: tuple[Any, ...], value: Any) -> Iterator[Any]:
        owner, _, number, sender = place
        chunk = value.index
        of = sender if number >= Rules.sent else owner  # a sum is of the sender's part, as is a part that is gathered
        if plan.op is Op.ALL_GATHER:
            of = sender
        for word in range(words_of_chunk(plan, ranks, of, chunk * LAUNCH.programs + program)):
            yield owner, number, sender, word

    def end(mark: tuple[str, int]) -> None:
        phases.append(Phase(frozenset(sent), frozenset(read), mark))
        sent.clear()
        read.clear()

    said: int | None = None
    for step in stream(rank, ranks, 0, Call(name, (chunks,), 0), Rules()):
        if isinstance(step, Store) and step.address[1] == "progress":
            if said != step.value:
                end(("say", step.value))
            said = step.value
        elif isinstance(step, Store):
            sent.update(words(step.address, step.value))
        elif isinstance(step, Await) and all(place[1] == "progress" for place in step.words):
            arrived = step.arrived
            end(("wait", next(number for number in range(STEPS) if arrived(number))))
        elif isinstance(step, Await):
            for place, value in step.words.items():
                read.update(words(place, value))
        else:
            assert isinstance(step, Fence)
    end(("end", 0))
    return phases


def found(
    events: Sequence[Event],
    rank: int,
    ranks: int,
    program: int,
    phases: Sequence[Phase],
    places: int,
) -> list[Phase]:
    """Return the phases of a program's trace, whose window has so many ``places`` for each program.

    Raises:
        TraceError: progress is said without a barrier before it, or not to all; a wait ends before all have come so
            far, or without a barrier behind it; or a word is stored elsewhere.
    """
    sent: set[Any] = set()
    read: set[Any] = set()
    made: list[Phase] = []
    words = CHUNK // 4
    after_barrier, waiting = False, False

    def end(mark: tuple[str, int]) -> None:
        made.append(Phase(frozenset(sent), frozenset(read), mark))
        sent.clear()
        read.clear()

    def steps_of(event: Event) -> dict[int, int]:
        return {place[0 if event.action == "release" else 2]: word for place, word in event.words.items()}

    for event in events:
        regions = {place[1] for place in event.words}
        if event.action == "barrier":
            after_barrier, waiting = True, False
        elif event.action == "warp":  # each warp waits for itself
            waiting = False
        elif regions == {"progress"} and event.action == "release":
            if not after_barrier:
                raise TraceError("it says how far it is before all of its threads are")
            if any(place[2:] != (rank, program) for place in event.words) or len(event.words) != ranks:
                raise TraceError(f"it does not tell all ranks by its own word: {event.words}")
            (word,) = set(event.words.values())
            end(("say", word & (1 << PROGRESS_STEP_BITS) - 1))
        elif regions == {"progress"}:
            wanted = phases[len(made) - waiting].mark if len(made) - waiting < len(phases) else ("end", 0)
            if any(place[0] != rank or place[3] != program for place in event.words):
                raise TraceError(f"it polls words of others: {event.words}")
            if not waiting:
                end(wanted)
            waiting = True
            late = [word & (1 << PROGRESS_STEP_BITS) - 1 < wanted[1] for word in event.words.values()]
            if wanted[0] != "wait" or len(event.words) != ranks:
                raise TraceError(f"it waits where the model has {wanted}, for {event.words}")
            arrived = not any(late)
        elif regions == {"window"}:
            if waiting or (made and made[-1].mark[0] == "wait" and not arrived):
                raise TraceError("a wait ended before all ranks had come so far, or without a barrier")
            for place in event.words:
                of_program, rest = divmod(place[2], places * ranks * words)
                number, rest = divmod(rest, ranks * words)
                sender, word = divmod(rest, words)
                known = of_program == program and (sender == rank) == (event.action == "store")
                if not known or (place[0] == rank) != (event.action == "plain load"):
                    raise TraceError(f"{event.action} of a place that is not its own: {place}")
                (sent if event.action == "store" else read).add((place[0], number, sender, word))
            after_barrier = False
    end(("end", 0))
    return made


def check(plans: Sequence[CallPlan], ranks: int, change: Change | None = None, timeout_s: float = 30.0) -> None:
    """Compare the traces of all programs with the model.

    Args:
        timeout_s: the deadline; below 2 where a changed kernel hangs (:class:`Circumstances`).

    Raises:
        TraceError: they differ.
    """
    circumstances = Circumstances(change=change, timeout_s=timeout_s)
    traces = interpret(traced, ranks, [list(plans)] * ranks, circumstances, env=GPU_COLLECTIVES)
    for rank, trace in enumerate(traces):
        for number, plan in enumerate(plans):
            for program in range(LAUNCH.programs):
                wanted = expected(plan, rank, ranks, program)
                events = [event for event in trace if (event.call, event.program) == (number, program)]
                got = found(events, rank, ranks, program, wanted, places_in_window(plan.op))
                for place, (one, other) in enumerate(zip(got, wanted, strict=False)):
                    if one != other:
                        raise TraceError(
                            f"rank {rank}, call {number}, program {program}, phase {place}: {one}, {other}"
                        )
                if len(got) != len(wanted):
                    raise TraceError(f"rank {rank}, call {number}, program {program}: {len(got)} phases")


@pytest.mark.every(4)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL])
def test_programs_do_what_the_model_does(op: Op, ranks: int) -> None:
    check([plan_of(op, ranks, quads) for quads in QUADS_OF_PART if quads], ranks)


CHANGES = {
    "three places for four chunks": Change(
        "few_sms",
        "        mine = window + turn % TURNS * place_quads + rank * stride",
        "        mine = window + turn % 3 * place_quads + rank * stride",
    ),
    "one place for sums": Change(
        "few_sms",
        "sums_came = window + (TURNS + (turn + LAG) % TURNS) * place_quads",
        "sums_came = window + TURNS * place_quads",
    ),
    "another program's place": Change(
        "few_sms", "window = window_at + worker * PLACES * place_quads", "window = window_at + worker * 4 * place_quads"
    ),
    "no wait before the first chunk": Change(
        "few_sms", "    call = sync.await_progress(call, progress, 0, WORLD, WARPS)", "    call = call"
    ),
    "a wait for a step less": Change(
        "few_sms",
        "call, late_ranks = sync.await_progress_by_warp(call, progress, step - LAG + 1, WORLD)",
        "call, late_ranks = sync.await_progress_by_warp(call, progress, step - LAG, WORLD)",
    ),
    "progress of a step more": Change(
        "few_sms",
        "            sync.raise_progress(call, progress, step + 1, WORLD, WARPS)",
        "            sync.raise_progress(call, progress, step + 2, WORLD, WARPS)",
    ),
    "another program's progress": Change(
        "few_sms", "progress = progress_at + worker * FLAG_ROW_QUADS", "progress = progress_at + worker * 0"
    ),
    "progress before all threads have stored": Change(
        "sync",
        'while the others go on.\n    """\n    tl.debug_barrier()\n    threads = thread_ids(WARPS)',
        'while the others go on.\n    """\n    threads = thread_ids(WARPS)',
    ),
    "progress without the epoch": Change(
        "sync", "(call.epoch << PROGRESS_STEP_BITS) + steps + threads * 0, (threads", "steps + threads * 0, (threads"
    ),
    "a wait for all ranks but one": Change(
        "sync",
        "    ranks = lanes < WORLD\n    wanted = (call.epoch",
        "    ranks = lanes < WORLD - 1\n    wanted = (call.epoch",
    ),
}
HANGS = "progress without the epoch"


@pytest.mark.parametrize(
    "name", [name if number < 2 else pytest.param(name, marks=pytest.mark.full) for number, name in enumerate(CHANGES)]
)
def test_changed_kernels_are_found(name: str) -> None:
    # a wait that is too short shows where a rank is late, which none may be in two calls
    plans = [plan_of(Op.ALL_REDUCE, 2, 37), plan_of(Op.ALL_REDUCE, 2, 21)] * (4 if "less" in name else 1)
    with pytest.raises(TraceError):
        check(plans, 2, CHANGES[name], timeout_s=1.5 if name == HANGS else 30.0)
