"""The kernels do what the models say: traces of interpreted kernels are replayed against the state models.

In every call, each program's accesses must be those of the model's program, in an order that the model allows, and
none may be left out. So a kernel that is changed without its model fails here; ``test_kernel_changes.py`` changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.transport.triton.layout import CHUNK_WORDS, MESSAGE_SLOTS
from shotcast.wire import CallPlan, LaunchShape, Norm, Op

from . import test_flag_cells as flag_cells
from . import test_multimem as multimem
from . import test_send_recv as send_recv
from . import test_sentinel as sentinel
from .kernel_replay import (
    Phases,
    ReplayError,
    Translation,
    calls_in,
    header_of,
    of_regions,
    region_of,
    replay_epochs,
    waits_for_prior_kernel,
)
from .kernel_traces import Circumstances, Event, traced
from .words import SENTINEL, Call, HeaderRules, header_program

TILE = 16
"""Words of a tile, which are four quads."""
LAUNCH = LaunchShape(programs=3, block_words=TILE, num_warps=1)
"""Three data programs with a tile each; the last may be empty, and in a short call one or two have none."""
QUADS = (9, 4, 12, 1, 5)
"""Quads of a slot. A longer call after shorter ones finds what was not cleared."""
HEADERS = HeaderRules(words=2)


class TracedCall(NamedTuple):
    """A call as the models and as the kernels take it: through slots, or through flag cells."""

    call: Call
    plan: CallPlan
    cells: bool = False


def slices(quads: int, ranks: int) -> tuple[int, ...]:
    """Return the words of each rank's slice of a message."""
    width = -(-quads // ranks)
    return tuple(4 * max(0, min(width, quads - rank * width)) for rank in range(ranks))


def reduced(
    op: str, ranks: int, quads: int, launch: LaunchShape = LAUNCH, dtype: str = "float32", reduction: str = "sum"
) -> TracedCall:
    """Return an all-reduce of ``quads``."""
    if dtype != "float32":
        call = Call("all_gather", (4 * quads,)) if op == "one_shot" else Call(op, slices(quads, ranks))
        plan = CallPlan(Op.ALL_REDUCE, op, dtype, 16 * quads, launch=launch, reduction=reduction)
        return TracedCall(call, plan, cells=True)
    sizes = {"one_shot": (4 * quads,), "ring": (4 * -(-quads // ranks),) * ranks}.get(op, slices(quads, ranks))
    plan = CallPlan(Op.ALL_REDUCE, op, dtype, 16 * quads, launch=launch, reduction=reduction)
    return TracedCall(Call(op, sizes), plan)


def in_parts(op: Op, ranks: int, quads: int, algorithm: str = "one_shot", dtype: str = "float32") -> TracedCall:
    """Return a reduce_scatter, all_gather or all_to_all with parts of ``quads``."""
    plan = CallPlan(op, algorithm, dtype, 16 * quads * ranks, launch=LAUNCH)
    if dtype == "int32":
        return TracedCall(Call("all_gather", (4 * quads,)), plan, cells=True)
    name = "half_ring" if algorithm == "ring" else "all_gather" if op is Op.ALL_GATHER else "reduce_scatter"
    return TracedCall(Call(name, (4 * quads,) * ranks), plan)


def uneven(sizes: tuple[int, ...]) -> TracedCall:
    """Return an all_gather of parts of so many quads."""
    words = tuple(4 * size for size in sizes)
    plan = CallPlan(Op.ALL_GATHER, "one_shot", "float32", 4 * sum(words), root=1, sizes=words, launch=LAUNCH)
    return TracedCall(Call("all_gather", words), plan)


def broadcast(quads: int, root: int, dtype: str = "float32", multicast: bool = False) -> TracedCall:
    plan = CallPlan(Op.BROADCAST, "one_shot", dtype, 16 * quads, root=root, launch=LAUNCH)
    return TracedCall(Call("broadcast", (4 * quads,), root, multicast=multicast), plan, cells=dtype == "int32")


def fused(algorithm: str, ranks: int, rows: int) -> TracedCall:
    """Return a sum of ``rows`` rows of a tile each, which are normed."""
    sizes = (TILE * rows,)
    width = -(-rows // ranks) * TILE
    if algorithm == "two_shot":
        sizes = tuple(max(0, min(width, TILE * rows - rank * width)) for rank in range(ranks))
    launch = LaunchShape(programs=-(-rows // ranks) if algorithm == "two_shot" else rows, block_words=TILE)
    plan = CallPlan(Op.ALL_REDUCE_RMS_NORM, algorithm, "float32", 4 * TILE * rows, launch=launch, norm=Norm(TILE))
    return TracedCall(Call(algorithm, sizes), plan)


def fp8(ranks: int, quads: int) -> TracedCall:
    """Return an all-reduce by FP8 words, of ``quads`` a slice: as many quads of words, up to 32, and one of scales."""
    launch = LaunchShape(programs=1, block_words=128, num_warps=1)
    plan = CallPlan(Op.ALL_REDUCE, "two_shot_fp8", "float32", 16 * quads * ranks, launch=launch)
    return TracedCall(Call("two_shot", (4 * min(quads, 32) + 4,) * ranks), plan)


def barrier() -> TracedCall:
    return TracedCall(Call("barrier", ()), CallPlan(Op.BARRIER, "one_shot", "float32", 0))


def slot_of(first_epoch: int) -> Translation:
    """Return the translation of the words of a call with slots."""

    def translate(address: Any, value: Any) -> tuple[Any, Any]:
        owner, region, *index = address
        if region == "flags":
            return (owner, "flags", index[0], 0), value + first_epoch
        return (owner, "slots", *divmod(index[0], sentinel.CAPACITY)), value if value == SENTINEL else "data"

    return translate


def with_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the models room for calls of as many words as kernels have."""
    for module in (sentinel, multimem):
        monkeypatch.setattr(module, "CAPACITY", 10_000)


def replay(
    ranks: int,
    calls: Sequence[TracedCall],
    traces: list[list[Event]],
    monkeypatch: pytest.MonkeyPatch,
    clears_from: int | None = None,
    multicast: bool = False,
) -> None:
    """Replay headers, data and the advance of the epoch, of all ranks."""
    with_capacity(monkeypatch)
    in_slots = [each.call if not each.cells else Call("barrier", ()) for each in calls]
    in_cells = [each.call if each.cells else Call("all_gather", (0,)) for each in calls]
    switched = any(each.call.op == "multimem" for each in calls)
    extents = [
        None
        if call.op == "barrier"
        else multimem.extent_of(call, ranks)
        if switched
        else sentinel.extent_of(call, ranks)
        for call in in_slots
    ]
    sizes = [0 if switched or call.op == "barrier" else sentinel.size_of(call, ranks) for call in in_slots]
    clearing = [
        size
        for each, size in zip(calls, sizes, strict=True)
        if size and clears_from is not None and slot_bytes(each.plan, ranks) > clears_from
    ]
    least = min(clearing, default=1 << 60)
    for rank, events in enumerate(traces):
        first = next(value for event in events for place, value in event.words.items() if place[1] == "epoch")
        headers = calls_in(header_program(rank, ranks, [each.call for each in calls], _from(HEADERS, first)))
        if switched:
            slots = calls_in(multimem.data_program(rank, ranks, in_slots, multimem.Rules()))
        else:
            rules = sentinel.Rules(clears_itself_from=least)
            slots = calls_in(sentinel.data_program(rank, ranks, in_slots, rules))
        cell_rules = flag_cells.Rules(first_epoch=first)
        cells = calls_in(flag_cells.data_program(rank, ranks, in_cells, cell_rules))
        recorded = [
            extent and (0 if size >= least else extent // 4) for extent, size in zip(extents, sizes, strict=True)
        ]
        for number, (call, plan, through_cells) in enumerate(calls):
            where = f"rank {rank}, call {number} ({plan.op.label}, {plan.algorithm})"

            def cell_of(address: Any, value: Any, call: Call = call) -> tuple[Any, Any]:
                owner, _, generation, word = address
                sender, i = divmod(word, flag_cells.STRIDE)
                slot = max(call.sizes) if call.op == "two_shot" else call.words * (call.op != "broadcast")
                return (owner, "cells", generation, sender * slot + i), value.flag

            # a multicast comes back to the rank that sends it
            keeps = {"two_shot": 1, "all_gather": 0, "broadcast": 0, "multimem": 0}.get(call.op, 2) if multicast else 2
            data = (
                Phases(rank, cells[number], cell_of)
                if through_cells
                else Phases(rank, slots[number], slot_of(first), keeps=keeps)
            )
            data.replay(of_regions(events, number, "slots", "cells", "flags", data=True), where)
            header = Phases(rank, headers[number], header_of)
            header.replay(of_regions(events, number, "header", data=False), f"{where}, headers")
            for region in ("slots", "cells", "mailbox", "flags"):
                if any(event.words for event in of_regions(events, number, region, data=False)):
                    raise ReplayError(f"{where}: the program of headers touches {region}")
            replay_epochs(events, number, rank, first, recorded)


def _from(rules: HeaderRules, first_epoch: int) -> HeaderRules:
    return HeaderRules(words=rules.words, first_epoch=first_epoch)


def slot_bytes(plan: CallPlan, ranks: int) -> int:
    """Return the size by which a call decides whether it clears its slots itself."""
    if plan.sizes:
        return 4 * max(plan.sizes)
    return plan.nbytes // (ranks if plan.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL) else 1)


def run(ranks: int, plans: list[list[CallPlan | None]], circumstances: Circumstances) -> list[list[Event]]:
    return interpret(traced, ranks, plans, circumstances, env=GPU_COLLECTIVES, timeout_s=300)


def check(
    ranks: int,
    calls: Sequence[TracedCall],
    monkeypatch: pytest.MonkeyPatch,
    circumstances: Circumstances | None = None,
) -> None:
    """Make the calls and replay their traces."""
    circumstances = circumstances or Circumstances()
    plans: list[CallPlan | None] = [each.plan for each in calls]
    traces = run(ranks, [plans] * ranks, circumstances)
    replay(ranks, calls, traces, monkeypatch, circumstances.clears_from, circumstances.multicast)


def sequences(ranks: int) -> dict[str, list[TracedCall]]:
    """Return the calls that are traced, by name."""
    return {
        "one_shot": [reduced("one_shot", ranks, quads) for quads in QUADS],
        "two_shot": [reduced("two_shot", ranks, quads) for quads in (*QUADS, 24, 1)],
        "ring": [reduced("ring", ranks, quads) for quads in (9, 24, 1)],
        "reduce_scatter": [in_parts(Op.REDUCE_SCATTER, ranks, quads) for quads in QUADS],
        "all_to_all": [in_parts(Op.ALL_TO_ALL, ranks, quads) for quads in QUADS[:3]],
        "all_gather": [
            *(in_parts(Op.ALL_GATHER, ranks, quads) for quads in QUADS[:3]),
            *(uneven((size, *(0,) * (ranks - 2), 5)) for size in (9, 0, 2)),
        ],
        "broadcast": [broadcast(quads, number % ranks) for number, quads in enumerate(QUADS)],
        "half_ring": [
            in_parts(op, ranks, quads, "ring") for quads in (9, 4) for op in (Op.REDUCE_SCATTER, Op.ALL_GATHER)
        ],
        "cells": [
            in_parts(Op.ALL_GATHER, ranks, 9, dtype="int32"),
            broadcast(4, 1, "int32"),
            in_parts(Op.ALL_TO_ALL, ranks, 12, dtype="int32"),
            broadcast(1, 0, "int32"),
            in_parts(Op.ALL_GATHER, ranks, 5, dtype="int32"),
        ],
        "reduced_cells": [
            reduced("one_shot", ranks, 9, dtype="int32"),
            reduced("two_shot", ranks, 12, dtype="float64", reduction="avg"),
            in_parts(Op.REDUCE_SCATTER, ranks, 4, dtype="int32"),
            reduced("two_shot", ranks, 1, dtype="int8", reduction="bxor"),
            reduced("two_shot", ranks, 9, reduction="max"),
            reduced("one_shot", ranks, 5, reduction="prod"),
            reduced("two_shot", ranks, 9, dtype="uint64", reduction="min"),
        ],
        "mixed": [
            reduced("one_shot", ranks, 9),
            barrier(),
            in_parts(Op.ALL_GATHER, ranks, 5, dtype="int32"),
            reduced("two_shot", ranks, 12),
            broadcast(9, 1),
            barrier(),
            reduced("ring", ranks, 4),
            reduced("one_shot", ranks, 12),
        ],
        "fp8": [*(fp8(ranks, quads) for quads in (8, 40, 3)), reduced("two_shot", ranks, 5)],
        "fused_one_shot": [
            fused("one_shot", ranks, 2),
            reduced("one_shot", ranks, 9),
            *(fused("one_shot", ranks, rows) for rows in (3, 1)),
        ],
        "fused_two_shot": [
            *(fused("two_shot", ranks, rows) for rows in (3, 5, 1)),
            reduced("two_shot", ranks, 5),
        ],
    }


@pytest.mark.every(9)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, 3 if "ring" in name else 2) for name in sequences(2)]
    + [pytest.param(name, 3, marks=pytest.mark.full) for name in sequences(2) if "ring" not in name],
)
def test_calls(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(ranks, sequences(ranks)[name], monkeypatch)


CLEARING = ("one_shot", "two_shot", "reduce_scatter", "all_to_all", "all_gather", "broadcast", "fp8", "fused_two_shot")
"""Kernels that can clear their slots as they read them; the largest calls do so here, and are among others."""


@pytest.mark.parametrize(
    "name",
    [name if name in ("two_shot", "all_gather") else pytest.param(name, marks=pytest.mark.full) for name in CLEARING],
)
def test_calls_that_clear_as_they_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(2, sequences(2)[name], monkeypatch, Circumstances(clears_from=100))


def switched(ranks: int) -> list[TracedCall]:
    """Return calls whose words go by multicast."""
    return [
        reduced("two_shot", ranks, 9),
        broadcast(5, 1, multicast=True),
        in_parts(Op.ALL_GATHER, ranks, 9),
        fused("two_shot", ranks, 3),
        broadcast(9, 0, multicast=True),
        reduced("two_shot", ranks, 1),
    ]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_multicast(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(ranks, switched(ranks), monkeypatch, Circumstances(multicast=True))


def switch_sums(ranks: int) -> list[TracedCall]:
    """Return sums in the switch, and others between them.

    One data program has all tiles: a flag is that of a program, and the model has one.
    """
    whole = LaunchShape(programs=1, block_words=64, num_warps=1)
    sums = [reduced("multimem", ranks, quads, whole) for quads in (9, 24, 1)]
    one_shot = reduced("one_shot", ranks, 5)
    return [*sums, one_shot, sums[1], one_shot]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_sums_in_the_switch(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(ranks, switch_sums(ranks), monkeypatch, Circumstances(multicast=True))


MESSAGES = [(0, 1, 3), (1, 0, 1), (0, 1, 1), (1, 0, 4)]
"""(sender, receiver, chunks); both ranks make the calls in this order."""


def message_word(address: Any, value: Any) -> tuple[Any, Any]:
    if region_of(address) == "mailbox":
        return address, value[1] + 1  # the flag: the number of the chunk, from 1
    return header_of(address, value) if region_of(address) == "header" else (address, value)


def replay_messages(traces: list[list[Event]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_recv, "WORDS", CHUNK_WORDS)
    rules = send_recv.Rules(first_message=0, header_cells=MESSAGE_SLOTS, header_words=2)
    for rank, events in enumerate(traces):
        data = calls_in(send_recv.gpu_data_program(rank, MESSAGES, rules))
        headers = calls_in(send_recv.gpu_header_program(rank, MESSAGES, rules))
        for number in range(len(MESSAGES)):
            where = f"rank {rank}, message {number}"
            for program in (0, 1):
                mine = [event for event in events if (event.call, event.program) == (number, program)]
                if not waits_for_prior_kernel(mine):
                    raise ReplayError(f"{where}, program {program} begins before the prior kernel has ended")
            regions = ("mailbox", "credits", "slots", "cells")
            Phases(rank, data[number], message_word).replay(of_regions(events, number, *regions, data=True), where)
            regions = ("header", "receives_begun_cell", "mailbox", "slots", "cells")
            found = of_regions(events, number, *regions, data=False)
            Phases(rank, headers[number], message_word).replay(found, f"{where}, header")


def message_plans() -> list[list[CallPlan | None]]:
    return [
        [
            CallPlan(Op.SEND if rank == sender else Op.RECV, "one_shot", "float32", 2048 * chunks, root=1 - rank)
            for sender, _, chunks in MESSAGES
        ]
        for rank in (0, 1)
    ]


def test_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_messages(run(2, message_plans(), Circumstances()), monkeypatch)
