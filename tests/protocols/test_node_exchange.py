"""All-reduce over nodes: sums of nodes pass in cells with the epoch, each step of the exchange in slots of its own.

Ranks of a node scatter and gather through sentinel slots, as in two-shot. Between nodes, ranks of one local rank
exchange partial sums by doubling, by pairs, by halving or in two shots. Puts land at any time and in any order, as
those of a network may. There are two generations of cells, by the parity of the epoch, and nothing is cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from . import test_sentinel as sentinel
from .explore import Kind
from .machine import ABORTED, ARRIVED, EXPIRED, Await, Fail, KernelBoundary, Load, Machine, Program, Read, Start, Steps
from .machine import Store as Put
from .words import SENTINEL, ZERO, Call, Header, HeaderRules, Sum, header_programs

HEADERS = HeaderRules()
Tree = Any
"""A sum of nodes: a node, or a pair of sums in the order in which they are added."""


class Cell(NamedTuple):
    """A cell: which sum it is, of which value of which call, and the flag."""

    call: int | None
    index: int
    tree: Tree
    flag: int


NEVER = Cell(None, 0, None, -1)


class NodeCall(NamedTuple):
    """An all-reduce over nodes.

    ``sizes[l]`` are the words of the slice of local rank l. ``parts`` cells carry a word of a partial sum. ``tile`` is
    the number of words of a tile, of which halving gives away every second, and two shots each to its owner.
    """

    exchange: str
    sizes: tuple[int, ...]
    parts: int = 1
    tile: int = 1

    @property
    def in_node(self) -> Call:
        return Call("two_shot", self.sizes)


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    generations: int = 2
    by_epoch: bool = True  # False: any flag but that of memory never written will do
    own_slots: bool = True  # False: all steps of doubling share one slot
    whole: bool = True  # False: data and flag are two stores
    in_turn: bool = True  # False: all waits have the same deadline
    flag_values: int = 1 << 32
    first_epoch: int = 1
    headers: HeaderRules = HEADERS


class Sent(NamedTuple):
    """Cells that a rank puts to a node: ``(slot, index)`` of each, all of one sum; of words, the tree is the root."""

    node: int
    cells: tuple[tuple[int, int], ...]
    tree: Tree


class Due(NamedTuple):
    """Cells that a rank waits for, with the sum of each. ``depth``: the exchanges that the senders wait for before."""

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
    """A put that is lost: the ``number``-th cell that ``rank`` puts in call ``call``."""

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
    """Make the calls; with ``loss``, one cell is lost, and waits have deadlines."""
    place, (node, local) = Nodes(group.nodes), divmod(rank, group.local)
    extents = [0, 0, 0]
    for number, call in enumerate(calls):
        yield Start(number)
        epoch = rules.first_epoch + number
        flag, generation = epoch % rules.flag_values, epoch % rules.generations
        outcome, lost_from = ARRIVED, None
        if loss is not None and (yield Load((rank, "abort"))) is not None:
            outcome = ABORTED
        slots = number % 3 * sentinel.CAPACITY

        def slot_of(owner: int, word: int, slots: int = slots, node: int = node) -> tuple[int, str, int]:
            return node * group.local + owner, "slots", slots + word

        if group.local > 1:
            cleared = (number + 2) % 3
            for word in range(extents[cleared]):
                yield Put((rank, "slots", cleared * sentinel.CAPACITY + word), SENTINEL)
            extents[number % 3] = 2 * group.local * max(call.sizes)
            yield from sentinel.reduce_scatter(local, group.local, number, call.in_node, slot_of)
        count = 0
        for step in exchange(place, node, call, call.sizes[local]) if outcome == ARRIVED else ():
            if isinstance(step, Sent):
                owner = step.node * group.local + local
                for slot, index in step.cells:
                    count += 1
                    if loss == (rank, number, count):
                        continue
                    at = owner, "network", generation, slot if rules.own_slots else 0, index
                    cell = Cell(number, index, step.tree, flag)
                    if rules.whole:
                        yield Put(at, cell)
                    else:
                        yield Put((owner, "data", *at[2:]), cell)
                        yield Put(at, Cell(None, 0, None, flag))
                continue
            expected = {
                (rank, "network", generation, slot if rules.own_slots else 0, index): Cell(number, index, tree, flag)
                for (slot, index), tree in step.trees.items()
            }
            if not expected:
                continue

            def came(cell: Cell, flag: int = flag) -> bool:
                return cell.flag == flag if rules.by_epoch else cell.flag != NEVER.flag

            words = expected if rules.whole else {at: Cell(None, 0, None, flag) for at in expected}
            if loss is None:
                yield Await(words, came)
            else:
                patience = 20 * number + (step.depth if rules.in_turn else 0)
                outcome = yield Await(words, came, (rank, "abort"), "quiet", patience)
            if outcome == EXPIRED:
                late = set()
                for _, _, _, slot, index in expected:
                    if not came((yield Load((rank, "network", generation, slot, index)))):
                        late.add(step.senders[slot, index] * group.local + local)
                lost_from = frozenset(late)
                for owner in range(group.ranks):
                    yield Put((owner, "abort"), lost_from)
            if outcome != ARRIVED:
                break
            if not rules.whole:
                yield Read({(at[0], "data", *at[2:]): cell for at, cell in expected.items()})
        if group.local > 1:
            yield from gather(local, group.local, number, call.in_node, slot_of)
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
    words = {"network": NEVER, "data": None, "slots": SENTINEL, "header": ZERO, "abort": None}
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
                        assert (step.node, *cell) not in sent, "two puts of a call to one cell"
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


ONE_GENERATION = Rules(generations=1)


@pytest.mark.parametrize("group", [TWO, THREE], ids=str)
@pytest.mark.parametrize("exchange", ["doubling", "pairs"])
def test_a_slot_that_is_used_again_before_its_reader_is_done_is_overwritten(
    exchange: str, group: Group, refute
) -> None:
    """With one generation, a peer that is a call ahead stores into the slot that is still polled."""
    refute(model(group, calls_of(exchange, (1,) * 3), ONE_GENERATION), Kind.DEADLOCK)


def test_halving_alone_would_do_with_one_generation(verify) -> None:
    """A rank gets words for what it has given away, so it knows that this was read."""
    verify(model(TWO, calls_of("halving", (2,) * 3), ONE_GENERATION))


@pytest.mark.full
def test_another_exchange_after_halving_needs_two_generations(refute) -> None:
    calls = [NodeCall(each, (size,)) for each, size in (("halving", 4), ("pairs", 1))]
    refute(model(FOUR, calls, ONE_GENERATION), Kind.DEADLOCK)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_without_the_epoch_sums_of_old_calls_are_added_up(exchange: str, refute) -> None:
    refute(model(TWO, calls_of(exchange, (1,) * 4), Rules(by_epoch=False)), Kind.WRONG_VALUE)


def test_steps_that_share_a_slot_mix_their_sums(refute) -> None:
    """A partner of step 1 may be done with step 0 while this rank still waits for that: the epoch is the same."""
    refute(model(FOUR, calls_of("doubling", (1,)), Rules(own_slots=False)), Kind.WRONG_VALUE)


def test_a_cell_put_in_two_halves_is_read_torn(refute) -> None:
    refute(model(TWO, calls_of("doubling", (1,) * 2), Rules(whole=False)), Kind.WRONG_VALUE)


def test_a_cell_untouched_until_its_flag_comes_around_is_taken_for_new(refute) -> None:
    """The limit of flag cells is that of these: here after 4 calls, in kernels after 2**32."""
    refute(model(TWO, calls_of("doubling", (2, 1, 1, 1, 2)), Rules(flag_values=4)), Kind.WRONG_VALUE)


# -- cells that are lost ---------------------------------------------------------------------------------------------


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
    calls = [NodeCall(exchange, (size,)) for size in (1, 2, 1)]
    return model(group, calls, rules, loss, check_starts=False)  # calls after a fault return at once


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
def test_a_lost_cell_ends_in_a_fault_that_names_its_sender(exchange: str, group: Group, every: int, verify) -> None:
    """All ranks end, none with a wrong sum, and no innocent rank is named."""
    for loss in puts_of(group, exchange)[::every]:
        verify(lost(group, exchange, Rules(), loss))


@pytest.mark.parametrize("exchange", ["doubling", "halving", "two_shot"])
def test_ranks_that_wait_for_those_that_wait_must_be_more_patient(exchange: str, refute) -> None:
    """With equal deadlines, a rank that is itself kept waiting may be named."""
    refute(lost(THREE, exchange, Rules(in_turn=False), Loss(2, 1, 1)), Kind.BROKEN_CLAIM)
