"""Calls that go wrong do what the model of deadlines says: traces of interpreted kernels against ``test_abort.py``.

A program looks at the abort word before it stores anything. The one that gives up has looked at every header, and
stores one fault to all ranks, of the kind and with the ranks that the model has. Calls after it store nothing.
"""

from __future__ import annotations

import dataclasses

import pytest

from shotcast import wire
from shotcast.wire import CallPlan, Fault, LaunchShape

from . import test_abort as abort
from .kernel_replay import ReplayError, region_of
from .kernel_traces import COPIES, Change, Circumstances, Event
from .test_kernel_traces import reduced, run

RANKS, FAULTY, STOPPED = 2, 1, 2
"""Ranks; the call that goes wrong; the call after it."""
TIMEOUT_S = 1.5
CULPRIT = RANKS - 1
KINDS = {"timeout": wire.TIMEOUT, "mismatch": wire.MISMATCH}


def traces_of(culprit: str, change: Change | None = None) -> list[list[Event]]:
    """Make three calls, of which the second goes wrong as the model's scenarios do."""
    # of several data programs, which the interpreter runs one after the other, the later ones would be late
    plan = reduced("one_shot", RANKS, 9, LaunchShape(programs=1, block_words=64, num_warps=1)).plan
    plans: list[list[CallPlan | None]] = [[plan] * 3 for _ in range(RANKS)]
    if culprit in ("absent", "dies"):
        plans[CULPRIT][FAULTY if culprit == "absent" else STOPPED :] = [None] * (2 if culprit == "absent" else 1)
    if culprit == "differs":
        plans[CULPRIT][FAULTY] = dataclasses.replace(plan, nbytes=plan.nbytes - 16)
    silent = (CULPRIT, FAULTY) if culprit == "dies" else None
    return run(RANKS, plans, Circumstances(change, silent=silent, timeout_s=TIMEOUT_S))


def expected(culprit: str, rank: int) -> abort.Fault | None:
    """Return the fault that the model's rank stores, or None if it stores none."""
    if culprit == "differs":
        return abort.Fault("mismatch", frozenset({1 - rank}))
    return abort.Fault("timeout", frozenset({CULPRIT})) if rank != CULPRIT else None


def replay(culprit: str, traces: list[list[Event]]) -> None:
    for rank, events in enumerate(traces):
        for call in (FAULTY, STOPPED):
            mine = [event for event in events if event.call == call and event.words]
            if mine:
                _replay(culprit, rank, call, mine)


def _replay(culprit: str, rank: int, call: int, events: list[Event]) -> None:
    where = f"rank {rank}, call {call}"
    for program in {event.program for event in events}:
        own = [event for event in events if event.program == program]
        looked = next((i for i, e in enumerate(own) if any(p[:2] == (rank, "abort") for p in e.words)), len(own))
        stores = next((i for i, e in enumerate(own) if e.action == "store"), len(own))
        if stores < looked:
            raise ReplayError(f"{where}, program {program} stores before it looks at the abort word")
    if call == STOPPED:
        for event in events:
            if event.action == "store" and any(
                region_of(place) in ("slots", "header", "abort") for place in event.words
            ):
                raise ReplayError(f"{where}, program {event.program} stores {event.words}")
        return
    told: dict[int, set[int]] = {}  # the words that each rank is told
    copies: dict[int, set[int]] = {}  # the copies that have it
    for position, event in enumerate(events):
        words = {place: word for place, word in event.words.items() if region_of(place) == "abort"}
        if event.action != "store" or not words:
            continue
        for (owner, _, copy), word in words.items():
            told.setdefault(owner, set()).add(word & 0xFFFFFFFFFFFFFFFF)
            copies.setdefault(owner, set()).add(copy)
        before = [e for e in events[:position] if e.program == event.program and e.action == "load"]
        seen = {place[2] for e in before for place in e.words if region_of(place) == "header" and place[0] == rank}
        if not set(range(RANKS)) - {rank} <= seen:
            raise ReplayError(f"{where}, program {event.program} gives up without a look at all headers")
    wanted = expected(culprit, rank)
    if wanted is None:
        if told:
            raise ReplayError(f"{where} stores a fault, which the model does not")
        return
    if set(told) != set(range(RANKS)):
        raise ReplayError(f"{where} tells ranks {sorted(told)}")
    if any(found != set(range(COPIES)) for found in copies.values()):
        raise ReplayError(f"{where} leaves copies of the abort word as they are")
    for word in set().union(*told.values()):
        fault = Fault.decode(word)
        if (fault.kind, set(fault.ranks), fault.op) != (KINDS[wanted.kind], set(wanted.ranks), "all_reduce"):
            raise ReplayError(f"{where} stores {fault}, the model {wanted}")


@pytest.mark.timing
@pytest.mark.parametrize("culprit", ["absent", "dies", "differs"])
def test_calls_that_go_wrong(culprit: str) -> None:
    replay(culprit, traces_of(culprit))


CHANGES = {
    "a rank tells nobody else": (
        "absent",
        Change(
            "sync", "write_abort_words(region, fault, region != 0)", "write_abort_words(region, fault, r == call.rank)"
        ),
        "tells ranks",
    ),
    "a copy is not told": (
        "absent",
        Change("sync", "+ ABORT_WORD, fault, mask=mask)", "+ ABORT_WORD, fault, mask=mask & (copies > 0))"),
        "leaves copies",
    ),
    "the wrong rank is named": (
        "dies",
        Change("sync", "axis=0) << ((first + r) % WORLD))", "axis=0) << ((first + r + 1) % WORLD))"),
        "the model",
    ),
    "a fault has another kind": (
        "differs",
        Change("sync", "stop(call, FAULT_MISMATCH, ranks_of_cells", "stop(call, FAULT_TIMEOUT, ranks_of_cells"),
        "the model",
    ),
    "a stopped rank goes on": (
        "absent",
        Change("sync", "live = (read_abort_word(own, WARPS) == 0)", "live = (read_abort_word(own, WARPS) < 1 << 62)"),
        "stores",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_kernel_is_caught(name: str) -> None:
    culprit, change, message = CHANGES[name]
    with pytest.raises(ReplayError, match=message):
        replay(culprit, traces_of(culprit, change))
