"""The words that ranks exchange in the models, and the header exchange that every call performs beside its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .machine import Await, KernelBoundary, Program, Start, Steps, Store


class Input(NamedTuple):
    """Word ``index`` of the input of ``rank`` to call ``epoch``."""

    rank: int
    epoch: int
    index: int


class Sum(NamedTuple):
    """Word ``index`` of the sum over the first ``terms`` ranks on the way; over all of them once it is complete."""

    terms: int
    epoch: int
    index: int


SENTINEL = "sentinel"


class Header(NamedTuple):
    """A word of a header: the low bits of the epoch, and the call's fingerprint (op, dtype, root, nbytes, ...)."""

    epoch: int
    fingerprint: str


UNTAGGED = -1
"""The epoch of a word that does not carry it."""
ZERO = Header(0, "")
"""A header cell as memory is initially, and after a reset. No call's fingerprint is empty: operations count from 1."""


@dataclass(frozen=True)
class Call:
    """One collective call. ``sizes[r]`` is the number of words of slice r.

    In an all-gather, slice r is the part of rank r. A broadcast has one slice, its whole message. With ``multicast``,
    the root of a broadcast sends to itself too.
    """

    op: str
    sizes: tuple[int, ...]
    root: int = 0
    multicast: bool = False

    @property
    def fingerprint(self) -> str:
        return f"{self.op}{self.sizes} root {self.root}"

    @property
    def words(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class HeaderRules:
    """The guards of the header exchange. Each of them can be removed."""

    exchanged: bool = True
    words: int = 1  # of a header, each stored for itself; kernels have two
    all_tagged: bool = True  # False: only the first word carries the epoch
    cells: int = 2  # by epoch parity
    by_epoch: bool = True  # False: any header will do
    or_later: bool = False  # a header of this epoch *or a later one* will do
    zero_ignored: bool = True  # False: a cell never written may count as a header, of epoch 0
    epoch_values: int = 1 << 16  # the header carries the epoch modulo this
    first_epoch: int = 1

    def word(self, epoch: int, call: Call) -> Header:
        return Header(epoch % self.epoch_values, call.fingerprint)

    def came(self, word: Any, own_header: Header) -> bool:
        """Return whether ``word`` is a peer's header of the call of ``own_header``, equal to it or not."""
        if word == ZERO and (self.zero_ignored or not self.by_epoch):
            return False
        if not self.by_epoch or word.epoch == UNTAGGED:
            return True
        return word.epoch >= own_header.epoch if self.or_later else word.epoch == own_header.epoch


def header_program(rank: int, ranks: int, calls: Sequence[Call], rules: HeaderRules) -> Steps:
    """Send this rank's header to every peer, and end once every peer has sent the same header."""
    peers = [peer for peer in range(ranks) if peer != rank]
    for number, call in enumerate(calls):
        epoch = rules.first_epoch + number
        own_header = rules.word(epoch, call)
        yield Start(number)
        later = own_header if rules.all_tagged else own_header._replace(epoch=UNTAGGED)
        words = [own_header] + [later] * (rules.words - 1)

        def cells(owner: int, sender: int, epoch: int = epoch, words: Sequence[Header] = words) -> dict[Any, Header]:
            cell = owner, "header", sender, epoch % rules.cells
            return {(*cell, *(() if i == 0 else (i,))): word for i, word in enumerate(words)}

        for peer in peers:
            for cell, word in cells(peer, rank).items():
                yield Store(cell, word)
        yield Await(
            {cell: word for peer in peers for cell, word in cells(rank, peer).items()},
            lambda word, own_header=own_header: rules.came(word, own_header),
        )
        yield KernelBoundary(number)


def header_programs(ranks: int, calls: Sequence[Call], rules: HeaderRules) -> list[Program]:
    def program(rank: int) -> Program:
        return Program(rank, "header", lambda: header_program(rank, ranks, calls, rules))

    return [program(rank) for rank in range(ranks)] if rules.exchanged else []
