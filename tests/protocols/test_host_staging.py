"""CPU ranks: every rank writes its own shared memory, and reads that of the others.

In step t a rank writes its staging generation t % 2 and then releases ``progress = t + 1``. That says that what it
wrote in step t is there, and that it has read all that it wanted of the steps before. So a rank may write step t once
every reader of its step t - 2 shows progress >= t. A call takes the same number of steps on every rank. It begins with
a header word, one for even and one for odd epochs, which a peer compares once the progress says that it is there.

In calls of tensors that all ranks map, a rank accesses the tensors of the others. Beside the header is the place of its
tensor. The user writes it before each call, and reads it or writes it anew once the call is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from .explore import Kind
from .machine import Await, Fail, Fence, Finish, Load, Machine, Program, Read, Start, Steps, Store
from .words import ZERO, Call, Header, Input, Sum

NOWHERE = -1
"""The place of a tensor that is not mapped."""


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    generations: int = 2
    released: bool = True  # False: progress may be seen before the data
    awaited: bool = True  # False: staging is read without waiting for progress
    header_cells: int = 2
    ring_permission: bool = True  # False: a ring does not wait for the reader of what it overwrites
    ring_awaits_all: bool = True  # False: a ring's second step waits for the neighbours only
    ring_end: bool = True  # False: a ring ends without its reader's progress
    root_permission: bool = True  # False: the root of a broadcast in chunks runs ahead
    broadcast_end: bool = True  # False: a broadcast ends without the others' progress
    place_cells: int = 2
    mapped_end: bool = True  # False: a call on mapped tensors ends without the others' progress
    staged_again: bool = True  # False: ranks go on in the step in which ranks with mapped tensors have staged nothing


class RankState:
    """A rank with the operations of ``transport/cpu/waiting.py``."""

    def __init__(self, rank: int, ranks: int, rules: Rules) -> None:
        self.rank, self.ranks, self.rules = rank, ranks, rules
        self.others = [(rank + distance) % ranks for distance in range(1, ranks)]
        self.right, self.left = (rank + 1) % ranks, (rank - 1) % ranks
        self.step = 0
        self.epoch = 0
        self.placed = NOWHERE
        self.word = ZERO

    def begin(self, number: int, call: Call) -> Steps:
        yield Start(number)
        self.epoch += 1
        self.word = Header(self.epoch, call.fingerprint)
        self.placed = NOWHERE if call.op.startswith("ordinary") else number
        if call.op.startswith(("mapped", "mixed")):
            for part in range(self.ranks):
                yield Store((self.rank, "tensor", part), Input(self.rank, number, part))
        if call.op.startswith(("mapped", "mixed", "ordinary")):
            yield Store((self.rank, "place", self.epoch % self.rules.place_cells), self.placed)
        yield Store((self.rank, "header", self.epoch % self.rules.header_cells), self.word)

    def staging(self, rank: int, step: int, *word: object) -> tuple[object, ...]:
        return rank, "staging", step % self.rules.generations, *word

    def publish(self) -> Steps:
        if self.rules.released:
            yield Fence()
        yield Store((self.rank, "progress"), self.step + 1)
        self.step += 1

    def await_peers(self, *peers: int) -> Steps:
        """Wait until the peers have published the steps below this rank's, in the same call."""
        for peer in peers:
            if self.rules.awaited:
                yield Await({(peer, "progress"): None}, lambda progress, step=self.step: progress >= step)
                yield Read({(peer, "header", self.epoch % self.rules.header_cells): self.word})

    def meet(self, *peers: int) -> Steps:
        """Begin with the places of ``peers``, which have all come."""
        yield from self.publish()
        yield from self.await_peers(*peers)
        yield Read({(peer, "place", self.epoch % self.rules.place_cells): self.placed for peer in peers})

    def part_from_all(self, *peers: int) -> Steps:
        """Wait until ``peers`` are done with the tensors, at the end of a call."""
        yield from self.publish()
        if self.rules.mapped_end:
            yield from self.await_peers(*peers)


def one_shot(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """All ranks stage, and all read everything: one-shot all-reduce, all-gather, all-to-all."""
    for chunk in range(chunks):
        yield Store(state.staging(state.rank, state.step), Input(state.rank, number, chunk))
        yield from state.publish()
        for peer in state.others:
            yield from state.await_peers(peer)
            yield Read({state.staging(peer, state.step - 1): Input(peer, number, chunk)})


def two_shot(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """A generation holds the reduced slice of the previous chunk, and the contribution to this one."""
    for chunk in range(chunks + 1):
        staged_step = state.step
        for peer in state.others:
            if chunk < chunks and call.sizes[peer]:
                yield Store(state.staging(state.rank, staged_step, "x", peer), Input(state.rank, number, (chunk, peer)))
        yield from state.publish()
        yield from state.await_peers(*state.others)
        if chunk < chunks and call.sizes[state.rank]:
            for peer in state.others:
                yield Read(
                    {state.staging(peer, staged_step, "x", state.rank): Input(peer, number, (chunk, state.rank))}
                )
            yield Store(state.staging(state.rank, state.step, "sum"), Sum(state.ranks, number, (chunk, state.rank)))
        if chunk > 0:
            results = {
                state.staging(peer, staged_step, "sum"): Sum(state.ranks, number, (chunk - 1, peer))
                for peer in state.others
                if call.sizes[peer]
            }
            if results:
                yield Read(results)


def ring(state: RankState, number: int, call: Call, chunks: int, first_hop: int = 0, last_hop: int = -1) -> Steps:
    """Pass slices around; each rank reads what its left neighbour staged in the step before.

    An all-reduce takes hops 0 to 2N - 2. Up to hop N - 1 they make a reduce-scatter, from there on an all-gather.
    """
    first = state.step
    last_hop = 2 * state.ranks - 2 if last_hop < 0 else last_hop
    for chunk in range(chunks):
        for hop in range(first_hop, last_hop + 1):
            sends, receives = hop < last_hop, hop > first_hop
            awaited: list[int] = []
            if state.step == first + 1 and state.rules.ring_awaits_all:
                awaited += state.others
            if receives:
                awaited.append(state.left)
            if sends and state.step > first and state.rules.ring_permission:
                awaited.append(state.right)
            yield from state.await_peers(*dict.fromkeys(awaited))
            if receives:
                terms, slice_index = min(hop, state.ranks), (state.rank - 1 - hop) % state.ranks
                yield Read({state.staging(state.left, state.step - 1): Sum(terms, number, (chunk, slice_index))})
            if sends:
                terms, slice_index = min(hop + 1, state.ranks), (state.rank - 1 - hop) % state.ranks
                passed = state.staging(state.rank, state.step), Sum(terms, number, (chunk, slice_index))
                yield Store(*passed)
                yield from state.publish()
                if hop >= state.ranks or (hop == state.ranks - 1 and not receives):
                    yield Read(dict([passed]))  # into the result, which need not lie where others read
    if state.rules.ring_end:
        yield from state.await_peers(state.right)


def ring_reduce_scatter(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    yield from ring(state, number, call, chunks, 0, state.ranks - 1)


def ring_all_gather(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    yield from ring(state, number, call, chunks, state.ranks - 1, 2 * state.ranks - 2)


def broadcast(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """The root stages; the others publish the step to say that they are done with the one before."""
    first = state.step
    for chunk in range(chunks):
        if state.rank == call.root:
            if state.step > first and state.rules.root_permission:
                yield from state.await_peers(*state.others)
            yield Store(state.staging(state.rank, state.step), Input(state.rank, number, chunk))
            yield from state.publish()
        else:
            yield from state.publish()
            yield from state.await_peers(call.root)
            yield Read({state.staging(call.root, state.step - 1): Input(call.root, number, chunk)})
    if state.rules.broadcast_end:
        step = state.step
        state.step = step if state.rank == call.root else first + 1
        yield from state.await_peers(*state.others)
        state.step = step


def barrier(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    yield from state.publish()
    yield from state.await_peers(*state.others)


def to_root(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """All ranks but the root stage, and it alone reads: a gather, or a reduce in one step."""
    for chunk in range(chunks):
        if state.rank != call.root:
            yield Store(state.staging(state.rank, state.step), Input(state.rank, number, chunk))
        yield from state.publish()
        yield from state.await_peers(*state.others)
        if state.rank == call.root:
            yield Read({state.staging(peer, state.step - 1): Input(peer, number, chunk) for peer in state.others})


def from_root(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """The root stages, and each of the others reads its part."""
    for chunk in range(chunks):
        if state.rank == call.root:
            yield Store(state.staging(state.rank, state.step), Input(state.rank, number, chunk))
        yield from state.publish()
        yield from state.await_peers(*state.others)
        if state.rank != call.root:
            yield Read({state.staging(call.root, state.step - 1): Input(call.root, number, chunk)})


def slices_to_root(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """Take the steps of two_shot, but with a root that alone reads the sums, and stages none."""
    for chunk in range(chunks + 1):
        staged_step = state.step
        for peer in state.others:
            if chunk < chunks and call.sizes[peer]:
                yield Store(state.staging(state.rank, staged_step, "x", peer), Input(state.rank, number, (chunk, peer)))
        yield from state.publish()
        yield from state.await_peers(*state.others)
        if chunk < chunks and call.sizes[state.rank]:
            for peer in state.others:
                yield Read(
                    {state.staging(peer, staged_step, "x", state.rank): Input(peer, number, (chunk, state.rank))}
                )
            if state.rank != call.root:
                yield Store(state.staging(state.rank, state.step, "sum"), Sum(state.ranks, number, (chunk, state.rank)))
        results = {
            state.staging(peer, staged_step, "sum"): Sum(state.ranks, number, (chunk - 1, peer))
            for peer in state.others
            if call.sizes[peer] and chunk > 0 and state.rank == call.root
        }
        if results:
            yield Read(results)


def uneven(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """All ranks stage, and all read everything; in the first step the sizes too, with those of their own."""
    for chunk in range(chunks):
        own = state.staging(state.rank, state.step), Input(state.rank, number, chunk)
        yield Store(*own)
        yield from state.publish()
        yield from state.await_peers(*state.others)
        if chunk == 0:
            yield Read(dict([own]))
        yield Read({state.staging(peer, state.step - 1): Input(peer, number, chunk) for peer in state.others})


def mapped_all_reduce(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """Each rank reads its slice of all tensors, and writes the sum into all of them."""
    yield from state.meet(*state.others)
    ranks = range(state.ranks)
    yield Read({(peer, "tensor", state.rank): Input(peer, number, state.rank) for peer in ranks})
    for peer in ranks:
        yield Store((peer, "tensor", state.rank), Sum(state.ranks, number, state.rank))
    yield from state.part_from_all(*state.others)
    for part in ranks:
        word = yield Load((state.rank, "tensor", part))
        if word != Sum(state.ranks, number, part):
            yield Fail(f"rank {state.rank} finds {word} in its tensor", Kind.WRONG_VALUE)


def mapped_reduce_scatter(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    yield from state.meet(*state.others)
    yield Read({(peer, "tensor", state.rank): Input(peer, number, state.rank) for peer in range(state.ranks)})
    yield from state.part_from_all(*state.others)


def mapped_all_gather(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    yield from state.meet(*state.others)
    yield Read({(peer, "tensor", 0): Input(peer, number, 0) for peer in range(state.ranks)})
    yield from state.part_from_all(*state.others)


def mapped_broadcast(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """The others say that they have read by a second step; the root has nothing to say in it."""
    if state.rank == call.root:
        yield from state.publish()
        yield from state.part_from_all(*state.others)
        return
    yield from state.meet(call.root)
    yield Read({(call.root, "tensor", 0): Input(call.root, number, 0)})
    yield from state.publish()
    state.step -= 1
    yield from state.await_peers(*state.others)
    state.step += 1


def ordinary_reduce_scatter(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """No rank has a mapped tensor, which each sees in the first step, when it has staged."""
    yield Store(state.staging(state.rank, state.step), Input(state.rank, number, 0))
    yield from state.meet(*state.others)
    yield Read({state.staging(peer, state.step - 1): Input(peer, number, 0) for peer in state.others})


def mixed_all_reduce(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    """Rank 0 alone has a mapped tensor, and stages nothing in the first step; so all stage in the next."""
    for peer in state.others if state.rank else ():
        yield Store(state.staging(state.rank, state.step, "x", peer), Input(state.rank, number, (0, peer)))
    yield from state.meet(*state.others)
    yield from two_shot(state, number, call, chunks)


def mixed_all_gather(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    if state.rank:
        yield Store(state.staging(state.rank, state.step), Input(state.rank, number, 0))
    yield from state.publish()
    for peer in state.others:
        yield from state.await_peers(peer)
        yield Read({(peer, "place", state.epoch % state.rules.place_cells): state.placed})
        if state.rank and peer:
            yield Read({state.staging(peer, state.step - 1): Input(peer, number, 0)})
    yield from one_shot(state, number, call, chunks)


def mixed_reduce_scatter(state: RankState, number: int, call: Call, chunks: int) -> Steps:
    if state.rank:
        yield Store(state.staging(state.rank, state.step), Input(state.rank, number, 0))
    yield from state.meet(*state.others)
    if state.rules.staged_again:
        yield from one_shot(state, number, call, chunks)
    else:
        yield Read({state.staging(peer, state.step - 1): Input(peer, number, 0) for peer in state.others})


ROOTED = ("broadcast", "to_root", "from_root", "slices_to_root", "mapped_broadcast")
SCHEDULES = {
    "one_shot": one_shot,
    "two_shot": two_shot,
    "ring": ring,
    "ring_reduce_scatter": ring_reduce_scatter,
    "ring_all_gather": ring_all_gather,
    "broadcast": broadcast,
    "barrier": barrier,
    "to_root": to_root,
    "from_root": from_root,
    "slices_to_root": slices_to_root,
    "uneven": uneven,
    "mapped_all_reduce": mapped_all_reduce,
    "mapped_reduce_scatter": mapped_reduce_scatter,
    "mapped_all_gather": mapped_all_gather,
    "mapped_broadcast": mapped_broadcast,
    "ordinary_reduce_scatter": ordinary_reduce_scatter,
    "mixed_all_reduce": mixed_all_reduce,
    "mixed_reduce_scatter": mixed_reduce_scatter,
    "mixed_all_gather": mixed_all_gather,
}


def rank_program(rank: int, ranks: int, calls: Sequence[Call], chunks: int, rules: Rules) -> Steps:
    state = RankState(rank, ranks, rules)
    for number, call in enumerate(calls):
        yield from state.begin(number, call)
        yield from SCHEDULES[call.op](state, number, call, chunks)
        yield Finish(number)


def model(
    ranks: int, ops: Sequence[str], rules: Rules | None = None, chunks: int = 1, empty: int = 0, **options: bool
) -> Machine:
    """Return a model of these calls. ``empty`` ranks at the end have empty slices; roots take turns."""
    rules = rules or Rules()
    sizes = (1,) * (ranks - empty) + (0,) * empty
    calls = [Call(op, sizes, root=number % ranks if op in ROOTED else 0) for number, op in enumerate(ops)]

    def program(rank: int) -> Program:
        return Program(rank, "", lambda: rank_program(rank, ranks, calls, chunks, rules))

    return Machine(
        [program(rank) for rank in range(ranks)],
        {"header": ZERO, "progress": 0, "staging": None, "tensor": None, "place": NOWHERE},
        **options,
    )


MIXED = [
    ["two_shot", "broadcast", "ring", "one_shot", "broadcast"],
    ["ring", "broadcast", "broadcast", "barrier", "two_shot"],
    ["one_shot", "ring", "two_shot", "barrier", "ring"],
    ["broadcast", "two_shot", "one_shot", "ring", "barrier"],
    ["to_root", "from_root", "slices_to_root", "broadcast", "to_root"],
    ["from_root", "uneven", "ring", "slices_to_root", "from_root"],
    ["mapped_all_reduce", "two_shot", "mapped_broadcast", "mixed_all_reduce", "mapped_all_gather"],
    ["mapped_broadcast", "broadcast", "mapped_broadcast", "mapped_reduce_scatter", "one_shot"],
]


@pytest.mark.every(11)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", list(SCHEDULES))
def test_protocol_holds(op: str, ranks: int, verify) -> None:
    verify(model(ranks, [op] * 5))


@pytest.mark.every(7)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", [op for op in SCHEDULES if op != "barrier"])
def test_messages_of_several_chunks(op: str, ranks: int, verify) -> None:
    verify(model(ranks, [op] * 2, chunks=3))


@pytest.mark.every(5)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("ops", MIXED, ids=lambda ops: "-".join(ops))
def test_operations_may_follow_each_other(ops: list[str], ranks: int, verify) -> None:
    verify(model(ranks, ops))


def test_slices_may_be_empty(verify) -> None:
    verify(model(3, ["two_shot", "two_shot", "broadcast", "two_shot", "one_shot"], empty=1))


@pytest.mark.parametrize("op", ["one_shot", "two_shot", "ring", "to_root", "from_root", "slices_to_root", "uneven"])
def test_one_generation_is_overwritten_while_it_is_read(op: str, refute) -> None:
    refute(model(2, [op] * 2, Rules(generations=1), chunks=2), Kind.WRONG_VALUE)


def test_two_shot_of_one_chunk_does_with_one_generation(verify) -> None:
    """Its second step already says that all have read the first; the chunks of a longer message need both."""
    verify(model(3, ["two_shot"] * 5, Rules(generations=1)))


def test_progress_without_release_shows_unwritten_data(refute) -> None:
    refute(model(2, ["one_shot"] * 2, Rules(released=False)), Kind.WRONG_VALUE)


def test_reading_without_progress_shows_unwritten_data(refute) -> None:
    refute(model(2, ["one_shot"] * 2, Rules(awaited=False)), Kind.WRONG_VALUE)


@pytest.mark.parametrize("op", ["one_shot", "two_shot", "ring", "broadcast", "barrier"])
def test_one_header_word_shows_the_next_call(op: str, refute) -> None:
    """A rank that is one call ahead has overwritten the header that is still to be compared: a false mismatch."""
    refute(model(2, [op] * 3, Rules(header_cells=1)), Kind.WRONG_VALUE)


def test_a_ring_needs_the_permission_of_its_reader(verify, refute) -> None:
    """With two ranks, the reader is also the neighbour that is waited for."""
    refute(model(3, ["ring"] * 2, Rules(ring_permission=False)), Kind.WRONG_VALUE)
    verify(model(2, ["ring"] * 3, Rules(ring_permission=False)))


@pytest.mark.full
def test_a_ring_after_another_call_overwrites_what_anybody_may_read(verify, refute) -> None:
    """Four ranks are needed: with three, both others are neighbours."""
    verify(model(3, ["one_shot", "ring", "one_shot"], Rules(ring_awaits_all=False)))
    refute(model(4, ["one_shot", "ring"], Rules(ring_awaits_all=False)), Kind.WRONG_VALUE)
    verify(model(4, ["one_shot", "ring"]))


def test_a_ring_ends_once_its_reader_has_caught_up(refute) -> None:
    refute(model(3, ["ring", "one_shot"], Rules(ring_end=False)), Kind.WRONG_VALUE)


def test_the_root_of_a_broadcast_needs_the_readers_permission(refute) -> None:
    refute(model(2, ["broadcast"], Rules(root_permission=False), chunks=3), Kind.WRONG_VALUE)


def test_a_broadcast_ends_once_everybody_has_begun(refute) -> None:
    refute(model(2, ["broadcast"] * 5, Rules(broadcast_end=False)), Kind.EARLY_FINISH)
    refute(model(3, ["broadcast"] * 5, Rules(broadcast_end=False), check_starts=False), Kind.WRONG_VALUE)


@pytest.mark.parametrize("op", ["mapped_all_reduce", "mapped_reduce_scatter", "mapped_all_gather", "mapped_broadcast"])
def test_a_mapped_tensor_is_the_users_again_once_all_are_done_with_it(op: str, refute) -> None:
    refute(model(2, [op] * 2, Rules(mapped_end=False), check_starts=False), Kind.WRONG_VALUE)


def test_one_place_shows_the_next_call(refute) -> None:
    refute(model(2, ["ordinary_reduce_scatter", "mapped_broadcast"], Rules(place_cells=1)), Kind.WRONG_VALUE)


def test_what_a_rank_with_a_mapped_tensor_has_not_staged_is_staged_again(refute) -> None:
    refute(model(2, ["mixed_reduce_scatter"], Rules(staged_again=False)), Kind.WRONG_VALUE)
