"""The kernel of all-reduce over nodes does what its model says: traces are replayed against test_node_exchange.py.

The kernel with one line changed does something else, and the replay must say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.wire import CallPlan, LaunchShape, Norm, Op

from . import test_node_exchange as model
from .kernel_replay import Phases, ReplayError, Translation, calls_in, header_of, of_regions, replay_epochs
from .kernel_traces import Change, Circumstances, Event, traced
from .test_kernel_traces import HEADERS, LAUNCH, TILE, _from, slices, with_capacity
from .test_node_exchange import Group, NodeCall, Nodes
from .words import SENTINEL, header_program

ALGORITHMS = {"doubling": "nvrar", "pairs": "nvrar_pairs", "halving": "nvrar_halving"}
ROUNDED = {"pairs_16bit": "pairs", "two_shot_16bit": "two_shot"}
"""The exchanges of sums in 16 bits, a cell for each word, and those of the model."""
PAIR, THREE, SQUARE = Group(2, 1), Group(3, 1), Group(2, 2)


class TracedCall(NamedTuple):
    """A call as the model and as the kernel takes it."""

    call: NodeCall
    plan: CallPlan


def summed(group: Group, exchange: str, quads: int, dtype: str = "float32") -> TracedCall:
    """Return an all-reduce of so many quads."""
    parts = 1 if dtype == "float32" or exchange in ROUNDED else 2
    plan = CallPlan(Op.ALL_REDUCE, ALGORITHMS.get(exchange, "nvrar_16bit"), dtype, 16 * quads, launch=LAUNCH)
    call = NodeCall(ROUNDED.get(exchange, exchange), slices(quads, group.local), parts, TILE)
    return TracedCall(call, plan)


def normed(group: Group, exchange: str, rows: int) -> TracedCall:
    """Return an all-reduce of ``rows`` rows of a tile each, which are normed."""
    each = -(-rows // group.local)
    sizes = tuple(TILE * max(0, min(each, rows - local * each)) for local in range(group.local))
    launch = LaunchShape(programs=each, block_words=TILE)
    plan = CallPlan(
        Op.ALL_REDUCE_RMS_NORM, ALGORITHMS[exchange], "float32", 4 * TILE * rows, launch=launch, norm=Norm(TILE)
    )
    return TracedCall(NodeCall(exchange, sizes, 1, TILE), plan)


def word_of(group: Group, call: NodeCall) -> Translation:
    """Return the translation of a word of the model to that of the kernels."""
    place, width = Nodes(group.nodes), max(call.sizes)
    words_at = place.doublings + (1 if place.pairs or call.exchange == "doubling" else 0)

    def translate(address: Any, value: Any) -> tuple[Any, Any]:
        owner, region, *index = address
        if region == "slots":
            generation, word = divmod(index[0], model.sentinel.CAPACITY)
            return (owner, "slots", generation, word), value if value == SENTINEL else "data"
        generation, slot, number = index
        cell = slot * width * call.parts
        if call.exchange not in ROUNDED.values() and slot == words_at:
            return (owner, "network", generation, cell + number), value.flag
        word, part = divmod(number, call.parts)
        tile, lane = divmod(word, TILE)
        count = min(TILE, call.sizes[owner % group.local] - tile * TILE)
        return (owner, "network", generation, cell + tile * TILE * call.parts + part * count + lane), value.flag

    return translate


def replay(
    group: Group, calls: Sequence[TracedCall], traces: list[list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay headers, data and the advance of the epoch, of all ranks."""
    with_capacity(monkeypatch)
    for rank, events in enumerate(traces):
        first = next(value for event in events for place, value in event.words.items() if place[1:] == ("epoch",))
        headers = calls_in(
            header_program(rank, group.ranks, [each.call.in_node for each in calls], _from(HEADERS, first))
        )
        rules = model.Rules(first_epoch=first)
        data = calls_in(model.data_program(rank, group, [each.call for each in calls], rules))
        extents = [2 * group.local * max(call.sizes) // 4 if group.local > 1 else None for call, _ in calls]
        for number, (call, plan) in enumerate(calls):
            where = f"rank {rank}, call {number} ({plan.algorithm})"
            phases = Phases(rank, data[number], word_of(group, call), keeps=1000)
            phases.replay(of_regions(events, number, "slots", "cells", "network", data=True), where)
            header = Phases(rank, headers[number], header_of)
            header.replay(of_regions(events, number, "header", data=False), f"{where}, headers")
            for region in ("slots", "cells", "network"):
                if any(event.words for event in of_regions(events, number, region, data=False)):
                    raise ReplayError(f"{where}: the program of headers touches {region}")
            replay_epochs(events, number, rank, first, extents)


def in_circumstances(exchange: str, **others: Any) -> Circumstances:
    return Circumstances(two_steps=exchange == "two_shot_16bit", **others)


def run(group: Group, calls: Sequence[TracedCall], circumstances: Circumstances) -> list[list[Event]]:
    plans: list[CallPlan | None] = [each.plan for each in calls]
    env = {**GPU_COLLECTIVES, "SHOTCAST_RANKS_PER_NODE": str(group.local)}
    return interpret(traced, group.ranks, [plans] * group.ranks, circumstances, env=env, timeout_s=120)


def sequence(group: Group, exchange: str) -> list[TracedCall]:
    """Return calls whose sizes and dtypes change."""
    sizes = (9, 4, 12, 1) if group.local == 1 else (9, 24, 1)
    if exchange in ROUNDED:
        return [summed(group, exchange, quads, dtype) for quads in sizes for dtype in ("bfloat16", "float16")]
    plain = [summed(group, exchange, quads, "bfloat16" if i % 2 else "float32") for i, quads in enumerate(sizes)]
    return [*plain[:-1], normed(group, exchange, 5), plain[-1], normed(group, exchange, 1)]


def mixed(group: Group) -> list[TracedCall]:
    return [
        summed(group, each, quads) for each, quads in zip((*ALGORITHMS, *ALGORITHMS), (9, 5, 12, 4, 9, 1), strict=True)
    ]


QUICK = [(PAIR, "mixed"), (SQUARE, "doubling"), (THREE, "two_shot_16bit")]
THOROUGH = [
    (group, exchange)
    for group in (PAIR, THREE, Group(4, 1), Group(5, 1), SQUARE, Group(3, 2))
    for exchange in ("mixed", *ALGORITHMS, *ROUNDED)
    if (group, exchange) not in QUICK
]


@pytest.mark.parametrize(
    ("group", "exchange"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.full) for one in THOROUGH)], ids=str
)
def test_calls(group: Group, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = mixed(group) if exchange == "mixed" else sequence(group, exchange)
    replay(group, calls, run(group, calls, in_circumstances(exchange)), monkeypatch)


class Case(NamedTuple):
    """A change, and calls in which the replay must find it."""

    group: Group
    exchange: str
    module: str
    old: str
    new: str


CASES = {
    "one generation of cells": Case(
        PAIR,
        "doubling",
        "network",
        "cells_offset(call.epoch, network_at, network_quads)",
        "cells_offset(call.epoch * 0, network_at, network_quads)",
    ),
    "the other generation of cells": Case(
        PAIR,
        "pairs",
        "network",
        "cells_offset(call.epoch, network_at, network_quads)",
        "cells_offset(call.epoch + 1, network_at, network_quads)",
    ),
    "a poll of cells may be cached": Case(
        PAIR, "doubling", "network", "mask=mask, other=0, volatile=True)", "mask=mask, other=0)"
    ),
    "the cells of high halves are not awaited": Case(
        PAIR,
        "doubling",
        "network",
        "waiting = any_missing(tiles, call.epoch, True, PARTS * COUNT)\n        polls",
        "waiting = any_missing(tiles, call.epoch, True, COUNT)\n        polls",
    ),
    "the last word is not put": Case(
        PAIR, "pairs", "network", "    mask = lanes < count\n", "    mask = lanes < count - 1\n"
    ),
    "the last word is not awaited": Case(
        PAIR, "pairs", "network", "            mask = lanes < counts[i]\n", "            mask = lanes < counts[i] - 1\n"
    ),
    "steps share a slot": Case(
        Group(4, 1), "doubling", "exchanges", "next_cell = cell + (step + 1) * slot", "next_cell = cell"
    ),
    "a step is sent before the one before has come": Case(
        Group(4, 1),
        "doubling",
        "exchanges",
        "        other = partner(place, step, FOLDED, LOCAL)\n        bits, call = await_cells(\n"
        "            call, network, (cell + step * slot,), lanes, (active,),",
        "        if step + 1 < DOUBLINGS:\n"
        "            early = cell + (step + 1) * slot\n"
        "            put_cells(call, network, targets[step + 1], early, lanes, bits_of(value, PARTS), active, PARTS)\n"
        "        other = partner(place, step, FOLDED, LOCAL)\n        bits, call = await_cells(\n"
        "            call, network, (cell + step * slot,), lanes, (active,),",
    ),
    "a folded node is not awaited": Case(
        THREE, "doubling", "exchanges", "count * place.pivot\n    bits, call", "count * 0\n    bits, call"
    ),
    "a pivot sends before the folded node has come": Case(
        THREE,
        "doubling",
        "exchanges",
        "count * (1 - place.extra - place.pivot)\n    put_cells(call, network, targets[0], start",
        "count * (1 - place.extra)\n    put_cells(call, network, targets[0], start",
    ),
    "a folded node takes what its pivot had before": Case(
        THREE, "halving", "exchanges", "(DOUBLINGS + (FOLDED > 0)) * slot + start", "DOUBLINGS * slot + start"
    ),
    "two nodes put their sums into one slot": Case(
        THREE,
        "pairs",
        "exchanges",
        "slot = slot_of(place.node, (place.node + i) % NODES)",
        "slot = place.node * 0",
    ),
    "a tile goes to another node than its owner": Case(
        THREE, "two_shot_16bit", "exchanges", "% NODES == owner\n", "% NODES != owner\n"
    ),
    "an owner does not wait for the parts of others": Case(
        THREE,
        "two_shot_16bit",
        "exchanges",
        "lanes, owned, NODES, LOCAL, 1, WORLD)",
        "lanes, 0 * owned, NODES, LOCAL, 1, WORLD)",
    ),
    "results go to the slot of a part": Case(
        THREE, "two_shot_16bit", "exchanges", "last = (NODES - 1) * slice_words + start", "last = start"
    ),
    "the result of another owner is not awaited": Case(
        THREE, "two_shot_16bit", "exchanges", "(count - owned,)", "(count * 0,)"
    ),
    "a tile is kept that is given away": Case(
        PAIR,
        "halving",
        "exchanges",
        "    return ((place.leaf ^ tile) >> step) & 1\n",
        "    return ((place.leaf ^ tile) >> step) & 0\n",
    ),
    "what the node has gathered is sent before the exchange": Case(
        SQUARE,
        "doubling",
        "nvrar",
        "                words, call = finish_exchange(\n",
        "                store_to_all(\n"
        "                    call, mates, second_shot, offs, words, offs < own_span, False, False, LOCAL - 1\n"
        "                )\n"
        "                words, call = finish_exchange(\n",
    ),
    "sums of tiles go to the slots of the first shot": Case(
        SQUARE, "doubling", "fused_nvrar", "second_shot + own_tile * TILE", "first_shot + own_tile * TILE"
    ),
    "a tile that no rank has is exchanged": Case(
        SQUARE,
        "pairs",
        "fused_nvrar",
        "tl.where(own_tile < tiles, BLOCK, 0)",
        "tl.where(own_tile < tiles, BLOCK, BLOCK)",
    ),
    "the slices of mates are not awaited": Case(
        SQUARE, "pairs", "nvrar", "masks + ((offs < own_span) & (local != r),)", "masks + (offs < 0,)"
    ),
}
OFTEN = ("the cells of high halves are not awaited",)
"""The change that the default run tries."""


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_a_changed_kernel_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group, exchange, module, old, new = CASES[name]
    calls = sequence(group, exchange)
    traces = run(group, calls, in_circumstances(exchange, change=Change(module, old, new), timeout_s=2.0))
    with pytest.raises(ReplayError):
        replay(group, calls, traces, monkeypatch)
