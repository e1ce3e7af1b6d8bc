"""What the words that ranks exchange stand for, and the header exchange that every call makes beside its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .machine import Await, KernelBoundary, Program, Start, Steps, Store


class Input(NamedTuple):
    """Word ``index`` of what ``rank`` brings to call ``epoch``."""

    rank: int
    epoch: int
    index: int


class Sum(NamedTuple):
    """The sum over the first ``terms`` ranks on the way (all of them, if it is done) of word ``index``."""

    terms: int
    epoch: int
    index: int


SENTINEL = "sentinel"


class Header(NamedTuple):
    """A header word: low bits of the epoch, and the call's fingerprint (op, dtype, algorithm, root, nbytes)."""

    epoch: int
    fingerprint: str


ZERO = Header(0, "")
"""A header cell as memory is at first, and after a reset. No call's fingerprint is empty: operations count from 1."""


@dataclass(frozen=True)
class Call:
    """One collective call. ``sizes[r]`` are the words of slice r (of rank r's part, of a broadcast's only part)."""

    op: str
    sizes: tuple[int, ...]
    root: int = 0

    @property
    def fingerprint(self) -> str:
        return f"{self.op}{self.sizes} root {self.root}"

    @property
    def words(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class HeaderRules:
    """The guards of the header exchange, each of which can be taken away."""

    exchanged: bool = True
    cells: int = 2  # by epoch parity
    by_epoch: bool = True  # False: any header will do
    or_later: bool = False  # a header of this epoch *or a later one* will do
    zero_ignored: bool = True  # False: a cell never written may count as a header, of epoch 0
    epoch_values: int = 1 << 16  # the header carries the epoch modulo this
    first_epoch: int = 1

    def word(self, epoch: int, call: Call) -> Header:
        return Header(epoch % self.epoch_values, call.fingerprint)

    def came(self, word: Any, mine: Header) -> bool:
        """Whether this is a peer's header of the call that ``mine`` is of, equal or not."""
        if word == ZERO and (self.zero_ignored or not self.by_epoch):
            return False
        if not self.by_epoch:
            return True
        return word.epoch >= mine.epoch if self.or_later else word.epoch == mine.epoch


def header_program(rank: int, ranks: int, calls: Sequence[Call], rules: HeaderRules) -> Steps:
    """Beside the data: tell every peer what I call, and end once every peer has told me that it calls the same."""
    peers = [peer for peer in range(ranks) if peer != rank]
    for number, call in enumerate(calls):
        epoch = rules.first_epoch + number
        mine = rules.word(epoch, call)
        yield Start(number)
        for peer in peers:
            yield Store((peer, "header", rank, epoch % rules.cells), mine)
        yield Await(
            {(rank, "header", peer, epoch % rules.cells): mine for peer in peers},
            lambda word, mine=mine: rules.came(word, mine),
        )
        yield KernelBoundary(number)


def header_programs(ranks: int, calls: Sequence[Call], rules: HeaderRules) -> list[Program]:
    def program(rank: int) -> Program:
        return Program(rank, "header", lambda: header_program(rank, ranks, calls, rules))

    return [program(rank) for rank in range(ranks)] if rules.exchanged else []
