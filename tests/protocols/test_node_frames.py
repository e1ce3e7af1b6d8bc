"""CPU ranks on several hosts: sums of nodes pass as frames over connections, each of which keeps their order.

A step sends one frame to a peer: a header with the epoch, the call and the step, then the sum. The reader of a
connection knows which frame comes next. Ranks of a node meet in shared memory before the exchange, and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from .explore import Kind
from .machine import Await, Barrier, Fail, Finish, Load, Machine, Program, Start, Steps, Store
from .test_node_exchange import Group, NodeCall, Nodes, Sent, exchange


class Header(NamedTuple):
    """The header of a frame: the epoch, the exchange that the sender calls, and its step."""

    epoch: int
    exchange: str
    step: int


class Frame(NamedTuple):
    header: Header
    tree: Any


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    compares: bool = True  # False: any frame that comes is taken for the one that is due
    exact: bool = True  # False: a read may take the beginning of the next frame as well, which is then lost
    meets_first: bool = True  # False: a rank exchanges before it has seen the ranks of its node
    meets_last: bool = True  # False: a rank has no use for what its node gathers


def meeting(rank: int, group: Group, phase: int) -> Steps:
    """Show this rank's progress, and wait for that of its node."""
    yield Store((rank, "progress"), phase)
    first = rank // group.local * group.local
    yield Await(
        {(mate, "progress"): None for mate in range(first, first + group.local) if mate != rank},
        lambda progress: progress >= phase,
    )


def rank_program(rank: int, group: Group, calls: Sequence[Sequence[NodeCall]], rules: Rules) -> Steps:
    """Make this rank's calls, ``calls[rank]``. A mismatch ends them, for a reset that the next calls come after."""
    place, (node, local) = Nodes(group.nodes), divmod(rank, group.local)
    sent: dict[int, int] = {}  # frames, by the rank of the other end
    read: dict[int, int] = {}
    for number, call in enumerate(calls[rank]):
        yield Start(number)
        if rules.meets_first and group.local > 1:
            yield from meeting(rank, group, 2 * number + 1)
        for step in exchange(place, node, call, 1):
            if isinstance(step, Sent):
                peer = step.node * group.local + local
                position = sent[peer] = sent.get(peer, -1) + 1
                header = Header(number + 1, call.exchange, step.cells[0][0])
                yield Store((peer, "wire", rank, position), Frame(header, step.tree))
                continue
            for (slot, _), sender in step.senders.items():
                peer = sender * group.local + local
                position = read[peer] = read.get(peer, -1) + 1
                at = rank, "wire", peer, position
                due = Frame(Header(number + 1, call.exchange, slot), step.trees[slot, 0])
                yield Await({at: None}, lambda frame: frame is not None)
                frame = yield Load(at)
                if rules.compares and frame.header != due.header:
                    yield Finish(number)
                    return  # a mismatch, which is raised
                if frame != due:
                    yield Fail(f"{frame} is added in place of {due}", Kind.WRONG_VALUE)
                if not rules.exact and (yield Load((rank, "wire", peer, position + 1))) is not None:
                    read[peer] += 1
        if rules.meets_last and group.local > 1:
            yield from meeting(rank, group, 2 * number + 2)
        yield Finish(number)


def model(group: Group, calls: Sequence[Sequence[NodeCall]], rules: Rules | None = None, **options: bool) -> Machine:
    rules = rules or Rules()
    programs = [
        Program(rank, "", lambda rank=rank: rank_program(rank, group, calls, rules)) for rank in range(group.ranks)
    ]
    return Machine(programs, {"wire": None, "progress": 0}, **options)


def same(group: Group, *exchanges: str) -> list[list[NodeCall]]:
    return [[NodeCall(each, (1,) * group.local) for each in exchanges]] * group.ranks


@pytest.mark.parametrize("group", [Group(2, 1), Group(3, 1), Group(4, 1), Group(2, 2)], ids=str)
@pytest.mark.parametrize("exchanges", [("doubling",) * 3, ("pairs",) * 3, ("doubling", "pairs", "doubling")], ids=str)
def test_frames_in_order_keep_calls_apart(exchanges: Sequence[str], group: Group, verify) -> None:
    verify(model(group, same(group, *exchanges[: 2 if group.ranks == 4 else 3])))


DIFFERENT = [[NodeCall("doubling", (1,))], [NodeCall("pairs", (1,))], [NodeCall("pairs", (1,))]]
"""Calls of three nodes, of which the first makes another one."""


def test_a_call_that_ranks_make_differently_is_found(refute) -> None:
    """Each rank that gets a frame of another call stops; those that wait for it are stopped at the deadline."""
    group = Group(3, 1)
    refute(model(group, DIFFERENT, check_starts=False), Kind.DEADLOCK)
    refute(model(group, DIFFERENT, Rules(compares=False), check_starts=False), Kind.WRONG_VALUE)


def test_a_read_beyond_the_frame_loses_the_next_call(refute) -> None:
    group = Group(3, 1)
    refute(model(group, same(group, "pairs", "pairs"), Rules(exact=False)), Kind.DEADLOCK)


def test_a_node_that_is_not_complete_lets_a_rank_finish_early(verify, refute) -> None:
    """The rank of another local rank may not have begun, though this one has the frames of its peers.

    A sum of slices waits for it in the end; a call without data, or with one slice, does not.
    """
    group = Group(2, 2)
    calls = same(group, "pairs", "pairs")
    verify(model(group, calls, Rules(meets_last=False)))
    verify(model(group, calls, Rules(meets_first=False)))
    refute(model(group, calls, Rules(meets_first=False, meets_last=False)), Kind.EARLY_FINISH)


def leftover(rank: int, renewed: bool) -> Steps:
    """Send a frame that the other rank gives up waiting for, reset, and exchange again."""
    first = 1 if renewed else 0
    yield Store((1 - rank, "wire", rank, 0, 0), Frame(Header(1, "pairs", 0), rank))
    yield Await({(rank, "wire", 1 - rank, 0, 0): None}, lambda frame: frame is not None, deadline="any time")
    yield Barrier("reset", ("rank 0", "rank 1"))
    yield Store((1 - rank, "wire", rank, first, 0 if renewed else 1), Frame(Header(9, "pairs", 0), rank))
    at = rank, "wire", 1 - rank, first, 0
    yield Await({at: Frame(Header(9, "pairs", 0), 1 - rank)}, lambda frame: frame is not None)


@pytest.mark.parametrize("renewed", [True, False])
def test_a_reset_makes_new_connections(renewed: bool, verify, refute) -> None:
    """A frame of the call that failed is the next one of an old connection, whoever has given up waiting for it."""
    programs = [Program(rank, "", lambda rank=rank: leftover(rank, renewed)) for rank in (0, 1)]
    machine = Machine(programs, {"wire": None}, check_starts=False)
    verify(machine) if renewed else refute(machine, Kind.WRONG_VALUE)
