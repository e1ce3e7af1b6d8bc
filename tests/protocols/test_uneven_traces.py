"""The kernel for parts of any sizes does what the models say: heads go as flag cells, the rest through the window.

Traces of its programs are compared with the steps of both protocols. Each cell that is polled comes last once, so a
wait that leaves out a word, or takes one of an earlier call, shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.transport.triton.layout import CHUNKS_IN_WINDOW, QUAD, WorkspaceLayout
from shotcast.wire import CallPlan, LaunchShape, Op

from .kernel_traces import Change, Circumstances, Event, traced
from .machine import Await, Fence, Store
from .test_window import STEPS, UNEVEN, stream
from .test_window_traces import Phase, TraceError, found
from .words import Call

CHUNK = 64
LAUNCH = LaunchShape(programs=2, block_words=16, num_warps=1, chunk_bytes=CHUNK)
SIZE_WORDS = 3
"""Words of which a rank tells another before its part: its size, and the chunks of the sender."""
ROOM = WorkspaceLayout.for_messages(1 << 14)


def head_words(ranks: int) -> int:
    """Return the words of a head in the workspace of traces."""
    return (ROOM.cells_quads // ranks - 2) // 2 * 4


def plans_of(matrix: Sequence[Sequence[int]]) -> list[CallPlan]:
    """Return the call of each rank, of the int32 that each sends to each beyond a head if there are more than 100."""
    ranks = len(matrix)
    head = head_words(ranks)
    words = [[n + head - 100 if n > 100 else n for n in row] for row in matrix]
    return [
        CallPlan(
            Op.ALL_TO_ALL_UNEVEN,
            "one_shot",
            "int32",
            0,
            sizes=(*words[rank], *(row[rank] for row in words)),
            launch=LAUNCH,
        )
        for rank in range(ranks)
    ]


CALLS = {
    2: [[[4, 7], [0, 4]], [[0, 190], [103, 4]], [[0, 0], [0, 0]], [[1, 325], [0, 1]], [[3, 101], [230, 0]]],
    3: [[[0, 190, 2], [0, 0, 230], [5, 0, 9]], [[1, 0, 0], [400, 0, 2], [101, 0, 0]]],
}
"""By call, the elements from each rank to each: heads alone, chunks of one rank or of all, or nothing."""


def whole_quads(words: int) -> int:
    return -(-words // 4) * 4


def chunks_of(plan: CallPlan, rank: int, ranks: int) -> int:
    longest = max(plan.sizes[r] for r in range(ranks) if r != rank)
    return -(-max(longest - head_words(ranks), 0) * 4 // CHUNK)


def cells_of(plan: CallPlan, rank: int, ranks: int, sends: bool) -> set[tuple[int, int]]:
    """Return the cells that a rank sends, as (receiver, cell), or waits for, as (its own, cell)."""
    head = head_words(ranks)
    cells = set()
    for other in range(ranks):
        if other != rank:
            sender, owner = (rank, other) if sends else (other, rank)
            size = plan.sizes[other if sends else ranks + other]
            slot = sender * (4 + head)
            count = whole_quads(min(size, head))
            cells |= {(owner, slot + word) for word in (*range(4), *range(4, 4 + count))}
    return cells


def check_heads(events: Sequence[Event], plan: CallPlan, rank: int, ranks: int, epoch: int) -> None:
    """Compare the cells of a call with the model of flag cells: each is sent once, and seen to have come.

    Raises:
        TraceError: they differ.
    """
    sent: list[tuple[int, int]] = []
    last: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
    for event in events:
        for (owner, region, *index), flag in event.words.items():
            if region != "cells":
                continue
            if index[0] != epoch % 2:
                raise TraceError(f"rank {rank} uses the cells of another call: {event}")
            if event.action == "store":
                if owner == rank or flag != epoch:
                    raise TraceError(f"rank {rank} stores {flag} in {owner}, in call {epoch}")
                sent.append((owner, index[1]))
            else:
                last.setdefault((event.program, owner), {})[owner, index[1]] = flag
    wanted = cells_of(plan, rank, ranks, True)
    if len(sent) != len(set(sent)) or set(sent) != wanted:
        raise TraceError(f"rank {rank} sends other cells: {set(sent) ^ wanted}")
    polled: set[tuple[int, int]] = set()
    for (program, owner), cells in last.items():
        if owner != rank or set(cells.values()) != {epoch}:
            raise TraceError(f"rank {rank}, program {program}: a wait has ended before all cells had come")
        polled |= set(cells)
    if polled != cells_of(plan, rank, ranks, False):
        raise TraceError(f"rank {rank} waits for other cells: {polled ^ cells_of(plan, rank, ranks, False)}")
    sizes = {(rank, sender * (4 + head_words(ranks)) + 2) for sender in range(ranks) if sender != rank}
    for program in range(LAUNCH.programs + 1):
        if not sizes <= set(last.get((program, rank), {})):
            raise TraceError(f"rank {rank}, program {program}: it does not learn how many chunks there are")


def expected(plans: Sequence[CallPlan], rank: int, program: int) -> list[Phase]:
    """Return the phases of the model's program in the window."""
    ranks, head = len(plans), head_words(len(plans))
    most = max(chunks_of(plan, r, ranks) for r, plan in enumerate(plans))
    steps = -(-most // LAUNCH.programs)
    if not steps:
        return [Phase(frozenset(), frozenset(), ("end", 0))]
    sent: set[Any] = set()
    read: set[Any] = set()
    phases: list[Phase] = []

    def words(place: tuple[Any, ...], value: Any) -> Any:
        owner, _, number, sender = place
        chunk = value.index * LAUNCH.programs + program
        left = plans[sender].sizes[owner] - head - chunk * CHUNK // 4
        for word in range(whole_quads(max(0, min(left, CHUNK // 4)))):
            yield owner, number, sender, word

    def end(mark: tuple[str, int]) -> None:
        phases.append(Phase(frozenset(sent), frozenset(read), mark))
        sent.clear()
        read.clear()

    said: int | None = None
    for step in stream(rank, ranks, 0, Call("all_gather", (steps,), 0), UNEVEN):
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


def check(matrices: Sequence[Sequence[Sequence[int]]], change: Change | None = None, timeout_s: float = 30.0) -> None:
    """Compare the traces of all programs with the models. Raises TraceError if they differ."""
    ranks = len(matrices[0])
    calls = [plans_of(matrix) for matrix in matrices]
    by_rank = [[plans[rank] for plans in calls] for rank in range(ranks)]
    traces = interpret(traced, ranks, by_rank, Circumstances(change=change, timeout_s=timeout_s), env=GPU_COLLECTIVES)
    for rank, trace in enumerate(traces):
        for number, plans in enumerate(calls):
            events = [event for event in trace if event.call == number]
            check_heads(events, plans[rank], rank, ranks, number + 1)
            for program in range(LAUNCH.programs):
                wanted = expected(plans, rank, program)
                own = [event for event in events if event.program == program + 1]
                got = found(own, rank, ranks, program, wanted, CHUNKS_IN_WINDOW)
                if got != wanted:
                    raise TraceError(f"rank {rank}, call {number}, program {program}: {got}, {wanted}")


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_programs_do_what_the_models_do(ranks: int) -> None:
    assert head_words(ranks) * 4 % QUAD == 0
    check(CALLS[ranks])


CHANGES = {
    "a part that is one word short": Change(
        "uneven",
        "            mask = offs < words_in(bytes_in_chunk(spans.sizes[i], start, nbytes))",
        "            mask = offs < words_in(bytes_in_chunk(spans.sizes[i], start, nbytes)) - 4",
    ),
    "chunks of this rank alone": Change(
        "uneven",
        "        most = tl.maximum(most, tl.where((lanes == 2) & (call.rank != r), came[r], 0))",
        "        most = tl.maximum(most, tl.where((lanes == 2) & (call.rank == r), came[r], 0))",
    ),
    "no wait for sizes": Change(
        "uneven",
        "        masks = masks + ((lanes < SIZE_WORDS) & (call.rank != r),)",
        "        masks = masks + ((lanes < SIZE_WORDS) & (call.rank > WORLD),)",
    ),
    "two places for three chunks": Change(
        "uneven",
        "                    place = window + turn % CHUNKS_SENT * place_quads + rank * (chunk_nbytes // 16)",
        "                    place = window + turn % 2 * place_quads + rank * (chunk_nbytes // 16)",
    ),
    "no wait before the first chunk": Change(
        "uneven", "            call = sync.await_progress(call, progress, 0, WORLD, WARPS)", "            call = call"
    ),
    "a wait for a step less": Change(
        "uneven",
        "                    call = sync.await_progress(call, progress, step, WORLD, WARPS)",
        "                    call = sync.await_progress(call, progress, step - 1, WORLD, WARPS)",
    ),
    "another program's place": Change(
        "uneven",
        "window = window_at + worker * CHUNKS_SENT * place_quads",
        "window = window_at + worker * 2 * place_quads",
    ),
    "a head of another rank's place": Change(
        "uneven", "    mine = buffer + rank * stride", "    mine = buffer + (rank + 1) * stride"
    ),
}
HANGS = ("chunks of this rank alone", "a head of another rank's place", "a part that is one word short")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "name", [name if number < 2 else pytest.param(name, marks=pytest.mark.full) for number, name in enumerate(CHANGES)]
)
def test_changed_kernels_are_found(name: str) -> None:
    with pytest.raises(TraceError):
        check(CALLS[2][1:5:3], CHANGES[name], 1.5 if name in HANGS else 30.0)
