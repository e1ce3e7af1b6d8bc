"""Sums in the switch: staging, a flag, a load from all ranks at once, and a second shot through sentinel slots.

A call copies its input to its own slots and raises a flag at every rank: the epoch, stored after a fence. The owner of
a slice waits for all flags, loads the slice from every rank's staging, and sends the sums to all, with one store to
each (a multicast lands at each rank at its own time). Every rank polls the sums, and the next call with slots clears
the generation, including the staging.

There is one flag for each rank (and program), which the next call overwrites. That is enough because no rank ends a
call, and so raises the next flag, before it has the sums of all owners. Each of those was sent after its owner had seen
all flags. Therefore the owner of an empty slice must not wait for flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from . import test_sentinel as sentinel
from .explore import Kind
from .machine import Await, Fence, KernelBoundary, Machine, Program, Read, Start, Steps, Store
from .words import SENTINEL, ZERO, Call, HeaderRules, Input, Sum, header_programs

CAPACITY = 100
"""Words of a generation: enough for any call here."""
HEADERS = HeaderRules()
NEVER = -1


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    fenced: bool = True  # the flag is stored after a fence
    flags: int = 1  # words of a flag, used in turn by the epoch
    by_epoch: bool = True  # False: any flag that was ever raised will do
    waits_for_flags: bool = True
    owners_of_nothing_wait: bool = False
    clears: int = 2  # a call clears generation (g + clears) % 3
    clears_staging: bool = True
    clears_own_staging_after_flag: bool = False  # True: within the call, as soon as this rank has its own sums
    headers: HeaderRules = HEADERS


def extent_of(call: Call, ranks: int) -> int:
    return 2 * ranks * max(call.sizes) if call.op == "multimem" else sentinel.extent_of(call, ranks)


def data_program(rank: int, ranks: int, calls: Sequence[Call], rules: Rules) -> Steps:
    extents = [(0, 0)] * 3  # first word to clear, and the end
    slot_calls = 0
    for number, call in enumerate(calls):
        yield Start(number)
        if call.op != "barrier":
            generation = slot_calls % 3
            slot_calls += 1
            cleared = (generation + rules.clears) % 3
            clears = [Store((rank, "slots", cleared * CAPACITY + word), SENTINEL) for word in range(*extents[cleared])]
            base = generation * CAPACITY
            first = 0 if rules.clears_staging or call.op != "multimem" else ranks * max(call.sizes)
            extents[generation] = first, extent_of(call, ranks)
            schedule = multimem if call.op == "multimem" else one_shot
            yield from schedule(rank, ranks, number, call, base, clears, rules)
        yield KernelBoundary(number)


def multimem(rank: int, ranks: int, epoch: int, call: Call, base: int, clears: Sequence[Store], rules: Rules) -> Steps:
    stride = max(call.sizes)

    def staging(owner: int, r: int, i: int) -> tuple[int, str, int]:
        """Return the address of word i of slice r in the staging of ``owner``."""
        return owner, "slots", base + r * stride + i

    def second_shot(owner: int, r: int, i: int) -> tuple[int, str, int]:
        return owner, "slots", base + (ranks + r) * stride + i

    for r in range(ranks):
        for i in range(call.sizes[r]):
            yield Store(staging(rank, r, i), Input(rank, epoch, r * stride + i))
    if rules.fenced:
        yield Fence()
    for owner in range(ranks):
        yield Store((owner, "flags", rank, epoch % rules.flags), epoch)
    yield from clears  # after the fence, which does not order them: they may land at any time in the call
    own_words = range(call.sizes[rank])
    if rules.waits_for_flags and (own_words or rules.owners_of_nothing_wait):
        yield Await(
            {(rank, "flags", r, epoch % rules.flags): epoch if rules.by_epoch else None for r in range(ranks)},
            lambda flag: flag == epoch if rules.by_epoch else flag != NEVER,
        )
    if own_words:
        yield Read({staging(r, rank, i): Input(r, epoch, rank * stride + i) for r in range(ranks) for i in own_words})
    for owner in range(ranks):
        for i in own_words:
            yield Store(second_shot(owner, rank, i), Sum(ranks, epoch, rank * stride + i))
    if rules.clears_own_staging_after_flag:
        for r in range(ranks):
            for i in range(call.sizes[r]):
                yield Store(staging(rank, r, i), SENTINEL)
    yield Await(
        {
            second_shot(rank, r, i): Sum(ranks, epoch, r * stride + i)
            for r in range(ranks)
            for i in range(call.sizes[r])
        },
        arrived,
    )


def one_shot(rank: int, ranks: int, epoch: int, call: Call, base: int, clears: Sequence[Store], rules: Rules) -> Steps:
    """Every rank sends everything to every rank. It finds what multimem left, if that was not cleared."""
    yield from clears
    yield from sentinel.one_shot(rank, ranks, epoch, call, lambda owner, word: (owner, "slots", base + word))


def arrived(word: object) -> bool:
    return word != SENTINEL


def model(ranks: int, calls: Sequence[Call], rules: Rules | None = None, **options: bool) -> Machine:
    rules = rules or Rules()

    def data(rank: int) -> Program:
        return Program(rank, "data", lambda: data_program(rank, ranks, calls, rules))

    programs = [data(rank) for rank in range(ranks)] + header_programs(ranks, calls, rules.headers)
    return Machine(programs, {"slots": SENTINEL, "header": ZERO, "flags": NEVER}, **options)


def calls_of(ranks: int, sizes: Sequence[int] = (2, 1, 1, 2, 1)) -> list[Call]:
    return [Call("multimem", (size,) * ranks) for size in sizes]


def with_empty(ranks: int, calls: int = 5) -> list[Call]:
    """Return calls in which the last rank's slice is empty: it has nothing to load, and no rank waits for it."""
    return [Call("multimem", (1,) * (ranks - 1) + (0,))] * calls


def mixed(ranks: int) -> list[Call]:
    """Return calls in which generations used by multimem come to other operations, and the other way round."""
    sums, single = Call("multimem", (1,) * ranks), Call("one_shot", (1,))
    return [sums, single, sums, single, single, Call("barrier", ()), sums]


@pytest.mark.parametrize("ranks", [2, 3])
def test_protocol_holds(ranks: int, verify) -> None:
    verify(model(ranks, calls_of(ranks) if ranks == 2 else calls_of(ranks, (1,) * 5)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_may_be_empty(ranks: int, verify) -> None:
    verify(model(ranks, with_empty(ranks)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_calls_may_come_between(ranks: int, verify) -> None:
    verify(model(ranks, mixed(ranks)))


def test_the_data_keeps_the_invariant(verify) -> None:
    """The sums depend on every rank's flag, so headers exist to name mismatches and missing ranks."""
    verify(model(2, calls_of(2), Rules(headers=HeaderRules(exchanged=False))))


def test_a_flag_before_its_data_lets_stale_words_be_summed(refute) -> None:
    refute(model(2, calls_of(2), Rules(fenced=False)), Kind.WRONG_VALUE)


def test_without_flags_stale_words_are_summed(refute) -> None:
    refute(model(2, calls_of(2), Rules(waits_for_flags=False)), Kind.WRONG_VALUE)


def test_a_flag_of_another_call_guards_nothing(refute) -> None:
    refute(model(2, calls_of(2), Rules(by_epoch=False)), Kind.WRONG_VALUE)


def test_an_owner_of_nothing_that_waits_misses_flags(refute, verify) -> None:
    """No rank needs this owner to end the call, so its flags are overwritten by those of the next call.

    Two words for a flag, by the parity of the epoch, would suffice: the headers hold every rank back.
    """
    refute(model(2, with_empty(2, 3), Rules(owners_of_nothing_wait=True)), Kind.DEADLOCK)
    verify(model(2, with_empty(2), Rules(owners_of_nothing_wait=True, flags=2)))


def test_clearing_one_generation_ahead_hangs_other_calls(refute, verify) -> None:
    """Sums alone would work with it: a rank sends none before it has the flags of all, which have begun the call."""
    refute(model(2, mixed(2), Rules(clears=1)), Kind.DEADLOCK)
    verify(model(2, calls_of(2), Rules(clears=1)))


def test_never_clearing_reads_old_sums(refute) -> None:
    refute(model(2, calls_of(2), Rules(clears=0)), Kind.WRONG_VALUE)


def test_staging_that_is_left_is_taken_for_data(refute) -> None:
    """A one-shot that comes to the generation three calls later takes it."""
    refute(model(2, mixed(2), Rules(clears_staging=False)), Kind.WRONG_VALUE)


def test_staging_cleared_before_the_sums_are_here_is_summed_as_sentinels(refute) -> None:
    """The other ranks may still read this rank's staging after it has loaded its own slice."""
    refute(model(2, calls_of(2), Rules(clears_own_staging_after_flag=True)), Kind.WRONG_VALUE)
