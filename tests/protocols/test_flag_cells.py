"""Flag cells (LL): eight bytes, four of data and four of epoch, stored at once. Two generations, never cleared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from .explore import Kind
from .machine import Await, KernelBoundary, Machine, Program, Read, Start, Steps, Store
from .words import ZERO, Call, HeaderRules, Input, Sum, header_programs

STRIDE = 100
"""Cells of each rank: enough for any call here."""


class Cell(NamedTuple):
    data: Input | Sum | None
    flag: int


HEADERS = HeaderRules()


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    generations: int = 2
    by_epoch: bool = True  # False: any flag but 0 will do
    or_later: bool = False  # a flag of this epoch or a later one will do
    whole: bool = True  # False: data and flag are two stores
    flag_values: int = 1 << 32
    first_flag: int = -1  # the flag of cells never written; zeroed memory has 0
    first_epoch: int = 1
    headers: HeaderRules = HEADERS


def data_program(rank: int, ranks: int, calls: Sequence[Call], rules: Rules) -> Steps:
    """A one-shot reduction or all-gather ("all_gather": part r comes from rank r), a two-shot, or a broadcast."""
    for number, call in enumerate(calls):
        epoch = rules.first_epoch + number
        generation, flag = epoch % rules.generations, epoch % rules.flag_values
        senders = [call.root] if call.op == "broadcast" else list(range(ranks))
        yield Start(number)
        if call.op == "two_shot":
            yield from two_shot(rank, ranks, number, call, generation, flag)
            yield KernelBoundary(number)
            continue
        for owner in range(ranks):
            for i in range(call.words if rank in senders else 0):
                address = owner, "cells", generation, rank * STRIDE + i
                if rules.whole:
                    yield Store(address, Cell(Input(rank, number, i), flag))
                else:
                    yield Store((owner, "data", *address[2:]), Input(rank, number, i))
                    yield Store(address, Cell(None, flag))
        expected_words = [(sender, i) for sender in senders for i in range(call.words)]

        def arrived(cell: Any, flag: int = flag) -> bool:
            if not rules.by_epoch:
                return cell.flag > 0
            return cell.flag >= flag if rules.or_later else cell.flag == flag

        yield Await(
            {
                (rank, "cells", generation, s * STRIDE + i): Cell(Input(s, number, i) if rules.whole else None, flag)
                for s, i in expected_words
            },
            arrived,
        )
        if not rules.whole:
            yield Read({(rank, "data", generation, s * STRIDE + i): Input(s, number, i) for s, i in expected_words})
        yield KernelBoundary(number)


def two_shot(rank: int, ranks: int, number: int, call: Call, generation: int, flag: int) -> Steps:
    """Slice r of every rank goes to rank r; then the reduced slices, to cells of their own at all ranks."""
    width = max(call.sizes)

    def address(owner: int, sender: int, i: int) -> tuple[int, str, int, int]:
        return owner, "cells", generation, sender * STRIDE + i

    def arrived(cell: Any) -> bool:
        return cell.flag == flag

    for owner in range(ranks):
        for i in range(call.sizes[owner]):
            yield Store(address(owner, rank, i), Cell(Input(rank, number, owner * width + i), flag))
    own = {
        address(rank, r, i): Cell(Input(r, number, rank * width + i), flag)
        for r in range(ranks)
        for i in range(call.sizes[rank])
    }
    if own:
        yield Await(own, arrived)
    for owner in range(ranks):
        for i in range(call.sizes[rank]):
            yield Store(address(owner, ranks + rank, i), Cell(Sum(ranks, number, rank * width + i), flag))
    results = {
        address(rank, ranks + r, i): Cell(Sum(ranks, number, r * width + i), flag)
        for r in range(ranks)
        for i in range(call.sizes[r])
    }
    yield Await(results, arrived)


def model(ranks: int, calls: Sequence[Call], rules: Rules | None = None, **options: bool) -> Machine:
    rules = rules or Rules()

    def data(rank: int) -> Program:
        return Program(rank, "data", lambda: data_program(rank, ranks, calls, rules))

    programs = [data(rank) for rank in range(ranks)] + header_programs(ranks, calls, rules.headers)
    return Machine(programs, {"cells": Cell(None, rules.first_flag), "data": None, "header": ZERO}, **options)


def calls_of(op: str, sizes: Sequence[int] = (2, 1, 1, 2, 1)) -> list[Call]:
    return [Call(op, (size,)) for size in sizes]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", ["all_gather", "broadcast"])
def test_protocol_holds(op: str, ranks: int, verify) -> None:
    verify(model(ranks, calls_of(op)))


def test_two_shots_hold(verify) -> None:
    """Slices may be shorter, or empty."""
    verify(model(2, [Call("two_shot", sizes) for sizes in ((1, 1), (1, 0), (2, 1), (1, 1))]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_operations_may_follow_each_other(ranks: int, verify) -> None:
    calls = [
        Call("all_gather", (1,)),
        Call("broadcast", (2,)),
        Call("broadcast", (1,), root=1),
        Call("all_gather", (2,)),
    ]
    verify(model(ranks, [*calls, calls[1]]))


@pytest.mark.parametrize("or_later", [False, True])
def test_one_generation_is_overwritten(or_later: bool, refute) -> None:
    """A peer that is one call ahead stores into the cell that is still being polled."""
    kind = Kind.WRONG_VALUE if or_later else Kind.DEADLOCK
    refute(model(2, calls_of("all_gather", (1,) * 4), Rules(generations=1, or_later=or_later)), kind)


@pytest.mark.parametrize("ranks", [2, 3])
def test_polling_without_the_epoch_reads_old_words(ranks: int, refute) -> None:
    refute(model(ranks, calls_of("all_gather"), Rules(by_epoch=False)), Kind.WRONG_VALUE)


def test_a_cell_stored_in_two_halves_is_read_torn(refute) -> None:
    refute(model(2, calls_of("all_gather"), Rules(whole=False)), Kind.WRONG_VALUE)


def test_broadcast_needs_headers(refute) -> None:
    rules = Rules(headers=HeaderRules(exchanged=False))
    refute(model(2, calls_of("broadcast"), rules), Kind.EARLY_FINISH)
    refute(model(2, calls_of("broadcast"), rules, check_starts=False), Kind.WRONG_VALUE, Kind.DEADLOCK)


def test_a_cell_untouched_until_its_flag_comes_around_is_taken_for_new(refute, verify) -> None:
    """The known limit is a flag of 32 bits, and a cell untouched for exactly 2**32 calls. Here, 2 bits and 4 calls."""
    refute(model(2, calls_of("all_gather", (2, 1, 1, 1, 2)), Rules(flag_values=4)), Kind.WRONG_VALUE)
    verify(model(2, calls_of("all_gather", (2, 1, 2, 1, 2)), Rules(flag_values=4)))


def test_a_cell_never_written_must_not_carry_the_flag_of_an_epoch(refute, verify) -> None:
    """Zeroed cells carry flag 0, which is wrong at epoch 0, and again when the 32 bits wrap.

    Cells that were cleared to the epoch before the first are as safe as any untouched ones.
    """
    calls = calls_of("all_gather", (1, 1, 2))
    verify(model(2, calls, Rules(first_flag=0, first_epoch=1)))
    refute(model(2, calls, Rules(first_flag=0, first_epoch=0)), Kind.WRONG_VALUE)
    refute(model(2, calls, Rules(first_flag=0, first_epoch=2, flag_values=4)), Kind.WRONG_VALUE)
    verify(model(2, calls, Rules(first_flag=1, first_epoch=2, flag_values=4)))
