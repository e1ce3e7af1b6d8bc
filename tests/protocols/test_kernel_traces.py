"""The kernels do what the models say: traces of interpreted kernels are replayed against the state models.

In every call, each program's accesses must be those of the model's program, in an order that the model allows, and
none may be left out. So a kernel that is changed without its model fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.wire import CallPlan, LaunchShape, Norm, Op

from . import test_epoch_advance as epoch_advance
from . import test_flag_cells as flag_cells
from . import test_send_recv as send_recv
from . import test_sentinel as sentinel
from .kernel_traces import Change, Event, traced
from .machine import Add, Await, Fail, KernelBoundary, Load, Start, Steps, Store
from .words import SENTINEL, Call, Header, HeaderRules, header_program

LAUNCH = LaunchShape(1, 128, 1)
"""One data program, whose tile holds a whole slot: the models have one data program and wait for all words at once."""
SIZES = (2, 1, 3, 1, 2)
"""Quads of a slot: the models' words. A longer call after shorter ones finds what was not cleared."""


class ReplayError(AssertionError):
    """A kernel does what the model does not, or leaves out what it does."""


def region_of(place: tuple[Any, ...]) -> str:
    region: str = place[1]
    return region


class Phases:
    """The steps of a model's program in one call: stores, then a wait, then stores, ..."""

    def __init__(self, rank: int, steps: Iterable[Any], translate: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self.stores: list[dict[Any, Any]] = [{}]
        self.waits: list[tuple[dict[Any, Any], Callable[[Any], bool]]] = []
        self.clears: set[Any] = set()
        kept: set[Any] = set()
        for step in steps:
            if isinstance(step, Store):
                place, value = translate(step.address, step.value)
                if value == SENTINEL:
                    self.clears.add(place)
                elif place[0] == rank and region_of(place) in ("slots", "cells"):
                    kept.add(place)  # a rank takes its own words from where they are
                else:
                    self.stores[-1][place] = value
            elif isinstance(step, Await):
                pairs = [(translate(address, value), address) for address, value in step.words.items()]
                words = {place: value for (place, value), _ in pairs if place not in kept}
                if words:
                    self.waits.append((words, step.arrived))
                    self.stores.append({})

    def replay(self, rank: int, events: Iterable[Event], where: str) -> None:
        phase, seen = 0, set()
        for event in events:
            for place, value in event.words.items():
                if event.action == "store" and value == SENTINEL and region_of(place) == "slots":
                    if place not in self.clears:
                        raise ReplayError(f"{where} clears {place}, which the model does not")
                    self.clears.discard(place)
                elif event.action == "store":
                    if place[0] == rank and region_of(place) == "header":
                        continue  # a kernel sends itself a header too
                    if self.stores[phase].get(place) != value:
                        raise ReplayError(
                            f"{where} stores {value} to {place} after {phase} waits; the model: {self.stores[phase]}"
                        )
                    del self.stores[phase][place]
                else:
                    if phase == len(self.waits) or place not in self.waits[phase][0]:
                        if place[0] == rank and region_of(place) == "header" and place[2] == rank:
                            continue
                        if phase and place in self.waits[phase - 1][0]:
                            continue  # the same poll
                        raise ReplayError(f"{where} reads {place}, for which the model does not wait")
                    wanted = self.waits[phase][0][place]
                    seen.discard(place)
                    if value == wanted or (wanted is None and self.waits[phase][1](value)):
                        seen.add(place)
            if phase < len(self.waits) and seen == set(self.waits[phase][0]):
                if self.stores[phase]:
                    raise ReplayError(f"{where} waits before it stores {self.stores[phase]}")
                phase, seen = phase + 1, set()
        left = [self.stores[phase]] if any(self.stores) else []
        if phase < len(self.waits) or left or self.clears:
            raise ReplayError(
                f"{where} leaves out: waits {self.waits[phase:]}, stores {left}, clears {sorted(self.clears)}"
            )


def calls_in(steps: Steps) -> list[list[Any]]:
    """Return the instructions of each call of a model's program."""
    calls: list[list[Any]] = []
    for step in steps:
        if isinstance(step, Start):
            calls.append([])
        elif not isinstance(step, KernelBoundary):
            calls[-1].append(step)
    return calls


def header_of(_address: Any, value: Any) -> tuple[Any, Any]:
    return _address, (value.epoch, "same") if isinstance(value, Header) else value


def slot_of(address: Any, value: Any) -> tuple[Any, Any]:
    owner, _, word = address
    place = owner, "slots", *divmod(word, sentinel.CAPACITY)
    return place, value if value == SENTINEL else "data"


def of_regions(events: Iterable[Event], call: int, *regions: str, data: bool | None = None) -> list[Event]:
    """Return the events of a call in these regions, by the data programs, the program of headers, or all."""
    found = []
    for event in events:
        if event.call == call and (data is None or data == (event.program > 0)):
            words = {place: value for place, value in event.words.items() if region_of(place) in regions}
            if words:
                found.append(event._replace(words=words))
    return found


def replay_epochs(events: list[Event], number: int, rank: int, first: int, extents: Sequence[int]) -> None:
    """Replay how each program learns its epoch, against the model of tests/protocols/test_epoch_advance.py."""
    regions = ("epoch", "generation", "readers", "extent")
    for program in (0, 1):
        where = f"rank {rank}, call {number}, program {program}"
        mine = [e for e in of_regions(events, number, *regions) if e.program == program]
        flat = [(e.action, place[1:], value) for e in mine for place, value in e.words.items()]
        before = [entry for entry in flat if entry[0] != "store"]
        stores = [entry[1:] for entry in flat if entry[0] == "store"]
        counted = next((at for at, entry in enumerate(flat) if entry[0] == "add"), None)
        if counted is None:
            raise ReplayError(f"{where} does not count itself in")
        loads = {place: value for action, place, value in before if action == "load"}
        for at, (action, place, _) in enumerate(flat):
            if (at > counted) != (action == "store") and at != counted:
                raise ReplayError(f"{where}: {action} of {place} on the wrong side of the count of readers")
        steps = epoch_advance.program_of(number, program, 2, epoch_advance.Rules())
        step, wanted = next(steps), []
        while True:
            result: Any = None
            if isinstance(step, Fail):
                raise ReplayError(f"{where} {step.message}")
            if isinstance(step, Load):
                if step.address[1:] not in loads:
                    raise ReplayError(f"{where} does not load {step.address[1:]}")
                result = loads[step.address[1:]] - (first if step.address[1] == "epoch" else 0)
            elif isinstance(step, Add):
                result = flat[counted][2]
            elif isinstance(step, Store) and step.address[1] != "ended":
                value = step.value
                if step.address[1] == "epoch":
                    assert isinstance(value, int)
                    value += first
                wanted.append((step.address[1:], value))
            try:
                step = steps.send(result)
            except StopIteration:
                break
        if sorted(stores, key=str) != sorted(wanted, key=str):
            raise ReplayError(f"{where} stores {stores}, the model {wanted}")


def replay_collectives(
    ranks: int, calls: Sequence[Call], traces: list[list[Event]], cells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay headers, data, and for calls with slots the epoch and extents, of all ranks."""
    extents = [sentinel.extent_of(call, ranks) for call in calls] if not cells else []
    monkeypatch.setattr(epoch_advance, "EXTENTS", extents)
    for rank, events in enumerate(traces):
        first = next(value for event in events for place, value in event.words.items() if place[1:] == ("epoch",))
        headers = HeaderRules(first_epoch=first)
        expected_headers = calls_in(header_program(rank, ranks, calls, headers))
        if cells:
            rules = flag_cells.Rules(first_epoch=first, headers=headers)
            expected_data = calls_in(flag_cells.data_program(rank, ranks, calls, rules))
        else:
            expected_data = calls_in(sentinel.data_program(rank, ranks, calls, sentinel.Rules()))
        for number, call in enumerate(calls):
            where = f"rank {rank}, call {number} ({call.op})"

            def cell_of(address: Any, value: Any, call: Call = call) -> tuple[Any, Any]:
                owner, _, generation, word = address
                sender, i = divmod(word, 10)
                return (owner, "cells", generation, sender * call.words * (call.op != "broadcast") + i), value.flag

            data = Phases(rank, expected_data[number], cell_of if cells else slot_of)
            data.replay(rank, of_regions(events, number, "slots", "cells", data=True), where)
            header = Phases(rank, expected_headers[number], header_of)
            header.replay(rank, of_regions(events, number, "header", data=False), f"{where}, headers")
            for region in ("slots", "cells", "mailbox"):
                if of_regions(events, number, region, data=False):
                    raise ReplayError(f"{where}: the program of headers touches {region}")
            if not cells:
                replay_epochs(events, number, rank, first, extents)


def plans_of(op: str, ranks: int, dtype: str = "float32") -> tuple[list[Call], list[list[CallPlan | None]]]:
    """Return calls of changing size, as the models and as the kernels take them."""
    whole = op in ("one_shot", "broadcast")
    calls = [
        Call(op, (size,) if whole else (size,) * ranks, root=number % ranks if op == "broadcast" else 0)
        for number, size in enumerate(SIZES)
    ]
    operation, algorithm = {
        "one_shot": (Op.ALL_REDUCE, "one_shot"),
        "two_shot": (Op.ALL_REDUCE, "two_shot"),
        "ring": (Op.ALL_REDUCE, "ring"),
        "reduce_scatter": (Op.REDUCE_SCATTER, "one_shot"),
        "all_gather": (Op.ALL_GATHER, "one_shot"),
        "broadcast": (Op.BROADCAST, "one_shot"),
    }[op]
    plans: list[CallPlan | None] = [
        CallPlan(operation, algorithm, dtype, 16 * call.words, root=call.root, launch=LAUNCH) for call in calls
    ]
    return calls, [plans] * ranks


def run(ranks: int, plans: list[list[CallPlan | None]], change: Change | None = None) -> list[list[Event]]:
    return interpret(traced, ranks, plans, change, env=GPU_COLLECTIVES, timeout_s=120)


@pytest.mark.parametrize(
    ("op", "ranks"),
    [
        *((op, 2) for op in ("one_shot", "two_shot", "reduce_scatter", "all_gather", "broadcast")),
        ("ring", 3),
        *(
            pytest.param(op, 3, marks=pytest.mark.full)
            for op in ("one_shot", "two_shot", "reduce_scatter", "all_gather")
        ),
        pytest.param("broadcast", 3, marks=pytest.mark.full),
    ],
)
def test_slots(op: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plans = plans_of(op, ranks)
    replay_collectives(ranks, calls, run(ranks, plans), False, monkeypatch)


@pytest.mark.parametrize("op", ["all_gather", "broadcast"])
def test_flag_cells(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plans = plans_of(op, 2, "int32")
    calls = [Call(call.op, call.sizes[:1], call.root) for call in calls]
    replay_collectives(2, calls, run(2, plans), True, monkeypatch)


def test_fused_one_shot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums with a norm of one row of one tile use slots as plain sums do, with which they take turns."""
    plain = [CallPlan(Op.ALL_REDUCE, "one_shot", "float32", 16 * size, launch=LAUNCH) for size in SIZES[:3]]
    fused = CallPlan(Op.ALL_REDUCE_RMS_NORM, "one_shot", "float32", 512, launch=LAUNCH, norm=Norm(128))
    plans: list[CallPlan | None] = [fused, plain[0], fused, plain[1], plain[2], fused]
    calls = [Call("one_shot", (plan.nbytes // 16,)) for plan in plans if plan is not None]
    replay_collectives(2, calls, run(2, [plans, plans]), False, monkeypatch)


MESSAGES = [(0, 1, 3), (1, 0, 1), (0, 1, 1), (1, 0, 4)]
"""(sender, receiver, chunks); both ranks make the calls in this order."""


def message_word(address: Any, value: Any) -> tuple[Any, Any]:
    if region_of(address) == "mailbox":
        return address, value[1] + 1  # the flag: the number of the chunk, from 1
    return header_of(address, value)


def replay_messages(traces: list[list[Event]]) -> None:
    rules = send_recv.Rules(first_message=0, header_cells=16)
    for rank, events in enumerate(traces):
        data = calls_in(send_recv.gpu_data_program(rank, MESSAGES, rules))
        headers = calls_in(send_recv.gpu_header_program(rank, MESSAGES, rules))
        for number in range(len(MESSAGES)):
            where = f"rank {rank}, message {number}"
            regions = ("mailbox", "credits", "slots", "cells")
            Phases(rank, data[number], message_word).replay(
                rank, of_regions(events, number, *regions, data=True), where
            )
            regions = ("header", "receives_begun_cell", "mailbox", "slots", "cells")
            found = of_regions(events, number, *regions, data=False)
            Phases(rank, headers[number], message_word).replay(rank, found, f"{where}, header")


def message_plans() -> list[list[CallPlan | None]]:
    return [
        [
            CallPlan(Op.SEND if rank == sender else Op.RECV, "one_shot", "float32", 2048 * chunks, root=1 - rank)
            for sender, _, chunks in MESSAGES
        ]
        for rank in (0, 1)
    ]


def test_messages() -> None:
    replay_messages(run(2, message_plans()))


OFTEN = ("the previous generation is not cleared", "credit is given before the copy")
"""The changes that the default run tries."""

CHANGES = {
    "the previous generation is not cleared": (
        "one_shot",
        Change(
            "sync", "range(worker * BLOCK, dirty * 4, workers * BLOCK)", "range(worker * BLOCK, 0, workers * BLOCK)"
        ),
        "leaves out: .*clears",
    ),
    "another generation is cleared": (
        "one_shot",
        Change("sync", "return (call.generation + 2) % GENERATIONS", "return (call.generation + 1) % GENERATIONS"),
        r"does not load \('extent', 2\)",
    ),
    "words go to the wrong generation": (
        "one_shot",
        Change("sync", "slots_at + generation * slots_quads", "slots_at + (generation + 1) % 3 * slots_quads"),
        "stores data to",
    ),
    "the generation does not advance": (
        "two_shot",
        Change(
            "sync", "((call.generation + 1) % GENERATIONS).to(tl.int64)", "(call.generation % GENERATIONS).to(tl.int64)"
        ),
        r"stores \[",
    ),
    "the first reader advances the epoch": (
        "one_shot",
        Change(
            "sync",
            "    if readers == tl.num_programs(0) - 1:\n        tl.store(call.own + READERS",
            "    if readers == 0:\n        tl.store(call.own + READERS",
        ),
        "stores data to .* after 0 waits",
    ),
    "a program counts itself in before it reads the epoch": (
        "one_shot",
        Change(
            "sync",
            "    epoch = tl.load(own + EPOCH, volatile=True)\n",
            '    tl.atomic_add(own + READERS, 0, sem="relaxed", scope="gpu")\n'
            "    epoch = tl.load(own + EPOCH, volatile=True)\n",
        ),
        "wrong side of the count",
    ),
    "a larger extent is recorded": (
        "one_shot",
        Change("one_shot", "else quads * WORLD\n", "else quads * WORLD + 1\n"),
        r"stores \[",
    ),
    "one header cell for both parities": (
        "one_shot",
        Change("sync", "HEADERS + (call.epoch % 2) *", "HEADERS + (call.epoch * 0) *"),
        "headers stores",
    ),
    "sums go to the slots of the first shot": (
        "two_shot",
        Change("two_shot", "sums = second_shot + rank * slice_quads", "sums = first_shot + rank * slice_quads"),
        "stores data to",
    ),
    "one generation of flag cells": (
        "cells",
        Change("sync", "(epoch % 2).to(tl.int32) * cells_quads", "(epoch * 0).to(tl.int32) * cells_quads"),
        "stores .* to",
    ),
    "credit is given before the copy": (
        "messages",
        Change(
            "send_recv",
            "                words, call = await_chunk(",
            "                tl.store(peer_region + CREDITS + rank * CHANNELS + channel, count + 1)\n"
            "                words, call = await_chunk(",
        ),
        "stores .* after 0 waits",
    ),
    "a send stores to the other slot": (
        "messages",
        Change(
            "send_recv",
            "slot = mailbox + (count % 2) * CHUNK_WORDS",
            "slot = mailbox + ((count + 1) % 2) * CHUNK_WORDS",
        ),
        "stores .* to",
    ),
}


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in CHANGES]
)
def test_a_changed_kernel_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, change, message = CHANGES[name]
    calls, plans = (
        ([], message_plans())
        if op == "messages"
        else plans_of(*(("all_gather", 2, "int32") if op == "cells" else (op, 2)))
    )
    traces = run(2, plans, change)
    if op == "cells":
        calls = [Call(call.op, call.sizes[:1]) for call in calls]
    with pytest.raises(ReplayError, match=message):
        replay_messages(traces) if op == "messages" else replay_collectives(
            2, calls, traces, op == "cells", monkeypatch
        )
