"""Puts of GPUs on several hosts: an adapter reads staged words some time after a program has asked it to.

A program stages the words of a step in its own region, passes a barrier, and begins a put of them, whose end it does
not wait for. There are two generations of staging, by the parity of the epoch, and three of the slots that words arrive
in, which hold the sentinel until then. Here the adapter is a program beside that of the data; it carries out the puts
of a rank in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from .explore import Kind
from .machine import Await, Barrier, Fence, KernelBoundary, Load, Machine, Program, Start, Steps, Store
from .test_node_exchange import Due, NodeCall, Nodes, Sent, Word, exchange
from .test_sentinel import arrived
from .words import SENTINEL, ZERO, HeaderRules, header_programs


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    generations: int = 2  # of staging; those of the slots are always three
    barrier: bool = True  # False: a put may begin before the words are staged
    once: bool = True  # False: the network may write a word a second time
    ends_awaited: bool = True  # False: memory is cleared while a put is on its way


def steps_of(nodes: int, node: int, call: NodeCall) -> list[Sent | Due]:
    return list(exchange(Nodes(nodes), node, call, call.sizes[0]))


def puts_in(nodes: int, node: int, call: NodeCall) -> list[tuple[int, int, int]]:
    """Return (target, slot, index) of each word that a rank puts in a call, in order."""
    steps = steps_of(nodes, node, call)
    return [(step.node, *cell) for step in steps if isinstance(step, Sent) for cell in step.cells]


def data_program(node: int, nodes: int, calls: Sequence[NodeCall], rules: Rules) -> Steps:
    for number, call in enumerate(calls):
        epoch, put = number + 1, 0
        yield Start(number)
        if number:
            for step in steps_of(nodes, node, calls[number - 1]):
                for cell in step.trees if isinstance(step, Due) else ():
                    yield Store((node, "network", (number - 1) % 3, *cell), SENTINEL)
        for step in steps_of(nodes, node, call):
            if isinstance(step, Sent):
                for slot, index in step.cells:
                    staged = node, "staging", epoch % rules.generations, slot, index
                    yield Store(staged, Word(number, index, step.tree))
                    if rules.barrier:
                        yield Fence()
                    yield Store((node, "asked", put, epoch % 2), epoch)
                    put += 1
            elif step.trees:
                yield Await(
                    {
                        (node, "network", number % 3, *cell): Word(number, cell[1], tree)
                        for cell, tree in step.trees.items()
                    },
                    arrived,
                )
        yield KernelBoundary(number)


def adapter(node: int, nodes: int, calls: Sequence[NodeCall], put: int, parity: int, rules: Rules) -> Steps:
    """Carry out the put of this number of every second call."""
    for number, call in enumerate(calls):
        epoch, puts = number + 1, puts_in(nodes, node, call)
        if epoch % 2 != parity or put >= len(puts):
            continue
        target, slot, index = puts[put]
        yield Await({(node, "asked", put, parity): epoch}, lambda word, epoch=epoch: word == epoch)
        word = yield Load((node, "staging", epoch % rules.generations, slot, index))
        yield Store((target, "network", number % 3, slot, index), word)
        if not rules.once:
            yield Fence()  # it has landed, and lands again
            yield Store((target, "network", number % 3, slot, index), word)


class Ranks(Machine):
    """Ranks with adapters, which are no part of a kernel and may go on after it."""

    def __init__(self, nodes: int, calls: Sequence[NodeCall], rules: Rules) -> None:
        programs = [
            Program(node, "data", lambda node=node: data_program(node, nodes, calls, rules)) for node in range(nodes)
        ]
        programs += header_programs(nodes, [call.in_node for call in calls], HeaderRules())
        for node in range(nodes):
            most = max(len(puts_in(nodes, node, call)) for call in calls)
            programs += [
                Program(
                    nodes + node,  # a kernel does not end with its adapter
                    f"adapter {put} {parity}",
                    lambda node=node, put=put, parity=parity: adapter(node, nodes, calls, put, parity, rules),
                )
                for put in range(most)
                for parity in (0, 1)
            ]
        words = {"network": SENTINEL, "staging": SENTINEL, "asked": 0, "header": ZERO}
        super().__init__(programs, words, check_starts=False)


def calls_of(kind: str, count: int) -> list[NodeCall]:
    return [NodeCall(kind, (1,))] * count


@pytest.mark.parametrize(
    ("kind", "nodes", "count"),
    [
        ("doubling", 2, 4),
        ("halving", 2, 4),
        pytest.param("doubling", 3, 3, marks=pytest.mark.full),
        pytest.param("pairs", 3, 2, marks=pytest.mark.full),
        pytest.param("halving", 3, 3, marks=pytest.mark.full),
    ],
)
def test_what_is_staged_stays_until_it_has_been_read(kind: str, nodes: int, count: int, verify) -> None:
    verify(Ranks(nodes, calls_of(kind, count), Rules()))


def test_one_generation_of_staging_sends_words_of_the_next_call(refute) -> None:
    """A put that has been asked for in one call may read what the next call stages."""
    refute(Ranks(3, calls_of("doubling", 3), Rules(generations=1)), Kind.WRONG_VALUE)


def test_a_put_that_begins_before_the_words_are_staged_sends_old_ones(refute) -> None:
    refute(Ranks(2, calls_of("doubling", 3), Rules(barrier=False)), Kind.DEADLOCK, Kind.WRONG_VALUE)


@pytest.mark.full
def test_a_word_that_is_written_twice_is_taken_for_one_of_a_later_call(refute) -> None:
    """Unlike a cell with the epoch, a word relies on a network that delivers each packet of a put once."""
    refute(Ranks(2, calls_of("doubling", 4), Rules(once=False)), Kind.WRONG_VALUE)


# -- reset ------------------------------------------------------------------------------------------------------------


def giving_up(node: int, rules: Rules) -> Steps:
    """Exchange once with a deadline that is too short, reset, and exchange again, in the same generation of slots."""
    names = ("rank 0 data", "rank 1 data")
    for epoch in (1, 3):
        if epoch == 3:
            if rules.ends_awaited:
                yield Await({(node, "done"): 1}, lambda word: word == 1)
            yield Barrier("drained", names)
            yield Store((node, "network"), SENTINEL)
            yield Fence()
            yield Barrier("cleared", names)
        yield Store((node, "staging", epoch), Word(epoch, 0, node))
        yield Fence()
        yield Store((node, "asked", epoch), epoch)
        yield Await(
            {(node, "network"): Word(epoch, 0, 1 - node)},
            arrived,
            deadline="any time" if epoch == 1 else "",
        )


def late_adapter(node: int, epoch: int) -> Steps:
    yield Await({(node, "asked", epoch): epoch}, lambda word: word == epoch)
    word = yield Load((node, "staging", epoch))
    yield Store((1 - node, "network"), word)
    yield Fence()  # the adapter knows the end of a put once it has landed
    if epoch == 1:
        yield Store((node, "done"), 1)


def resetting(rules: Rules) -> Machine:
    programs = [Program(node, "data", lambda node=node: giving_up(node, rules)) for node in (0, 1)]
    programs += [
        Program(2 + node, f"adapter {epoch}", lambda node=node, epoch=epoch: late_adapter(node, epoch))
        for node in (0, 1)
        for epoch in (1, 3)
    ]
    return Machine(programs, {"network": SENTINEL, "staging": SENTINEL, "asked": 0, "done": 0}, check_starts=False)


def test_a_reset_waits_for_the_end_of_all_puts(verify, refute) -> None:
    """Otherwise a word of the call that failed may be taken for one of the next."""
    verify(resetting(Rules()))
    refute(resetting(Rules(ends_awaited=False)), Kind.WRONG_VALUE)
