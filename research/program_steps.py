"""Programs of torch.distributed as data, and the rules that make them legal.

A program is one sequence of steps for all ranks. Each rank makes the steps that concern it, in this order: those of its
groups, and those that name it. It has tensors (*slots*) of one shape on all ranks, which calls read and write from the
front. Values are small whole numbers, or halves of them, so that sums are exact in every dtype and order.

*Legal* means that NCCL or Gloo end it, with one right result. :func:`check` is the statement of the rules:

- All ranks of a group issue its calls in one order, and calls of overlapping groups come in one order on all ranks,
  that of the program. A wait comes after its call, and a call of several ranks is one step for all of them. So a rank
  that waits always waits for steps that come before its own place, and no cycle of waits exists.
- A message is one step of its sender and its receiver. Messages that go both ways at once are a batch.
- No step touches a slot while a call that was issued with it is under way on some rank: the call has been waited for by
  all ranks first. Slots of another group's call count alike.
- A stream that uses a slot first waits for the stream that used it last (the ranks see to that). Calls of one group on
  several streams need no more: libraries order them as the host issues them, replays of graphs too.
- At most four groups have asynchronous calls under way on GPUs, since each call of NCCL holds SMs while it waits;
  collective calls and messages of a group count apart.
- What a graph captures has been made eagerly before, waits for all it starts, and has neither barriers nor sleeps of
  the host. A batch of messages concerns all ranks of its group where the library wants that of a first call (GPUs).
- No result is read that the library leaves open (what ``reduce`` does to the tensors of other ranks than the root), and
  no sum needs more digits than its dtype has.
- Each library has its reductions: averages and factors exist on GPUs alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

EXACT = {
    "float32": 1 << 24,
    "bfloat16": 1 << 8,
    "float16": 1 << 11,
    "float64": 1 << 40,
    "int32": (1 << 31) - 1,
    "int64": 1 << 40,
    "uint8": (1 << 8) - 1,
}
"""The dtypes, and up to where they represent every whole number."""

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int32": 4, "int64": 8, "uint8": 1}
SMALL = 5
"""First values and values of fills are below this number."""
STREAMS = 3
"""Streams of a GPU; the first is the one that PyTorch begins with."""
GROUPS_UNDER_WAY = 4
REDUCTIONS = {"cpu": ("sum", "max", "min", "product"), "cuda": ("sum", "max", "min", "product", "avg", "premul")}
FACTOR = 2.0
"""The factor of ``premul``."""

REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_coalesced", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
COALESCED = ("all_reduce_coalesced", "all_gather_coalesced", "reduce_scatter_coalesced")
OPS = (*REDUCING, "broadcast", "gather", "scatter", "all_gather", "all_gather_list", "all_gather_coalesced")
OPS = (*OPS, "all_to_all", "all_to_all_uneven", "barrier")


class IllegalError(ValueError):
    """A step breaks a rule.

    Attributes:
        slot: a fill of this slot would help.
        label: a wait for this call would.
    """

    def __init__(self, why: str, slot: int | None = None, label: int = 0):
        super().__init__(why)
        self.slot, self.label = slot, label


class Readable:
    """Data that prints as the expression that makes it, without what has its default."""

    def __repr__(self) -> str:
        fields = [field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{one.name}={getattr(self, one.name)!r}' for one in fields)})"


@dataclass(frozen=True, repr=False)
class Slot(Readable):
    """A tensor of every rank."""

    elements: int
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return self.elements * WIDTH[self.dtype]


@dataclass(frozen=True, repr=False)
class Group(Readable):
    """A process group. Copy 0 of all ranks is the one that ``init_process_group`` makes."""

    ranks: tuple[int, ...]
    copy: int = 0


@dataclass(frozen=True, repr=False)
class Collective(Readable):
    """A collective call.

    Attributes:
        op: one of :data:`OPS`.
        group: its number in the program.
        slots: the tensor of a call in place; else the input and the output. Coalesced calls have several of these.
        elements: of the tensor, or of the part of each rank.
        reduction: one of :data:`REDUCTIONS`.
        root: the rank in the group.
        sizes: the elements that each rank sends to each, for uneven parts.
        label: of an asynchronous call, for its wait; 0 if the call is synchronous.
        stream: the current one.
        keep: compare the result as it is right after the call.
    """

    op: str
    group: int = 0
    slots: tuple[int, ...] = ()
    elements: int = 0
    reduction: str = ""
    root: int = 0
    sizes: tuple[tuple[int, ...], ...] = ()
    label: int = 0
    stream: int = 0
    keep: bool = False


@dataclass(frozen=True, repr=False)
class Messages(Readable):
    """Messages from rank to rank of a group; each sends the part of the receiver to the part of the sender.

    Attributes:
        form: ``alone`` (send and recv, or isend and irecv if it has a label) or ``batch`` (batch_isend_irecv).
        pairs: senders and receivers.
        slots: the one that is sent, and the one that is written.
        elements: of each message.
    """

    form: str
    pairs: tuple[tuple[int, int], ...]
    group: int = 0
    slots: tuple[int, ...] = ()
    elements: int = 0
    label: int = 0
    stream: int = 0
    keep: bool = False


@dataclass(frozen=True, repr=False)
class Wait(Readable):
    """Wait for a call, on one rank or on all that have not yet done so (-1)."""

    label: int
    rank: int = -1
    stream: int = 0
    keep: bool = False


@dataclass(frozen=True, repr=False)
class Fill(Readable):
    """Fill a slot with a pattern that the value picks."""

    slot: int
    value: int = 0
    stream: int = 0


@dataclass(frozen=True, repr=False)
class Shorten(Readable):
    """Make the values of a slot whole and small."""

    slot: int
    stream: int = 0


@dataclass(frozen=True, repr=False)
class Product(Readable):
    """Multiply two square matrices of bfloat16 (float32 on CPUs)."""

    size: int
    stream: int = 0


@dataclass(frozen=True, repr=False)
class StreamSleep(Readable):
    """Keep a stream of one rank's GPU busy."""

    rank: int
    cycles: int
    stream: int = 0


@dataclass(frozen=True, repr=False)
class HostSleep(Readable):
    """Let one rank be late."""

    rank: int
    ms: float


@dataclass(frozen=True, repr=False)
class Capture(Readable):
    """Make steps once, and then capture them in a graph of that number."""

    graph: int
    steps: tuple[Any, ...]


@dataclass(frozen=True, repr=False)
class Replay(Readable):
    """Replay a graph."""

    graph: int
    stream: int = 0
    keep: bool = False


Step = Collective | Messages | Wait | Fill | Shorten | Product | StreamSleep | HostSleep | Capture | Replay


@dataclass(frozen=True, repr=False)
class Program(Readable):
    """A program for ``world_size`` ranks on CPUs (``cpu``) or GPUs (``cuda``)."""

    device: str
    world_size: int
    groups: tuple[Group, ...]
    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]

    def text(self) -> str:
        """Return the program as Python, a step a line."""
        lines = ["Program("]
        for name in ("device", "world_size", "groups", "slots"):
            lines.append(f"    {name}={getattr(self, name)!r},")
        return "\n".join([*lines, "    steps=(", *(f"        {step!r}," for step in self.steps), "    ),", ")"])


def read(text: str) -> Program:
    """Return the program of a text that :meth:`Program.text` made."""
    names = (Program, Slot, Group, Collective, Messages, Wait, Fill, Shorten, Product, StreamSleep, HostSleep)
    made = eval(text, {"__builtins__": {}} | {one.__name__: one for one in (*names, Capture, Replay)})
    if not isinstance(made, Program):
        raise TypeError(f"this is no Program: {text[:80]}")
    return made


def every_step(steps: Sequence[Step]) -> Iterator[Step]:
    """Return the steps, and those of graphs behind their capture."""
    for step in steps:
        yield step
        if isinstance(step, Capture):
            yield from step.steps


def written(step: Step, steps: Sequence[Step]) -> tuple[int, ...]:
    """Return the slots that hold results when a step is over; ``steps`` has calls that it waits for, and captures."""
    if isinstance(step, Wait):
        call = next(one for one in every_step(steps) if getattr(one, "label", 0) == step.label)
        return written(call, steps)
    if isinstance(step, Replay):
        capture = next(one for one in steps if isinstance(one, Capture) and one.graph == step.graph)
        inner = [written(one, capture.steps) for one in capture.steps if isinstance(one, Collective | Messages)]
        return tuple(sorted({slot for slots in inner for slot in slots}))
    if isinstance(step, Messages):
        return step.slots[1:]
    if isinstance(step, Collective):
        if step.op in ("all_gather_coalesced", "reduce_scatter_coalesced"):
            return step.slots[1::2]
        return (
            step.slots[:1]
            if step.op in ("broadcast", "reduce", "all_reduce")
            else (step.slots if step.op == "all_reduce_coalesced" else step.slots[1:])
        )
    return ()


@dataclass(frozen=True)
class Content:
    """The knowledge of a slot.

    Attributes:
        ranks: those on which its values are known.
        bound: no value is larger.
        halves: how often values may be halved: they are multiples of one over two to this power.
        label: of the call that is under way with it; 0 if there is none.
    """

    ranks: frozenset[int]
    bound: int = SMALL - 1
    halves: int = 0
    label: int = 0


class Rules:
    """The state of a program as far as its rules need it, step by step."""

    def __init__(self, device: str, world_size: int, groups: Sequence[Group], slots: Sequence[Slot]):
        self.device, self.world_size, self.groups, self.slots = device, world_size, groups, slots
        self.all = frozenset(range(world_size))
        self.contents = [Content(self.all) for _ in slots]
        self.under_way: dict[int, tuple[frozenset[int], Collective | Messages]] = {}  # who has yet to wait
        self.labels: set[int] = set()
        self.graphs: dict[int, Capture] = {}
        self.captures = False
        for group in groups:
            self.need(bool(group.ranks) and set(group.ranks) <= self.all, f"{group} has other ranks")
            self.need(list(group.ranks) == sorted(set(group.ranks)), f"{group} is not in order")
        for slot in slots:
            self.need(slot.elements > 0 and slot.dtype in EXACT, f"{slot} is empty or of another dtype")

    def copy(self) -> Rules:
        other = object.__new__(Rules)
        other.__dict__.update(self.__dict__)
        other.contents, other.under_way = list(self.contents), dict(self.under_way)
        other.labels, other.graphs = set(self.labels), dict(self.graphs)
        return other

    def need(self, holds: bool, why: str, slot: int | None = None, label: int = 0) -> None:
        if not holds:
            raise IllegalError(why, slot, label)

    # -- steps --------------------------------------------------------------------------------------------------------

    def apply(self, step: Step) -> None:
        """Go on by a step. Raises IllegalError, and the state is of no use then."""
        stream = getattr(step, "stream", 0)
        self.need(0 <= stream < (STREAMS if self.device == "cuda" else 1), "there is no such stream")
        self.need(not self.captures or not (stream or getattr(step, "keep", False)), "a graph has one stream")
        getattr(self, type(step).__name__)(step)

    def Fill(self, step: Fill) -> None:  # noqa: N802 - as the steps are called
        self.free(step.slot)
        self.contents[step.slot] = Content(self.all)

    def Shorten(self, step: Shorten) -> None:  # noqa: N802
        self.free(step.slot)
        content = self.contents[step.slot]
        self.need(content.ranks == self.all, "values of it are open", step.slot)
        self.contents[step.slot] = replace(content, bound=min(content.bound, SMALL - 1), halves=0)

    def Product(self, step: Product) -> None:  # noqa: N802
        self.need(0 < step.size <= 8192 and step.size % 16 == 0, "the size of a product")

    def StreamSleep(self, step: StreamSleep) -> None:  # noqa: N802
        self.need(self.device == "cuda" and step.rank in self.all, "the rank or device of a sleep")

    def HostSleep(self, step: HostSleep) -> None:  # noqa: N802
        self.need(not self.captures and step.rank in self.all, "a host sleeps in a graph, or there is no such rank")

    def Capture(self, step: Capture) -> None:  # noqa: N802
        self.need(self.device == "cuda" and not self.captures, "a graph in a graph, or without a GPU")
        self.need(step.graph not in self.graphs, "two graphs of one number")
        self.graphs[step.graph] = step
        self.run(step)
        self.labels |= {one.label for one in step.steps if isinstance(one, Collective | Messages)}

    def Replay(self, step: Replay) -> None:  # noqa: N802
        self.need(step.graph in self.graphs and not self.captures, "a replay of no graph")
        self.run(self.graphs[step.graph])

    def run(self, capture: Capture) -> None:
        """Make the steps of a graph once."""
        before, labels, self.labels = dict(self.under_way), self.labels, set()
        self.captures = True
        for one in capture.steps:
            self.apply(one)
        self.captures, self.labels = False, labels
        self.need(self.under_way == before, "a graph leaves a call, or waits for another's")

    def Wait(self, step: Wait) -> None:  # noqa: N802
        self.need(step.label in self.under_way, "a wait for no call")
        missing, call = self.under_way.pop(step.label)
        if step.rank >= 0:
            self.need(step.rank in missing and not self.captures, "a wait of a rank that has none")
            missing -= {step.rank}
            if missing:
                self.under_way[step.label] = missing, call
                return
        for slot, content in enumerate(self.contents):
            if content.label == step.label:
                self.contents[slot] = replace(content, label=0)

    def Messages(self, step: Messages) -> None:  # noqa: N802
        ranks = self.groups[step.group].ranks
        self.need(len(set(step.pairs)) == len(step.pairs) > 0, "messages between the same ranks, or none")
        self.need(all(a != b and min(a, b) >= 0 and max(a, b) < len(ranks) for a, b in step.pairs), "a wrong rank")
        self.need(step.form == "batch" or (step.form == "alone" and len(step.pairs) == 1), "the form of messages")
        ends = {rank for pair in step.pairs for rank in pair}
        self.need(self.device == "cpu" or len(ends) == len(ranks), "a batch that leaves ranks out")
        source, target = step.slots
        self.alike(step.slots)
        self.fits(source, len(ranks) * step.elements)
        self.fits(target, len(ranks) * step.elements)
        self.reads(source, [ranks[a] for a, _ in step.pairs])
        self.free(target)
        self.moves(source, target, [], 0)
        self.begins(step, frozenset(ranks[rank] for rank in ends))

    def Collective(self, step: Collective) -> None:  # noqa: N802
        ranks = self.groups[step.group].ranks
        size, m, slots = len(ranks), step.elements, step.slots
        self.need(step.op in OPS, "there is no such call")
        self.need((step.op == "barrier") == (not slots), "the slots of a call")
        self.need(0 <= step.root < (size if step.op in ROOTED else 1), "the root")
        self.need(bool(step.sizes) == (step.op == "all_to_all_uneven"), "sizes of parts")
        known = REDUCTIONS[self.device] if step.op in REDUCING else ("",)
        self.need(step.reduction in known, "the reduction")
        if step.op == "barrier":
            self.need(not self.captures and not step.label, "a barrier that is captured or asynchronous")
            return
        self.alike(slots)
        if step.op in ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce"):
            self.need(len(slots) == 1 or step.op == "all_reduce_coalesced", "the slots of a call")
            for slot in slots:
                self.fits(slot, m)
                self.reads(slot, [ranks[step.root]] if step.op == "broadcast" else ranks)
                self.free(slot)
                if step.op == "broadcast":
                    self.moves(slot, slot, ranks, m)
                else:
                    self.reduces(step, slot, slot, ranks, m)
                if step.op == "reduce":
                    others = set(ranks) - {ranks[step.root]}
                    self.contents[slot] = replace(self.contents[slot], ranks=self.contents[slot].ranks - others)
            self.begins(step, frozenset(ranks))
            return
        self.need(len(slots) == 2 or (step.op in COALESCED and len(slots) % 2 == 0), "the slots of a call")
        for source, target in zip(slots[::2], slots[1::2], strict=True):
            whole_in = step.op in ("reduce_scatter", "reduce_scatter_coalesced", "scatter", "all_to_all")
            if step.op == "all_to_all_uneven":
                self.need(len(step.sizes) == size and all(len(row) == size for row in step.sizes), "sizes of parts")
                self.need(min(map(min, step.sizes)) >= 0 and m == 0, "sizes of parts")
                sent, came = map(max, (map(sum, step.sizes), map(sum, zip(*step.sizes, strict=True))))
                self.need(max(sent, came) > 0, "a call of nothing")
                self.need(sent <= self.slots[source].elements, "a call of more than the slot has")
                self.need(came <= self.slots[target].elements, "a call of more than the slot has")
                covered = 0
            else:
                covered = m if step.op in ("reduce_scatter", "reduce_scatter_coalesced", "scatter") else size * m
                self.fits(source, size * m if whole_in else m)
                self.fits(target, covered)
            self.reads(source, [ranks[step.root]] if step.op == "scatter" else ranks)
            self.free(target)
            if step.op in REDUCING:
                self.reduces(step, source, target, ranks, covered)
            else:
                self.moves(source, target, [ranks[step.root]] if step.op == "gather" else ranks, covered)
        self.begins(step, frozenset(ranks))

    # -- slots --------------------------------------------------------------------------------------------------------

    def alike(self, slots: Sequence[int]) -> None:
        self.need(len(set(slots)) == len(slots) and set(slots) <= set(range(len(self.slots))), "the slots of a call")
        self.need(len({self.slots[slot].dtype for slot in slots}) == 1, "a call of several dtypes")

    def fits(self, slot: int, elements: int) -> None:
        self.need(0 < elements <= self.slots[slot].elements, "a call of nothing, or of more than the slot has")

    def free(self, slot: int) -> None:
        self.need(0 <= slot < len(self.slots), "there is no such slot")
        label = self.contents[slot].label
        self.need(not label, "a call is under way with the slot", label=label)

    def reads(self, slot: int, ranks: Sequence[int]) -> None:
        self.free(slot)
        self.need(set(ranks) <= self.contents[slot].ranks, "the library leaves these values open", slot)

    def moves(self, source: int, target: int, ranks: Sequence[int], covered: int) -> None:
        """Note that values of a slot have come to another one; all of it is covered on some ranks."""
        old, new = self.contents[target], self.contents[source]
        known = old.ranks | (frozenset(ranks) if covered == self.slots[target].elements else frozenset())
        self.contents[target] = Content(known, max(old.bound, new.bound), max(old.halves, new.halves))

    def reduces(self, step: Collective, source: int, target: int, ranks: Sequence[int], covered: int) -> None:
        size, content, dtype = len(ranks), self.contents[source], self.slots[source].dtype
        bound, halves, most = content.bound, content.halves, EXACT[dtype]
        if step.reduction in ("sum", "avg", "premul"):
            bound *= size * (int(FACTOR) if step.reduction == "premul" else 1)
        if step.reduction == "product":
            bound, halves = bound**size, halves * size
        self.need(max(bound, 1) << halves <= most, "a sum of more digits than the dtype has", source)
        if step.reduction == "avg":
            if dtype.startswith("int"):
                bound //= size
            else:
                self.need(size & (size - 1) == 0, "an average that is not exact")
                halves += size.bit_length() - 1
                bound = content.bound
                self.need(max(bound, 1) << halves <= most, "an average of more digits than the dtype has", source)
        if step.reduction == "premul":
            # NCCL 2.28 by PyTorch 2.11 gives zeros for a factor of bfloat16
            self.need(dtype != "bfloat16" and not dtype.startswith(("int", "uint")), "a factor of that dtype")
        self.contents[source] = replace(content, bound=bound, halves=halves)
        self.moves(source, target, ranks, covered)
        if source != target:
            self.contents[source] = content

    def begins(self, step: Collective | Messages, ranks: frozenset[int]) -> None:
        if not step.label:
            return
        self.need(step.label not in self.labels and not step.keep, "a label of two calls, or a result before its wait")
        self.labels.add(step.label)
        self.under_way[step.label] = ranks, step
        for slot in step.slots:
            self.contents[slot] = replace(self.contents[slot], label=step.label)
        users = {(call.group, type(call)) for _, call in self.under_way.values()}
        self.need(
            self.device == "cpu" or len(users) <= GROUPS_UNDER_WAY,
            "too many groups have calls under way",
            label=next(iter(self.under_way)),
        )


def check(program: Program) -> None:
    """Raise IllegalError, with the step, unless a program is legal."""
    rules = Rules(program.device, program.world_size, program.groups, program.slots)
    for number, step in enumerate(program.steps):
        try:
            rules.apply(step)
        except IllegalError as error:
            raise IllegalError(f"step {number}, {step!r}: {error}", error.slot, error.label) from None
