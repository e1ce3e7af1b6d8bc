"""All-reduce over nodes: sums of nodes pass in sentinel slots, each step of the exchange in slots of its own.

Ranks of a node scatter and gather, as in two-shot. Between nodes, ranks of one local rank exchange partial sums by
doubling, by pairs, by halving or in two shots, in slots behind those. Puts land at any time and in any order, as those
of a network may. There are three generations of slots, and a call clears what the one before has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

from . import test_sentinel as sentinel
from .explore import Kind
from .machine import ABORTED, ARRIVED, EXPIRED, Await, Fail, KernelBoundary, Load, Machine, Program, Start, Steps
from .machine import Store as Put
from .words import SENTINEL, ZERO, Call, Header, HeaderRules, Sum, header_programs

HEADERS = HeaderRules()
Tree = Any
"""A sum of nodes: a node, or a pair of sums in the order in which they are added."""


class Word(NamedTuple):
    """A word: which sum it is, of which value of which call."""

    call: int
    index: int
    tree: Tree


class NodeCall(NamedTuple):
    """An all-reduce over nodes.

    ``sizes[l]`` are the words of the slice of local rank l. ``parts`` words carry a word of a partial sum. ``tile`` is
    the number of words of a tile, of which halving gives away every second, and two shots each to its owner.
    """

    exchange: str
    sizes: tuple[int, ...]
    parts: int = 1
    tile: int = 1

    @property
    def in_node(self) -> Call:
        return Call("two_shot", self.sizes)

    @property
    def inner(self) -> int:
        """Words of a generation that the phases in a node use."""
        return 2 * len(self.sizes) * max(self.sizes) if len(self.sizes) > 1 else 0

    def slots(self, nodes: int) -> int:
        """Return the words that the exchange uses for each word of a slice."""
        doublings = nodes.bit_length() - 1
        folds = int(nodes > 1 << doublings)
        return {
            "pairs": (nodes - 1) * self.parts,
            "two_shot": (nodes - 1) * self.parts + 1,
            "halving": (doublings + folds) * self.parts + 1,
            "doubling": doublings * self.parts + folds * (self.parts + 1),
        }[self.exchange]

    def extent(self, nodes: int) -> int:
        """Return the words of a generation that the call uses, on any rank."""
        return self.inner + self.slots(nodes) * max(self.sizes)

    def place(self, nodes: int, size: int, slot: int, index: int) -> int:
        """Return the word of a generation in which a value of a slot lies at a rank with ``size`` words of the slice.

        A tile lies side by side: first its low halves, then its high halves.
        """
        first = self.inner + slot * max(self.sizes) * self.parts
        if slot == self.words_slot(nodes):
            return first + index
        word, part = divmod(index, self.parts)
        tile, lane = divmod(word, self.tile)
        count = min(self.tile, size - tile * self.tile)
        return first + tile * self.tile * self.parts + part * count + lane

    def words_slot(self, nodes: int) -> int:
        """Return the number of the slot that has words of the result, -1 if there is none."""
        doublings = nodes.bit_length() - 1
        folds = int(nodes > 1 << doublings)
        last = {"two_shot": nodes - 1, "halving": doublings + folds, "doubling": doublings + 1}
        return last.get(self.exchange, -1)


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    generations: int = 3
    clears: int | None = 2  # a call clears generation (g + clears) % generations; None: none
    large: frozenset[int] = frozenset()  # the calls that clear what they have read, and record an extent of 0
    large_clear: bool = True  # False: they only record that extent
    extents_kept: bool = True  # False: a call clears as many words as it uses itself
    own_slots: bool = True  # False: all steps of doubling share one slot
    whole: bool = True  # False: a word comes in two halves
    in_turn: bool = True  # False: all waits have the same deadline
    headers: HeaderRules = HEADERS


HALF = "half a word"


class Sent(NamedTuple):
    """Values that a rank puts to a node: ``(slot, index)`` of each, all of one sum; of words, the tree is the root."""

    node: int
    cells: tuple[tuple[int, int], ...]
    tree: Tree


class Due(NamedTuple):
    """Values that a rank waits for, with the sum of each. ``depth``: the exchanges that the senders wait for before."""

    senders: dict[tuple[int, int], int]
    trees: dict[tuple[int, int], Tree]
    depth: int


class Nodes:
    """The division of the tree among nodes."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.doublings = nodes.bit_length() - 1
        self.pairs = nodes - (1 << self.doublings)

    def leaf(self, node: int) -> int:
        return node // 2 if node < 2 * self.pairs else node - self.pairs

    def node(self, leaf: int) -> int:
        return 2 * leaf if leaf < self.pairs else leaf + self.pairs

    def tree(self, level: int, number: int) -> Tree:
        """Return the sum of the leaves from ``number << level`` on, of which there are ``1 << level``."""
        if level:
            return self.tree(level - 1, 2 * number), self.tree(level - 1, 2 * number + 1)
        return (2 * number, 2 * number + 1) if number < self.pairs else number + self.pairs

    @property
    def root(self) -> Tree:
        return self.tree(self.doublings, 0)


def exchange(place: Nodes, node: int, call: NodeCall, words: int) -> Iterator[Sent | Due]:
    """Yield what a rank sends and waits for, in order."""
    values = tuple(range(words * call.parts))

    def due(slot: int, indices: Sequence[int], sender: int, tree: Tree, depth: int) -> Due:
        cells = [(slot, index) for index in indices]
        return Due(dict.fromkeys(cells, sender), dict.fromkeys(cells, tree), depth)

    def sent(target: int, slot: int, indices: Sequence[int], tree: Tree) -> Sent:
        return Sent(target, tuple((slot, index) for index in indices), tree)

    if call.exchange == "pairs":
        others = [other for other in range(place.nodes) if other != node]
        for other in others:
            yield sent(other, node - (node > other), values, node)
        cells = {(other - (other > node), index): other for other in others for index in values}
        yield Due(cells, cells, 0)
        return
    if call.exchange == "two_shot":
        owned = {owner: [i for i in values if i // call.tile % place.nodes == owner] for owner in range(place.nodes)}
        others, last = [other for other in range(place.nodes) if other != node], place.nodes - 1
        for owner in others:
            yield sent(owner, node - (node > owner), owned[owner], node)
        cells = {(other - (other > node), index): other for other in others for index in owned[node]}
        yield Due(cells, cells, 0)
        for other in others:
            yield sent(other, last, owned[node], place.root)
        senders = {(last, index): owner for owner in others for index in owned[owner]}
        yield Due(senders, dict.fromkeys(senders, place.root), 1)
        return
    doublings, leaf = place.doublings, place.leaf(node)
    inner = node < 2 * place.pairs
    halves = call.exchange == "halving"
    fold, last = doublings, doublings + (1 if place.pairs or not halves else 0)
    if inner and node % 2:
        yield sent(node - 1, fold, values, node)
        yield due(last, range(words), node - 1, place.root, 1 + (2 if halves else 1) * doublings)
        return
    if inner:
        yield due(fold, values, node + 1, node + 1, 0)
    before = int(place.pairs > 0)
    held = values

    def kept(index: int, step: int) -> bool:
        return not halves or (index // call.parts // call.tile ^ leaf) >> step & 1 == 0

    for step in range(doublings):
        partner = place.node(leaf ^ 1 << step)
        away = [i for i in held if not kept(i, step)] if halves else held
        yield sent(partner, step, away, place.tree(step, leaf >> step))
        held = tuple(i for i in held if kept(i, step))
        yield due(step, held, partner, place.tree(step, (leaf ^ 1 << step) >> step), before + step)
    for step in reversed(range(doublings)) if halves else ():
        partner = place.node(leaf ^ 1 << step)
        had = [i for i in range(words) if all(kept(i * call.parts, earlier) for earlier in range(step))]
        away = [i for i in had if not kept(i * call.parts, step)]
        yield sent(partner, last, [i for i in had if i not in away], place.root)
        yield due(last, away, partner, place.root, before + 2 * doublings - 1 - step)
    if inner:
        yield sent(node + 1, last, range(words), place.root)


class Loss(NamedTuple):
    """A put that is lost: the ``number``-th word that ``rank`` puts in call ``call``."""

    rank: int
    call: int
    number: int


class Group(NamedTuple):
    """Ranks on nodes."""

    nodes: int
    local: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.local


def data_program(rank: int, group: Group, calls: Sequence[NodeCall], rules: Rules, loss: Loss | None = None) -> Steps:
    """Make the calls; with ``loss``, one word is lost, and waits have deadlines."""
    place, (node, local) = Nodes(group.nodes), divmod(rank, group.local)
    extents = [0] * rules.generations
    for number, call in enumerate(calls):
        yield Start(number)
        generation, size = number % rules.generations, call.sizes[local]
        outcome, lost_from = ARRIVED, None
        if loss is not None and (yield Load((rank, "abort"))) is not None:
            outcome = ABORTED
        slots = generation * sentinel.CAPACITY

        def slot_of(owner: int, word: int, slots: int = slots, node: int = node) -> tuple[int, str, int]:
            return node * group.local + owner, "slots", slots + word

        def word_of(owner: int, slot: int, index: int, slots: int = slots, call: NodeCall = call) -> Any:
            slot = slot if rules.own_slots else 0
            return owner, "slots", slots + call.place(group.nodes, call.sizes[local], slot, index)

        extent = call.extent(group.nodes)
        if rules.clears is not None:
            cleared = (generation + rules.clears) % rules.generations
            for word in range(extents[cleared] if rules.extents_kept else extent):
                yield Put((rank, "slots", cleared * sentinel.CAPACITY + word), SENTINEL)
        extents[generation] = 0 if number in rules.large else extent
        if group.local > 1:
            yield from sentinel.reduce_scatter(local, group.local, number, call.in_node, slot_of)
        count = 0
        for step in exchange(place, node, call, size) if outcome == ARRIVED else ():
            if isinstance(step, Sent):
                for slot, index in step.cells:
                    count += 1
                    if loss == (rank, number, count):
                        continue
                    at = word_of(step.node * group.local + local, slot, index)
                    if not rules.whole:
                        yield Put(at, HALF)
                    yield Put(at, Word(number, index, step.tree))
                continue
            expected = {word_of(rank, *cell): Word(number, cell[1], tree) for cell, tree in step.trees.items()}
            if not expected:
                continue
            if loss is None:
                yield Await(expected, sentinel.arrived)
            else:
                patience = 20 * number + (step.depth if rules.in_turn else 0)
                outcome = yield Await(expected, sentinel.arrived, (rank, "abort"), "quiet", patience)
            if outcome == EXPIRED:
                late = set()
                for cell in step.trees:
                    if not sentinel.arrived((yield Load(word_of(rank, *cell)))):
                        late.add(step.senders[cell] * group.local + local)
                lost_from = frozenset(late)
                for owner in range(group.ranks):
                    yield Put((owner, "abort"), lost_from)
            if outcome != ARRIVED:
                break
        if group.local > 1:
            yield from gather(local, group.local, number, call.in_node, slot_of)
        if number in rules.large and rules.large_clear:
            for word in range(extent):
                yield Put((rank, "slots", slots + word), SENTINEL)
        yield KernelBoundary(number)
        if loss is not None:
            fault = yield Load((rank, "abort"))
            if outcome != ARRIVED and fault is None:
                yield Fail(f"call {number} ended without its data, and without a fault")
            if fault is not None and fault != frozenset({loss.rank}):
                yield Fail(f"{set(fault)} are named where a put of rank {loss.rank} was lost")


def gather(local: int, ranks: int, epoch: int, call: Call, slot_of: Callable[[int, int], Any]) -> Steps:
    """Send this rank's slice of the result to the ranks of the node, as the second shot of two-shot."""
    stride = max(call.sizes)
    second = ranks * stride
    for owner in range(ranks):
        for i in range(call.sizes[local]):
            yield Put(slot_of(owner, second + local * stride + i), Sum(ranks, epoch, local * stride + i))
    yield Await(
        {
            slot_of(local, second + r * stride + i): Sum(ranks, epoch, r * stride + i)
            for r in range(ranks)
            for i in range(call.sizes[r])
        },
        sentinel.arrived,
    )


def header_program_with_deadlines(rank: int, ranks: int, calls: int) -> Steps:
    """Exchange headers, until the communicator is stopped."""
    for number in range(calls):
        yield Start(number)
        if (yield Load((rank, "abort"))) is None:
            header = Header(number + 1, "nvrar")
            peers = [peer for peer in range(ranks) if peer != rank]
            for peer in peers:
                yield Put((peer, "header", rank, number % 2), header)
            awaited = {(rank, "header", peer, number % 2): header for peer in peers}
            outcome = yield Await(
                awaited, lambda word, header=header: word == header, (rank, "abort"), "quiet", 20 * number + 19
            )
            if outcome == EXPIRED:
                yield Fail("a header is late, though none was lost")
        yield KernelBoundary(number)


def model(
    group: Group, calls: Sequence[NodeCall], rules: Rules | None = None, loss: Loss | None = None, **options: bool
) -> Machine:
    rules = rules or Rules()

    def data(rank: int) -> Program:
        return Program(rank, "data", lambda: data_program(rank, group, calls, rules, loss))

    def header(rank: int) -> Program:
        return Program(rank, "header", lambda: header_program_with_deadlines(rank, group.ranks, len(calls)))

    programs = [data(rank) for rank in range(group.ranks)]
    if loss is None:
        programs += header_programs(group.ranks, [call.in_node for call in calls], rules.headers)
    else:
        programs += [header(rank) for rank in range(group.ranks)]
    words = {"slots": SENTINEL, "header": ZERO, "abort": None}
    return Machine(programs, words, **options)


def calls_of(exchange: str, sizes: Sequence[int], local: int = 1) -> list[NodeCall]:
    return [NodeCall(exchange, (size,) * local) for size in sizes]


EXCHANGES = ("doubling", "pairs", "halving", "two_shot")
TWO, THREE, FOUR = Group(2, 1), Group(3, 1), Group(4, 1)
NO_HEADERS = Rules(headers=HeaderRules(exchanged=False))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_trees_of_all_exchanges_are_one(exchange: str) -> None:
    """Each rank ends with the sum of all nodes, and no sum but those of the tree is sent."""
    for nodes in range(2, 9):
        place = Nodes(nodes)
        parts = {
            place.tree(level, n) for level in range(place.doublings + 1) for n in range(1 << place.doublings - level)
        }
        call = NodeCall(exchange, (8,))
        sent: dict[tuple[int, int, int], Tree] = {}
        steps = [exchange_steps(place, node, call) for node in range(nodes)]
        for each in steps:
            for step in each:
                if isinstance(step, Sent):
                    for cell in step.cells:
                        assert (step.node, *cell) not in sent, "two puts of a call to one place"
                        sent[step.node, *cell] = step.tree
                        assert step.tree in parts | set(range(nodes)) | {place.root}
        waited = {
            (node, *cell): tree
            for node, each in enumerate(steps)
            for due in each
            if isinstance(due, Due)
            for cell, tree in due.trees.items()
        }
        assert waited == sent


QUICK = [(exchange, group) for group in (TWO, THREE) for exchange in EXCHANGES] + [("doubling", Group(2, 2))]
THOROUGH = [
    (exchange, group) for group in (FOUR, Group(2, 2)) for exchange in EXCHANGES if (exchange, group) not in QUICK
]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("exchange", "group"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.full) for one in THOROUGH)], ids=str
)
def test_protocol_holds(exchange: str, group: Group, verify) -> None:
    """Partial sums are read and added to by one rank while another is a call ahead; puts land in any order."""
    sizes = {TWO: (2, 1, 1, 2, 1), THREE: (2, 1, 1)}.get(group, (1, 1) if group.local > 1 else (1, 1, 1))
    verify(model(group, calls_of(exchange, sizes, group.local)))


@pytest.mark.full
@pytest.mark.parametrize("group", [THREE, FOUR, Group(2, 2)], ids=str)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_protocol_holds_over_more_calls(exchange: str, group: Group, verify) -> None:
    verify(model(group, calls_of(exchange, (2, 1, 2, 1) if group == THREE else (1, 1, 1), group.local)))


@pytest.mark.parametrize("group", [TWO, THREE], ids=str)
def test_exchanges_may_follow_each_other(group: Group, verify) -> None:
    verify(model(group, [NodeCall(each, (1,)) for each in ("doubling", "halving", "pairs", "doubling")]))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_invariant_is_kept_by_the_data(exchange: str, verify) -> None:
    """A result has passed through every node."""
    verify(model(THREE, calls_of(exchange, (1, 1, 1)), NO_HEADERS))


# -- the protocol without each of its guards -------------------------------------------------------------------------


SMALL_EXCHANGES = ["doubling", "pairs"]


@pytest.mark.parametrize("group", [TWO, THREE], ids=str)
@pytest.mark.parametrize("exchange", SMALL_EXCHANGES)
def test_two_generations_hang(exchange: str, group: Group, refute) -> None:
    """The generation of the call before is that of the next, and a peer that is a call ahead has put there."""
    refute(model(group, calls_of(exchange, (1,) * 3), Rules(generations=2, clears=1)), Kind.DEADLOCK)


@pytest.mark.parametrize("exchange", SMALL_EXCHANGES)
def test_clearing_one_generation_ahead_hangs(exchange: str, refute) -> None:
    refute(model(TWO, calls_of(exchange, (1,) * 4), Rules(clears=1)), Kind.DEADLOCK)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_never_clearing_adds_up_sums_of_old_calls(exchange: str, refute) -> None:
    refute(model(TWO, calls_of(exchange, (1,) * 4), Rules(clears=None)), Kind.WRONG_VALUE)


def test_clearing_only_what_this_call_uses_adds_up_sums_of_old_calls(refute) -> None:
    refute(model(TWO, calls_of("doubling", (2, 1, 1, 2)), Rules(extents_kept=False)), Kind.WRONG_VALUE)


@pytest.mark.parametrize("group", [TWO, pytest.param(THREE, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("exchange", SMALL_EXCHANGES)
def test_large_calls_clear_themselves_among_small_ones_that_do_not(exchange: str, group: Group, verify, refute) -> None:
    calls = calls_of(exchange, (2, 1, 1, 2))
    rules = Rules(large=frozenset({0, 3}))
    verify(model(group, calls, rules))
    refute(model(group, calls, replace(rules, large_clear=False)), Kind.WRONG_VALUE)


def test_steps_that_share_a_slot_mix_their_sums(refute) -> None:
    """A partner of step 1 may be done with step 0 while this rank still waits for that: the epoch is the same."""
    refute(model(FOUR, calls_of("doubling", (1,)), Rules(own_slots=False)), Kind.WRONG_VALUE)


def test_a_word_that_comes_in_two_halves_is_read_torn(refute) -> None:
    refute(model(TWO, calls_of("doubling", (1,) * 2), Rules(whole=False)), Kind.WRONG_VALUE)


# -- words that are lost ---------------------------------------------------------------------------------------------


def puts_of(group: Group, exchange: str) -> list[Loss]:
    """Return every put of a call of two words, as one that is lost in the second of three calls."""
    place, call = Nodes(group.nodes), NodeCall(exchange, (2,))
    losses = []
    for node in range(group.nodes):
        steps = exchange_steps(place, node, call)
        cells = sum(len(step.cells) for step in steps if isinstance(step, Sent))
        losses += [Loss(node, 1, number) for number in range(1, cells + 1)]
    return losses


def exchange_steps(place: Nodes, node: int, call: NodeCall) -> list[Sent | Due]:
    return list(exchange(place, node, call, call.sizes[0]))


def lost(group: Group, exchange: str, rules: Rules, loss: Loss) -> Machine:
    """Return three calls, of which each has a generation of its own, so that none has anything to clear."""
    calls = [NodeCall(exchange, (size,)) for size in (1, 2, 1)]
    rules = replace(rules, clears=None)
    return model(group, calls, rules, loss, check_starts=False)  # calls after a fault return at once


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("exchange", "group", "every"),
    [
        *((exchange, TWO, 2) for exchange in EXCHANGES),
        *((exchange, THREE, 5) for exchange in EXCHANGES),
        *(pytest.param(exchange, THREE, 1, marks=pytest.mark.full) for exchange in EXCHANGES),
        # all pairs of four nodes have more than a million states
        *(pytest.param(exchange, FOUR, 3, marks=pytest.mark.full) for exchange in EXCHANGES if exchange != "pairs"),
    ],
    ids=str,
)
def test_a_lost_word_ends_in_a_fault_that_names_its_sender(exchange: str, group: Group, every: int, verify) -> None:
    """All ranks end, none with a wrong sum, and no innocent rank is named."""
    for loss in puts_of(group, exchange)[::every]:
        verify(lost(group, exchange, Rules(), loss))


@pytest.mark.parametrize("exchange", ["doubling", "halving", "two_shot"])
def test_ranks_that_wait_for_those_that_wait_must_be_more_patient(exchange: str, refute) -> None:
    """With equal deadlines, a rank that is itself kept waiting may be named."""
    refute(lost(THREE, exchange, Rules(in_turn=False), Loss(2, 1, 1)), Kind.BROKEN_CLAIM)
