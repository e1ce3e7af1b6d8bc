"""Random programs of up to eight operations by a communicator, and the same by plain PyTorch on all ranks' values.

Every rank has a few tensors, [N * rows, width] each. A step reads some of them and writes others of the same shape:
results of another shape are repeated, or take the place of the first rows. Values are small whole numbers, so that sums
are exact in every dtype here, whatever their order.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import shotcast
from shotcast import Communicator

Choose = Callable[[int, int], int]
"""``choose(low, high)`` returns a number of that range, both ends included."""
Value = torch.Tensor

SLOTS = 3
DTYPES = (torch.float32, torch.int32, torch.float64, torch.int64, torch.uint8)
KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "all_to_all_uneven",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "batch_send_recv",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "reduce_scatter_coalesced",
    "barrier",
)
REDUCTIONS: dict[str, Callable[[list[Value]], Value]] = {
    "sum": lambda xs: sum(xs[1:], xs[0]),
    "max": lambda xs: torch.stack(xs).amax(0),
    "min": lambda xs: torch.stack(xs).amin(0),
}


@dataclass(frozen=True)
class Step:
    """An operation. ``matrix`` has rows that each rank sends to each; ``messages`` are (from, to, slot, rows)."""

    kind: str
    slot: int
    root: int
    reduction: str
    started: bool
    in_place: bool
    algorithm: str
    stream: int
    matrix: tuple[tuple[int, ...], ...] = ()
    messages: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True)
class Program:
    """The steps, and the first values: ``seed`` fills tensors of ``rows`` and ``width`` in the dtypes of the slots."""

    seed: int
    rows: int
    width: int
    dtypes: tuple[torch.dtype, ...]
    steps: tuple[Step, ...]


def make(size: int, choose: Choose) -> Program:
    """Return a program for ``size`` ranks."""

    def one_of(options: Any) -> Any:
        return options[choose(0, len(options) - 1)]

    rows, width = choose(1, 3), one_of((0, 1, 3, 7, 40, 700))
    steps = []
    for _ in range(choose(1, 8)):
        kind = one_of(KINDS)
        matrix: tuple[tuple[int, ...], ...] = ()
        messages: tuple[tuple[int, int, int, int], ...] = ()
        if kind == "all_to_all_uneven":
            matrix = tuple(tuple(choose(0, rows) for _ in range(size)) for _ in range(size))
        if kind == "batch_send_recv":
            ends = [(choose(0, size - 1), choose(1, size - 1)) for _ in range(choose(0, 5))]
            messages = tuple((a, (a + b) % size, choose(0, SLOTS - 1), choose(0, size * rows)) for a, b in ends)
        vendor = kind not in ("batch_send_recv", "barrier") and choose(0, 9) == 0
        steps.append(
            Step(
                kind,
                choose(0, SLOTS - 1),
                choose(0, size - 1),
                one_of(tuple(REDUCTIONS)),
                bool(choose(0, 1)),
                bool(choose(0, 1)),
                "vendor" if vendor else "auto",
                choose(0, 1),
                matrix,
                messages,
            )
        )
    dtypes = tuple(one_of(DTYPES) for _ in range(SLOTS))
    return Program(choose(0, 1 << 30), rows, width, dtypes, tuple(steps))


def first_values(program: Program, size: int) -> list[list[Value]]:
    """Return the values of all slots, by rank."""
    generator = torch.Generator().manual_seed(program.seed)
    shape = size * program.rows, program.width
    return [[torch.randint(8, shape, generator=generator).to(d) for d in program.dtypes] for _ in range(size)]


def small(x: Value) -> Value:
    """Keep values small, so that the sums of the next steps are exact."""
    return x.remainder(8)


def repeated(part: Value, like: Value) -> Value:
    return part.repeat(len(like) // max(1, len(part)), 1)[: len(like)]


def over_first_rows(rows: Value, x: Value) -> Value:
    return torch.cat([rows, x[len(rows) :]])


def received(x: Value, messages: list[Value]) -> Value:
    """Return ``x`` with each message written over its first rows, in their order, and added to what was there."""
    for message in messages:
        x = torch.cat([small(x[: len(message)] + message), x[len(message) :]])
    return x


# -- plain PyTorch ----------------------------------------------------------------------------------------------------


def expected(step: Step, values: list[list[Value]], rows: int) -> list[list[Value]]:
    """Return the values of all ranks after a step."""
    size, fold = len(values), REDUCTIONS[step.reduction]
    after = [list(slots) for slots in values]
    xs = [slots[step.slot] for slots in values]

    def write(rank: int, value: Value, slot: int = step.slot) -> None:
        after[rank][slot] = small(value)

    for rank in range(size):
        x = xs[rank]
        if step.kind == "all_reduce":
            write(rank, fold(xs))
        elif step.kind == "reduce_scatter":
            write(rank, repeated(fold(xs)[rank * rows : (rank + 1) * rows], x))
        elif step.kind == "all_gather":
            write(rank, torch.cat([one[:rows] for one in xs]))
        elif step.kind == "all_to_all":
            write(rank, torch.cat([one[rank * rows : (rank + 1) * rows] for one in xs]))
        elif step.kind == "all_to_all_uneven":
            parts = [one[: sum(sizes)].split(sizes)[rank] for one, sizes in zip(xs, step.matrix, strict=True)]
            write(rank, over_first_rows(torch.cat(parts), x))
        elif step.kind == "broadcast":
            write(rank, xs[step.root])
        elif step.kind == "reduce":
            write(rank, fold(xs) if rank == step.root else x)
        elif step.kind == "gather":
            write(rank, torch.cat([one[:rows] for one in xs]) if rank == step.root else x)
        elif step.kind == "scatter":
            write(rank, repeated(xs[step.root][rank * rows : (rank + 1) * rows], x))
        elif step.kind == "batch_send_recv":
            came = [values[a][slot][:n].to(x.dtype) for a, b, slot, n in step.messages if b == rank]
            write(rank, received(x, came))
        elif step.kind.endswith("_coalesced"):
            for slot in range(SLOTS):
                every = [slots[slot] for slots in values]
                if step.kind == "all_reduce_coalesced":
                    write(rank, fold(every), slot)
                elif step.kind == "all_gather_coalesced":
                    write(rank, torch.cat([one[:rows] for one in every]), slot)
                else:
                    write(rank, repeated(fold(every)[rank * rows : (rank + 1) * rows], every[rank]), slot)
    return after


def used_by(step: Step) -> set[int]:
    """Return the slots that a step reads or writes on some rank."""
    if step.kind == "barrier":
        return set()
    if step.kind.endswith("_coalesced"):
        return set(range(SLOTS))
    return {step.slot, *(message[2] for message in step.messages)}


# -- a communicator ---------------------------------------------------------------------------------------------------


class Run:
    """A program on one rank. Slots that a started step reads or writes are waited for before they are used again.

    With two communicators, each makes the steps of one stream: what is started by one goes on, in a thread of its own,
    beside the calls of the other.
    """

    def __init__(self, comms: Sequence[Communicator], program: Program, slots: list[Value], streams: list[Any]):
        self.comms, self.comm, self.program, self.streams = comms, comms[0], program, streams
        self.slots: list[Value] = list(slots)
        self.pending: list[tuple[Any, Callable[[Any], None]]] = []
        self.used: set[int] = set()

    def settle(self) -> None:
        for handle, take in self.pending:
            take(handle.wait())
        self.pending, self.used = [], set()

    def call(self, step: Step, name: str, take: Callable[[Any], None], *args: Any, **kwargs: Any) -> None:
        comm = self.comms[step.stream % len(self.comms)]
        if step.started:
            self.pending.append((comm.start(name, *args, **kwargs), take))
        else:
            take(getattr(comm, name)(*args, **kwargs))

    def step(self, step: Step) -> None:
        rows, rank = self.program.rows, self.comm.rank
        if self.used & used_by(step):
            self.settle()
        if step.started:
            self.used |= used_by(step)
        x = self.slots[step.slot]
        how: dict[str, Any] = {"algorithm": step.algorithm}
        reducing = how | {"reduction": step.reduction}

        def write(value: Value, slot: int = step.slot) -> None:
            self.slots[slot] = small(value)

        def write_all(found: list[Value]) -> None:
            for slot, value in enumerate(found):
                write(value if len(value) == len(self.slots[slot]) else repeated(value, self.slots[slot]), slot)

        if step.kind == "all_reduce":
            self.call(step, "all_reduce", write, x, out=x if step.in_place else None, **reducing)
        elif step.kind == "reduce_scatter":
            self.call(step, "reduce_scatter", lambda part: write(repeated(part, x)), x, **reducing)
        elif step.kind == "all_gather":
            out = torch.empty_like(x) if step.in_place else None
            self.call(step, "all_gather", write, x[:rows], out=out, **how)
        elif step.kind == "all_to_all":
            self.call(step, "all_to_all", write, x, **how)
        elif step.kind == "all_to_all_uneven":
            sent, came = list(step.matrix[rank]), [sizes[rank] for sizes in step.matrix]
            sizes = {"input_sizes": sent, "output_sizes": came}
            take = lambda found: write(over_first_rows(found, x))  # noqa: E731
            self.call(step, "all_to_all", take, x[: sum(sent)], **sizes, **how)
        elif step.kind == "broadcast":
            self.call(step, "broadcast", write, x, step.root, **how)
        elif step.kind == "reduce":
            take = lambda found: write(found if rank == step.root else x)  # noqa: E731
            self.call(step, "reduce", take, x, step.root, out=x if step.in_place else None, **reducing)
        elif step.kind == "gather":
            take = lambda found: write(found if rank == step.root else x)  # noqa: E731
            self.call(step, "gather", take, x[:rows], step.root, **how)
        elif step.kind == "scatter":
            whole = None if step.in_place and rank != step.root else x
            out = torch.empty_like(x[:rows]) if step.in_place else None
            self.call(step, "scatter", lambda part: write(repeated(part, x)), whole, step.root, out=out, **how)
        elif step.kind == "batch_send_recv":
            self.batch(step, x)
        elif step.kind == "barrier":
            self.call(step, "barrier", lambda found: None)
        else:
            xs = [slot[:rows] for slot in self.slots] if step.kind == "all_gather_coalesced" else list(self.slots)
            extra = how if step.kind == "all_gather_coalesced" else reducing
            outs = xs if step.in_place and step.kind == "all_reduce_coalesced" else None
            self.call(step, step.kind, write_all, xs, outs, **extra)

    def batch(self, step: Step, x: Value) -> None:
        rank, width = self.comm.rank, self.program.width
        sends = [(self.slots[slot][:n], b) for a, b, slot, n in step.messages if a == rank]
        recvs = [
            (torch.empty(n, width, dtype=self.slots[slot].dtype, device=x.device), a)
            for a, b, slot, n in step.messages
            if b == rank
        ]

        def take(came: list[Value]) -> None:
            self.slots[step.slot] = small(received(x, [one.to(x.dtype) for one in came]))

        self.call(step, "batch_send_recv", take, sends, recvs)

    def whole(self) -> list[Value]:
        """Run all steps, on GPUs on two streams, and return the values of the slots."""
        for step in self.program.steps:
            if self.streams:
                last = torch.cuda.current_stream()
                stream = self.streams[step.stream]
                stream.wait_stream(last)
                with torch.cuda.stream(stream):
                    self.step(step)
                    self.settle()
                last.wait_stream(stream)
                for slot in self.slots:
                    slot.record_stream(last)
                    slot.record_stream(stream)
            else:
                self.step(step)
        self.settle()
        return self.slots


def check(comms: Sequence[Communicator], program: Program) -> None:
    """Run a program, and compare every slot of this rank, bit by bit, with plain PyTorch."""
    comm = comms[0]
    values = first_values(program, comm.world_size)
    on_gpu = comm.device.type == "cuda"
    streams = [torch.cuda.Stream(comm.device) for _ in range(2)] if on_gpu else []
    found = Run(comms, program, [x.to(comm.device, copy=True) for x in values[comm.rank]], streams).whole()
    for step in program.steps:
        values = expected(step, values, program.rows)
    for slot, (x, wanted) in enumerate(zip(found, values[comm.rank], strict=True)):
        assert torch.equal(x.cpu(), wanted), (slot, program)
    for one in comms:
        one.check()


@contextlib.contextmanager
def communicators(device: str, timeout_s: float) -> Iterator[list[Communicator]]:
    """Make a communicator, and for compiled CPU ranks another one; kernels are interpreted in one thread alone."""
    with contextlib.ExitStack() as stack:
        comms = [stack.enter_context(shotcast.Communicator(device=device, timeout_s=timeout_s))]
        if comms[0].topology.transport.name == "compiled":
            other = comms[0].split(0)
            assert other is not None
            comms.append(stack.enter_context(other))
        yield comms


def one_program(program: Program) -> None:
    """Check a program on CPU ranks."""
    with communicators("cpu", 20) as comms:
        check(comms, program)


def many_programs(seed: int, count: int, device: str = "cpu") -> int:
    """Check ``count`` random programs by the same communicators. Return how many steps they had."""
    steps = 0
    with communicators(device, 60) as comms:
        for number in range(seed, seed + count):
            program = make(comms[0].world_size, random.Random(number).randint)
            check(comms, program)
            steps += len(program.steps)
    return steps
