"""Sentinel buffers: a word that is not the sentinel has arrived.

A call pushes its words into the slots of generation g at every rank, polls its own slots, and clears what the previous
call with slots left in generation g + 2 (mod 3). The next call with slots uses g + 1; a barrier, or a call through flag
cells, leaves all generations as they are. Beside the data, one program exchanges headers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from .explore import Kind
from .machine import Await, KernelBoundary, Machine, Program, Start, Steps, Store
from .words import SENTINEL, ZERO, Call, HeaderRules, Input, Sum, header_programs

CAPACITY = 100
"""Words of a generation: enough for any call here."""

HEADERS = HeaderRules()


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    generations: int = 3
    clears: int | None = 2  # a call clears generation (g + clears) % generations; None: the words it has just read
    clears_itself_from: int = (
        CAPACITY + 1
    )  # a call with so many words clears what it has read, and records an extent of 0
    clears_itself: bool = True  # False: it only records that extent
    counts_slot_calls: bool = True  # False: the generation is epoch % generations, also past calls without slots
    extents_kept: bool = True  # False: a call clears as many words as it uses itself
    bases_fixed: bool = True  # False: a generation begins where the one before ends, at this call's size
    headers: HeaderRules = HEADERS


def arrived(word: object) -> bool:
    return word != SENTINEL


def data_program(rank: int, ranks: int, calls: Sequence[Call], rules: Rules) -> Steps:
    extents = [0] * rules.generations
    slot_calls = 0
    for number, call in enumerate(calls):
        yield Start(number)
        if call.op != "barrier":
            generation = (slot_calls if rules.counts_slot_calls else number) % rules.generations
            slot_calls += 1
            extent = extent_of(call, ranks)

            # These stores land at any time up to the kernel boundary, so they stand for clears at any time in the call.
            if rules.clears is not None:
                cleared = (generation + rules.clears) % rules.generations
                for word in range(extents[cleared] if rules.extents_kept else extent):
                    yield Store((rank, "slots", cleared * CAPACITY + word), SENTINEL)
            clears_own_slots = size_of(call, ranks) >= rules.clears_itself_from
            extents[generation] = 0 if clears_own_slots else extent

            base = generation * (CAPACITY if rules.bases_fixed else extent)
            yield from SCHEDULES[call.op](
                rank, ranks, number, call, lambda owner, word, b=base: (owner, "slots", b + word)
            )

            if rules.clears is None or (clears_own_slots and rules.clears_itself):
                for word in range(extent):
                    yield Store((rank, "slots", base + word), SENTINEL)
        yield KernelBoundary(number)


# -- schedules: which word goes into which slot, and which words a rank waits for ------------------------------------

AddressOf = Callable[[int, int], tuple[int, str, int]]
"""A function from (owner, word of the generation) to an address."""


def one_shot(rank: int, ranks: int, epoch: int, call: Call, address_of: AddressOf) -> Steps:
    """Every rank sends everything to every rank; of two, to the other, which needs one slot."""
    others = [1 - rank] if ranks == 2 else range(ranks)
    stride = 0 if ranks == 2 else call.words
    for owner in others:
        for i in range(call.words):
            yield Store(address_of(owner, rank * stride + i), Input(rank, epoch, i))
    yield Await(
        {address_of(rank, r * stride + i): Input(r, epoch, i) for r in others for i in range(call.words)}, arrived
    )


def reduce_scatter(rank: int, ranks: int, epoch: int, call: Call, address_of: AddressOf) -> Steps:
    """Slice r of every rank goes to rank r, which adds. An all-to-all sends the same, and does not add."""
    stride = max(call.sizes)
    for owner in range(ranks):
        for i in range(call.sizes[owner]):
            yield Store(address_of(owner, rank * stride + i), Input(rank, epoch, owner * stride + i))
    own_slice = {
        address_of(rank, r * stride + i): Input(r, epoch, rank * stride + i)
        for r in range(ranks)
        for i in range(call.sizes[rank])
    }
    if own_slice:
        yield Await(own_slice, arrived)


def all_gather(rank: int, ranks: int, epoch: int, call: Call, address_of: AddressOf) -> Steps:
    """The part of rank r goes to every rank."""
    stride = max(call.sizes)
    for owner in range(ranks):
        for i in range(call.sizes[rank]):
            yield Store(address_of(owner, rank * stride + i), Input(rank, epoch, i))
    yield Await(
        {address_of(rank, r * stride + i): Input(r, epoch, i) for r in range(ranks) for i in range(call.sizes[r])},
        arrived,
    )


def two_shot(rank: int, ranks: int, epoch: int, call: Call, address_of: AddressOf) -> Steps:
    """Reduce-scatter into the first half of the generation, then all-gather the sums into the second half."""
    yield from reduce_scatter(rank, ranks, epoch, call, address_of)
    stride = max(call.sizes)
    second = ranks * stride
    for owner in range(ranks):
        for i in range(call.sizes[rank]):
            yield Store(address_of(owner, second + rank * stride + i), Sum(ranks, epoch, rank * stride + i))
    sums = {
        address_of(rank, second + r * stride + i): Sum(ranks, epoch, r * stride + i)
        for r in range(ranks)
        for i in range(call.sizes[r])
    }
    yield Await(sums, arrived)


def ring(rank: int, ranks: int, epoch: int, call: Call, address_of: AddressOf) -> Steps:
    """Pass words over 2N-2 hops to the right, each into its own slot; over N-1 hops to scatter sums, or to gather.

    At hop h, rank r sends chunk r - h with the terms so far.
    """
    stride = max(call.sizes)
    for hop in range(hops_of(call, ranks)):
        terms = min(hop + 1, ranks)
        sent, received = (rank - hop) % ranks, (rank - hop - 1) % ranks
        for i in range(call.sizes[sent]):
            yield Store(address_of((rank + 1) % ranks, hop * stride + i), Sum(terms, epoch, sent * stride + i))
        expected_words = {
            address_of(rank, hop * stride + i): Sum(terms, epoch, received * stride + i)
            for i in range(call.sizes[received])
        }
        if expected_words:
            yield Await(expected_words, arrived)


def hops_of(call: Call, ranks: int) -> int:
    return (2 if call.op == "ring" else 1) * (ranks - 1)


def broadcast(rank: int, ranks: int, epoch: int, call: Call, address_of: AddressOf) -> Steps:
    """The root sends to all others, and waits for none of them."""
    words = range(call.words)
    if rank == call.root:
        for owner in range(ranks):
            for i in words:
                if owner != rank or call.multicast:
                    yield Store(address_of(owner, i), Input(rank, epoch, i))
    if rank != call.root or call.multicast:
        yield Await({address_of(rank, i): Input(call.root, epoch, i) for i in words}, arrived)


SCHEDULES = {
    "one_shot": one_shot,
    "two_shot": two_shot,
    "ring": ring,
    "half_ring": ring,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
}


def extent_of(call: Call, ranks: int) -> int:
    """Return the number of words of a generation that a call uses."""
    stride = max(call.sizes)
    return {
        "one_shot": call.words if ranks == 2 else ranks * call.words,
        "two_shot": 2 * ranks * stride,
        "ring": hops_of(call, ranks) * stride,
        "half_ring": hops_of(call, ranks) * stride,
        "reduce_scatter": ranks * stride,
        "all_gather": ranks * stride,
        "broadcast": call.words,
    }[call.op]


def size_of(call: Call, ranks: int) -> int:
    """Return the number by which a call clears what it has read: its words, for each rank."""
    return ranks * call.words if call.op == "one_shot" else extent_of(call, ranks)


def model(ranks: int, calls: Sequence[Call], rules: Rules | None = None, **options: bool) -> Machine:
    rules = rules or Rules()

    def data(rank: int) -> Program:
        return Program(rank, "data", lambda: data_program(rank, ranks, calls, rules))

    programs = [data(rank) for rank in range(ranks)] + header_programs(ranks, calls, rules.headers)
    return Machine(programs, {"slots": SENTINEL, "header": ZERO}, **options)


# -- call sequences --------------------------------------------------------------------------------------------------


def calls_of(op: str, ranks: int, sizes: Sequence[int] = (2, 1, 1, 2, 1)) -> list[Call]:
    """Return five calls of one operation whose sizes change, so that generations have different extents."""
    return [Call(op, (size,) if op in ("one_shot", "broadcast") else (size,) * ranks) for size in sizes]


def mixed(ranks: int) -> list[Call]:
    """Return operations that use a generation differently, one after the other, with changing roots."""
    one, each = (1,), (1,) * ranks
    return [
        Call("two_shot", each),
        Call("broadcast", one),
        Call("ring", each),
        Call("broadcast", one, root=ranks - 1),
        Call("one_shot", one),
    ]


def with_empty(op: str, ranks: int) -> list[Call]:
    """Return calls in which the last rank's slice is empty.

    No rank waits for anything of it; in a reduce-scatter, it waits for nothing.
    """
    return [Call(op, (1,) * (ranks - 1) + (0,))] * 5


# -- protocols that hold ---------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", list(SCHEDULES))
def test_protocol_holds(op: str, ranks: int, verify) -> None:
    verify(model(ranks, calls_of(op, ranks)))


def test_a_root_may_send_to_itself(verify) -> None:
    verify(model(2, [Call("broadcast", (1,), root=number % 2, multicast=True) for number in range(5)]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_operations_may_follow_each_other(ranks: int, verify) -> None:
    verify(model(ranks, mixed(ranks)))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", ["two_shot", "ring", "reduce_scatter", "all_gather"])
def test_slices_may_be_empty(op: str, ranks: int, verify) -> None:
    verify(model(ranks, with_empty(op, ranks)))


ONE, TWO, BARRIER = Call("one_shot", (1,)), Call("one_shot", (2,)), Call("barrier", ())
WITH_BARRIERS = [ONE, BARRIER, TWO, ONE, BARRIER, BARRIER, TWO, ONE]


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_without_slots_leave_generations_alone(ranks: int, verify) -> None:
    verify(model(ranks, WITH_BARRIERS))


@pytest.mark.parametrize("first_epoch", [1, 3, 4])
def test_two_bits_of_epoch_would_do_in_a_header(first_epoch: int, verify) -> None:
    """A parity cell holds this epoch's header or that of two calls ago, so 16 bits are ample, and may wrap."""
    verify(model(2, calls_of("broadcast", 2), Rules(headers=HeaderRules(epoch_values=4, first_epoch=first_epoch))))


NO_HEADERS = Rules(headers=HeaderRules(exchanged=False))


@pytest.mark.parametrize("calls", [calls_of("one_shot", 3), calls_of("two_shot", 3), calls_of("ring", 3)])
def test_all_reduce_keeps_the_invariant_by_its_data(calls: list[Call], verify) -> None:
    verify(model(3, calls, NO_HEADERS))


@pytest.mark.parametrize("op", ["two_shot", "ring"])
def test_all_reduce_keeps_the_invariant_with_empty_slices_too(op: str, verify) -> None:
    """Any slice that is not empty has passed through every rank."""
    verify(model(3, with_empty(op, 3), NO_HEADERS))


CLEAR_AFTER_READ = Rules(generations=2, clears=None)


@pytest.mark.parametrize("calls", [calls_of("one_shot", 2), calls_of("two_shot", 2), mixed(2), mixed(3)])
def test_two_generations_do_if_a_call_clears_what_it_has_read(calls: list[Call], verify) -> None:
    """The third generation does not add safety but saves time: clearing need not wait for the reads."""
    verify(model(max(3 if len(call.sizes) == 3 else 2 for call in calls), calls, CLEAR_AFTER_READ))


LARGE_CALLS_CLEAR = Rules(clears_itself_from=5)


@pytest.mark.parametrize(("op", "ranks"), [("one_shot", 2), ("two_shot", 2), ("all_gather", 2), ("two_shot", 3)])
def test_large_calls_may_clear_themselves_among_small_ones_that_do_not(op: str, ranks: int, verify) -> None:
    calls = calls_of(op, ranks, (3, 1, 1, 3, 1) if ranks == 2 else (4, 1, 1))
    rules = replace(LARGE_CALLS_CLEAR, clears_itself_from=5 if ranks == 2 else 7)
    assert {size_of(call, ranks) >= rules.clears_itself_from for call in calls} == {True, False}
    verify(model(ranks, calls, rules))


@pytest.mark.parametrize("op", ["one_shot", "two_shot"])
def test_an_extent_of_0_without_clearing_reads_old_words(op: str, refute) -> None:
    refute(model(2, calls_of(op, 2, (3, 1, 1, 3)), replace(LARGE_CALLS_CLEAR, clears_itself=False)), Kind.WRONG_VALUE)


# -- the protocol without each of its guards -------------------------------------------------------------------------


# These use one size and four calls: a race that loses a word has many more states than a protocol that holds.
HANGS = [("one_shot", 2), ("two_shot", 2), ("ring", 2), ("broadcast", 2), ("broadcast", 3)]


@pytest.mark.parametrize(("op", "ranks"), [*HANGS, ("one_shot", 3)])
def test_clearing_one_generation_ahead_hangs(op: str, ranks: int, refute) -> None:
    """Generation g + 1 may already hold what a peer one call ahead has pushed."""
    refute(model(ranks, calls_of(op, ranks, (1,) * 4), Rules(clears=1)), Kind.DEADLOCK)


@pytest.mark.parametrize(("op", "ranks"), HANGS)
def test_two_generations_hang(op: str, ranks: int, refute) -> None:
    """With two, the previous call's generation is that of the next call, which a peer may have begun."""
    refute(model(ranks, calls_of(op, ranks, (1,) * 4), Rules(generations=2, clears=1)), Kind.DEADLOCK)


def test_counting_calls_without_slots_leaves_a_generation_uncleared(refute) -> None:
    """A barrier clears nothing, so the generation before it would keep its words."""
    refute(model(2, WITH_BARRIERS, Rules(counts_slot_calls=False)), Kind.WRONG_VALUE)


@pytest.mark.parametrize("op", ["one_shot", "two_shot"])
def test_one_generation_is_wrong_even_if_a_call_clears_what_it_has_read(op: str, refute) -> None:
    refute(model(2, calls_of(op, 2), replace(CLEAR_AFTER_READ, generations=1)), Kind.WRONG_VALUE, Kind.DEADLOCK)


@pytest.mark.parametrize("op", ["one_shot", "two_shot"])
def test_never_clearing_reads_old_words(op: str, refute) -> None:
    refute(model(2, calls_of(op, 2), Rules(clears=0)), Kind.WRONG_VALUE)


@pytest.mark.parametrize("op", ["one_shot", "two_shot", "ring"])
def test_clearing_only_this_calls_extent_reads_old_words(op: str, refute) -> None:
    refute(model(2, calls_of(op, 2), Rules(extents_kept=False)), Kind.WRONG_VALUE)


@pytest.mark.parametrize("op", ["one_shot", "two_shot", "ring"])
def test_bases_that_move_with_the_size_mix_calls(op: str, refute) -> None:
    refute(model(2, calls_of(op, 2), Rules(bases_fixed=False)), Kind.WRONG_VALUE)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", ["broadcast", "reduce_scatter", "all_gather"])
def test_without_headers_some_rank_runs_ahead(op: str, ranks: int, refute) -> None:
    """The root of a broadcast runs ahead, or a rank that receives an empty slice or gathers an empty part."""
    calls = calls_of(op, ranks) if op == "broadcast" else with_empty(op, ranks)
    refute(model(ranks, calls, NO_HEADERS), Kind.EARLY_FINISH)


@pytest.mark.parametrize("op", ["broadcast", "reduce_scatter"])
def test_running_ahead_ends_in_wrong_words_or_a_hang(op: str, refute) -> None:
    """An early finish has these consequences three calls later."""
    calls = calls_of(op, 2) if op == "broadcast" else with_empty(op, 2)
    refute(model(2, calls, NO_HEADERS, check_starts=False), Kind.WRONG_VALUE, Kind.DEADLOCK)


def test_a_header_that_is_not_compared_by_epoch_guards_nothing(refute) -> None:
    refute(
        model(2, calls_of("broadcast", 2), Rules(headers=HeaderRules(by_epoch=False))),
        Kind.EARLY_FINISH,
        Kind.WRONG_VALUE,
    )


def test_one_header_cell_hangs(refute) -> None:
    """A peer that is one call ahead overwrites the header that this rank still waits for."""
    refute(model(2, calls_of("one_shot", 2), Rules(headers=HeaderRules(cells=1))), Kind.DEADLOCK)


def test_one_header_cell_compares_the_fingerprints_of_different_calls(refute) -> None:
    """Accepting a later epoch would end the wait, but with another call's fingerprint: a false mismatch."""
    refute(model(2, calls_of("one_shot", 2), Rules(headers=HeaderRules(cells=1, or_later=True))), Kind.WRONG_VALUE)


@pytest.mark.parametrize("op", ["one_shot", "broadcast"])
def test_words_of_a_header_need_no_order(op: str, verify) -> None:
    """Each carries the epoch, so each says for itself whether it has come."""
    verify(model(2, calls_of(op, 2), Rules(headers=HeaderRules(words=2))))


def test_every_word_of_a_header_must_carry_the_epoch(refute) -> None:
    """One without it may be that of two calls ago: a false mismatch, or a mismatch that nobody finds."""
    rules = HeaderRules(words=2, all_tagged=False)
    refute(model(2, calls_of("one_shot", 2), Rules(headers=rules)), Kind.WRONG_VALUE)


def test_the_parity_of_the_epoch_is_not_enough(refute) -> None:
    """One bit in the header cannot tell this call from the one two calls ago, whose header is in the same cell."""
    rules = Rules(headers=HeaderRules(epoch_values=2))
    refute(model(2, calls_of("broadcast", 2), rules), Kind.EARLY_FINISH, Kind.WRONG_VALUE)


@pytest.mark.parametrize(("first_epoch", "epoch_values"), [(0, 1 << 16), (3, 4), (4, 4)])
def test_a_cell_never_written_must_not_count_as_a_header_of_epoch_zero(
    first_epoch: int, epoch_values: int, refute, verify
) -> None:
    """It would count at the first call if epochs begin at 0, and at two calls after a reset if the 16 bits wrap."""
    rules = HeaderRules(zero_ignored=False, epoch_values=epoch_values, first_epoch=first_epoch)
    refute(model(2, calls_of("one_shot", 2), Rules(headers=rules)), Kind.WRONG_VALUE)
    verify(model(2, calls_of("one_shot", 2), Rules(headers=replace(rules, zero_ignored=True))))
