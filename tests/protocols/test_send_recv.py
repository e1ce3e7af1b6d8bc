"""Send and receive: a mailbox of two slots between a sender and a receiver, and credits that flow back.

On GPUs the mailbox lies at the receiver, and a chunk consists of flag cells that carry its number. Each message also
has a header, in one of a few cells that take turns, which the receiver compares with its own. On CPUs the mailbox lies
at the sender: data, then a counter that the receiver acquires before it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from .explore import Kind
from .machine import Await, Fence, KernelBoundary, Machine, Program, Read, Start, Steps, Store
from .words import ZERO, Header

SLOTS = 2
WORDS = 2


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    credits: bool = True  # False: the sender does not wait for credits_cell
    copied_first: bool = True  # False: the receiver acknowledges a chunk before it has copied it
    released: bool = True  # False (CPU): the counter may be seen before the data
    numbered: bool = True  # False (GPU): any flag but 0 will do
    headers: bool = True
    header_credits: bool = True  # False: the sender does not wait until an earlier header has been read
    header_cells: int = 2
    header_words: int = 1  # each stored for itself; kernels have two
    first_message: int = 1
    zero_ignored: bool = True  # False: a header cell never written counts as that of message 0


Messages = Sequence[tuple[int, int, int]]
"""Messages as (sender, receiver, chunks), in the order in which both ranks make the calls."""


def chunks_of(messages: Messages, number: int) -> range:
    """Return the numbers of a message's chunks among all chunks from its sender to its receiver."""
    start = sum(m[2] for m in messages[:number] if m[:2] == messages[number][:2])
    return range(start, start + messages[number][2])


# -- GPU: push -------------------------------------------------------------------------------------------------------


def gpu_data_program(rank: int, messages: Messages, rules: Rules) -> Steps:
    for number, (sender, receiver, _) in enumerate(messages):
        if rank not in (sender, receiver):
            continue
        yield Start(number)
        for chunk in chunks_of(messages, number):
            slot = {(receiver, "mailbox", sender, chunk % SLOTS, i): (sender, chunk, i) for i in range(WORDS)}
            if rank == sender:
                if rules.credits:
                    credits_cell = (sender, "credits", receiver)
                    yield Await({credits_cell: None}, lambda taken, chunk=chunk: taken >= chunk - SLOTS + 1)
                for address, word in slot.items():
                    yield Store(address, word)
            else:
                credit = Store((sender, "credits", receiver), chunk + 1)
                if not rules.copied_first:
                    yield credit
                if rules.numbered:
                    yield Await(slot, lambda cell, chunk=chunk: cell is not None and cell[1] == chunk)
                else:
                    yield Await(slot, lambda cell: cell is not None)
                if rules.copied_first:
                    yield credit
        yield KernelBoundary(number)


def gpu_header_program(rank: int, messages: Messages, rules: Rules) -> Steps:
    counts: dict[tuple[int, int], int] = {}
    for number, (sender, receiver, chunks) in enumerate(messages):
        if rank not in (sender, receiver):
            continue
        message = counts[sender, receiver] = counts.get((sender, receiver), rules.first_message - 1) + 1
        own_header = Header(message, f"{chunks} chunks")
        cell = receiver, "header", sender, message % rules.header_cells
        cells = {(*cell, *(() if i == 0 else (i,))): own_header for i in range(rules.header_words)}
        receives_begun_cell = sender, "receives_begun_cell", receiver
        yield Start(number)
        if rank == sender:
            if rules.header_credits:
                yield Await(
                    {receives_begun_cell: None}, lambda count, message=message: count > message - rules.header_cells
                )
            for address, word in cells.items():
                yield Store(address, word)
        else:
            yield Await(
                cells,
                lambda word, own_header=own_header: (
                    word.epoch == own_header.epoch and (word != ZERO or not rules.zero_ignored)
                ),
            )
            yield Store(receives_begun_cell, message + 1)
        yield KernelBoundary(number)


def gpu_model(ranks: int, messages: Messages, rules: Rules | None = None, **options: bool) -> Machine:
    rules = rules or Rules()

    def programs(rank: int) -> list[Program]:
        data = Program(rank, "data", lambda: gpu_data_program(rank, messages, rules))
        header = Program(rank, "header", lambda: gpu_header_program(rank, messages, rules))
        return [data, header] if rules.headers else [data]

    all_programs = [program for rank in range(ranks) for program in programs(rank)]
    return Machine(all_programs, gpu_memory(rules), check_starts=False, **options)


def gpu_memory(rules: Rules) -> dict[str, Any]:
    return {"mailbox": None, "credits": 0, "header": ZERO, "receives_begun_cell": rules.first_message}


# -- CPU: pull -------------------------------------------------------------------------------------------------------


def cpu_program(rank: int, messages: Messages, rules: Rules) -> Steps:
    for number, (sender, receiver, _) in enumerate(messages):
        if rank not in (sender, receiver):
            continue
        for chunk in chunks_of(messages, number):
            slot = {(sender, "mailbox", receiver, chunk % SLOTS, i): (sender, chunk, i) for i in range(WORDS)}
            if rank == sender:
                if rules.credits:
                    credits_cell = (receiver, "received", sender)
                    yield Await({credits_cell: None}, lambda taken, chunk=chunk: taken >= chunk - SLOTS + 1)
                for address, word in slot.items():
                    yield Store(address, word)
                if rules.released:
                    yield Fence()
                yield Store((sender, "sent", receiver), chunk + 1)
            else:
                yield Await({(sender, "sent", receiver): None}, lambda sent, chunk=chunk: sent > chunk)
                credit = Store((receiver, "received", sender), chunk + 1)
                if not rules.copied_first:
                    yield credit
                yield Read(slot)
                if rules.copied_first:
                    yield credit


def cpu_model(ranks: int, messages: Messages, rules: Rules | None = None, **options: bool) -> Machine:
    rules = rules or Rules()

    def program(rank: int) -> Program:
        return Program(rank, "", lambda: cpu_program(rank, messages, rules))

    initial_words = {"mailbox": None, "sent": 0, "received": 0}
    return Machine([program(rank) for rank in range(ranks)], initial_words, check_starts=False, **options)


MODELS = pytest.mark.parametrize("model", [gpu_model, cpu_model])
STREAM: Messages = [(0, 1, chunks) for chunks in (1, 2, 1, 3, 1)]
"""Five messages one way, of eight chunks in all."""
SHORT: Messages = [(0, 1, 0)] * 5
"""Five messages of headers alone, as if there were always room for their chunks."""


@MODELS
def test_protocol_holds(model, verify) -> None:
    verify(model(2, STREAM))


@MODELS
def test_both_ways_and_past_a_third_rank(model, verify) -> None:
    verify(model(2, [(0, 1, 2), (1, 0, 2), (0, 1, 1), (1, 0, 1), (0, 1, 2)]))
    verify(model(3, [(0, 1, 2), (1, 2, 2), (2, 0, 1), (0, 1, 2), (1, 2, 2)]))


@MODELS
def test_without_credits_chunks_overwrite_each_other(model, refute) -> None:
    refute(model(2, STREAM, Rules(credits=False)), Kind.WRONG_VALUE, Kind.DEADLOCK)


@MODELS
def test_acknowledging_before_having_copied_is_wrong(model, refute) -> None:
    refute(model(2, STREAM, Rules(copied_first=False)), Kind.WRONG_VALUE, Kind.DEADLOCK)


def test_a_counter_without_release_shows_unwritten_data(refute) -> None:
    refute(cpu_model(2, STREAM, Rules(released=False)), Kind.WRONG_VALUE)


def test_cells_without_chunk_numbers_are_read_twice(refute) -> None:
    refute(gpu_model(2, STREAM, Rules(numbered=False)), Kind.WRONG_VALUE)


def test_data_is_right_without_headers(verify) -> None:
    """Numbers and credits carry the data; headers exist to name mismatches."""
    verify(gpu_model(2, STREAM, Rules(headers=False)))


@pytest.mark.parametrize("cells", [1, 2, 3])
def test_headers_sent_without_waiting_overwrite_each_other(cells: int, refute, verify) -> None:
    refute(gpu_model(2, SHORT, Rules(header_cells=cells, header_credits=False)), Kind.DEADLOCK, Kind.WRONG_VALUE)
    verify(gpu_model(2, SHORT, Rules(header_cells=cells)))


def test_a_header_cell_never_written_must_not_count_as_that_of_message_zero(refute, verify) -> None:
    refute(gpu_model(2, STREAM, Rules(first_message=0, zero_ignored=False)), Kind.WRONG_VALUE)
    verify(gpu_model(2, STREAM, Rules(first_message=0)))
    verify(gpu_model(2, STREAM, Rules(first_message=1, zero_ignored=False)))


def crossed(model: Callable[..., Machine], messages: int, chunks: int) -> Machine:
    """Return a model in which both ranks send first, and then receive."""

    def messages_of(rank: int) -> Messages:
        return [(rank, 1 - rank, chunks)] * messages + [(1 - rank, rank, chunks)] * messages

    memory = gpu_memory(Rules()) if model is gpu_model else {"mailbox": None, "sent": 0, "received": 0}
    programs = [program for rank in (0, 1) for program in model(2, messages_of(rank)).programs if program.rank == rank]
    return Machine(programs, memory, check_starts=False)


@MODELS
@pytest.mark.parametrize(("messages", "chunks"), [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3)])
def test_two_ranks_that_both_send_first(model, messages: int, chunks: int, verify, refute) -> None:
    """The ranks proceed as far as the mailbox has room; beyond it, the caller has made a deadlock."""
    machine = crossed(model, messages, chunks)
    if messages * chunks <= SLOTS:
        verify(machine)
    else:
        refute(machine, Kind.DEADLOCK)
