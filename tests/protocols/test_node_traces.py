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
from .kernel_replay import Phases, ReplayError, calls_in, header_of, of_regions, replay_epochs
from .kernel_traces import Change, Circumstances, Event, traced
from .test_kernel_traces import HEADERS, LAUNCH, TILE, _from, slices, slot_of, with_capacity
from .test_node_exchange import Group, NodeCall
from .words import header_program

ALGORITHMS = {"doubling": "nvrar", "pairs": "nvrar_pairs", "halving": "nvrar_halving"}
ROUNDED = {"pairs_16bit": "pairs", "two_shot_16bit": "two_shot"}
"""The exchanges of sums in 16 bits, two to a word, and those of the model."""
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


def replay(
    group: Group,
    calls: Sequence[TracedCall],
    traces: list[list[Event]],
    monkeypatch: pytest.MonkeyPatch,
    clears_from: int | None = None,
) -> None:
    """Replay headers, data and the advance of the epoch, of all ranks. Calls of more bytes clear what they read."""
    with_capacity(monkeypatch)
    least = 1 << 60 if clears_from is None else clears_from
    large = frozenset(number for number, call in enumerate(calls) if call.plan.nbytes > least)
    extents = [0 if i in large else each.call.extent(group.nodes) // 4 for i, each in enumerate(calls)]
    for rank, events in enumerate(traces):
        first = next(value for event in events for place, value in event.words.items() if place[1] == "epoch")
        headers = calls_in(
            header_program(rank, group.ranks, [each.call.in_node for each in calls], _from(HEADERS, first))
        )
        data = calls_in(model.data_program(rank, group, [each.call for each in calls], model.Rules(large=large)))
        for number, (_, plan) in enumerate(calls):
            where = f"rank {rank}, call {number} ({plan.algorithm})"
            phases = Phases(rank, data[number], slot_of(first), keeps=1000)
            phases.replay(of_regions(events, number, "slots", "cells", data=True), where)
            header = Phases(rank, headers[number], header_of)
            header.replay(of_regions(events, number, "header", data=False), f"{where}, headers")
            for region in ("slots", "cells"):
                if any(event.words for event in of_regions(events, number, region, data=False)):
                    raise ReplayError(f"{where}: the program of headers touches {region}")
            replay_epochs(events, number, rank, first, extents)


def in_circumstances(exchange: str, **others: Any) -> Circumstances:
    return Circumstances(two_steps=exchange == "two_shot_16bit", **others)


def run(group: Group, calls: Sequence[TracedCall], circumstances: Circumstances) -> list[list[Event]]:
    plans: list[CallPlan | None] = [each.plan for each in calls]
    env = {**GPU_COLLECTIVES, "SHOTCAST_RANKS_PER_NODE": str(group.local)}
    return interpret(traced, group.ranks, [plans] * group.ranks, circumstances, env=env, timeout_s=300)


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


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("group", "exchange"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.full) for one in THOROUGH)], ids=str
)
def test_calls(group: Group, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = mixed(group) if exchange == "mixed" else sequence(group, exchange)
    replay(group, calls, run(group, calls, in_circumstances(exchange)), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(
    ("group", "exchange"),
    [
        (THREE, "doubling"),
        *(
            pytest.param(group, each, marks=pytest.mark.full)
            for group in (SQUARE, PAIR)
            for each in ("mixed", *ROUNDED)
        ),
    ],
    ids=str,
)
def test_calls_that_clear_their_slots_themselves(group: Group, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = mixed(group) if exchange == "mixed" else sequence(group, exchange)
    circumstances = in_circumstances(exchange, clears_from=100)
    assert {call.plan.nbytes > 100 for call in calls} == {True, False}
    replay(group, calls, run(group, calls, circumstances), monkeypatch, clears_from=100)


class Case(NamedTuple):
    """A change, and calls in which the replay must find it."""

    group: Group
    exchange: str
    module: str
    old: str
    new: str


CASES = {
    "the slots within the node are used between nodes too": Case(
        SQUARE,
        "doubling",
        "nvrar",
        "            call, first_shot + inner_quads, staging",
        "            call, first_shot, staging",
    ),
    "the slots between nodes are not cleared": Case(
        PAIR, "pairs", "exchanges", "slice_quads * ((SHAPE.NODES - 1) * SHAPE.PARTS)", "slice_quads * 0"
    ),
    "a poll may be cached": Case(PAIR, "doubling", "network", "other=0, volatile=True),)", "other=0),)"),
    "high halves are not awaited": Case(
        PAIR,
        "doubling",
        "network",
        "waiting = sync.any_missing(tiles, call.epoch, False, PARTS * COUNT)\n        polls",
        "waiting = sync.any_missing(tiles, call.epoch, False, COUNT)\n        polls",
    ),
    "the last word is not put": Case(
        PAIR, "pairs", "network", "    mask = lanes < count\n", "    mask = lanes < count - 1\n"
    ),
    "the last word is not awaited": Case(
        PAIR,
        "pairs",
        "network",
        "tl.load(slot, mask=lanes < counts[i], other=0",
        "tl.load(slot, mask=lanes < counts[i] - 1, other=0",
    ),
    "a call that clears its slots leaves one": Case(
        PAIR,
        "doubling",
        "network",
        "+ lanes, clean, mask=lanes < counts[i])",
        "+ lanes, clean, mask=lanes < counts[i] - 1)",
    ),
    "steps share a slot": Case(
        Group(4, 1), "doubling", "exchanges", "next_word = word + (step + 1) * slot", "next_word = word"
    ),
    "a step is sent before the one before has come": Case(
        Group(4, 1),
        "doubling",
        "exchanges",
        "        other = partner(place, step, SHAPE)\n        bits, call = await_tiles(\n"
        "            call, network, (word + step * slot,), lanes, (active,),",
        "        if step + 1 < DOUBLINGS:\n"
        "            early = word + (step + 1) * slot\n"
        "            put_tiles(call, network, targets[step + 1], early, lanes, bits_of(value, PARTS), active, PARTS)\n"
        "        other = partner(place, step, SHAPE)\n        bits, call = await_tiles(\n"
        "            call, network, (word + step * slot,), lanes, (active,),",
    ),
    "a folded node is not awaited": Case(
        THREE, "doubling", "exchanges", "count * place.pivot\n    bits, call", "count * 0\n    bits, call"
    ),
    "a pivot sends before the folded node has come": Case(
        THREE,
        "doubling",
        "exchanges",
        "count * (1 - place.extra - place.pivot)\n    put_tiles(\n        call, network, targets[0], tile.start",
        "count * (1 - place.extra)\n    put_tiles(\n        call, network, targets[0], tile.start",
    ),
    "a folded node takes what its pivot had before": Case(
        THREE,
        "halving",
        "exchanges",
        "(DOUBLINGS + (SHAPE.FOLDED > 0)) * slot + tile.start",
        "DOUBLINGS * slot + tile.start",
    ),
    "two nodes put their sums into one slot": Case(
        THREE,
        "pairs",
        "exchanges",
        "slot = slot_of(place.node, (place.node + i) % NODES)",
        "slot = place.node * 0",
    ),
    "a tile goes to another node than its owner": Case(
        THREE, "two_shot_16bit", "exchanges", "% SHAPE.NODES == owner\n", "% SHAPE.NODES != owner\n"
    ),
    "an owner does not wait for the parts of others": Case(
        THREE,
        "two_shot_16bit",
        "exchanges",
        "tile, owned, 1, SHAPE)",
        "tile, 0 * owned, 1, SHAPE)",
    ),
    "results go to the slot of a part": Case(
        THREE,
        "two_shot_16bit",
        "exchanges",
        "last = (SHAPE.NODES - 1) * tile.slice_words + tile.start",
        "last = tile.start",
    ),
    "the result of another owner is not awaited": Case(
        THREE, "two_shot_16bit", "exchanges", "(tile.count - owned,)", "(tile.count * 0,)"
    ),
    "a tile is kept that is given away": Case(
        PAIR,
        "halving",
        "exchanges",
        "    return ((place.leaf ^ number) >> step) & 1\n",
        "    return ((place.leaf ^ number) >> step) & 0\n",
    ),
    "what the node has gathered is sent before the exchange": Case(
        SQUARE,
        "doubling",
        "nvrar",
        "                words, call = finish_exchange(call",
        "                sync.store_to_all(\n"
        "                    call, mates, second_shot, offs, words, offs < own_span, False, False, LOCAL - 1\n"
        "                )\n"
        "                words, call = finish_exchange(call",
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
OFTEN = ("high halves are not awaited",)
"""The change that the default run tries."""


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_a_changed_kernel_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group, exchange, module, old, new = CASES[name]
    calls = sequence(group, exchange)
    clears_from = 100 if "clears its slots" in name else None
    circumstances = in_circumstances(exchange, change=Change(module, old, new), clears_from=clears_from, timeout_s=2.0)
    traces = run(group, calls, circumstances)
    with pytest.raises(ReplayError):
        replay(group, calls, traces, monkeypatch, clears_from)
