"""The compiled schedules of CPU ranks do what their model says: traces are replayed against the state model.

Schedules run as Python here, on ranks that are processes with shared memory: every helper by its Python source, and
every access of memory by a function that records it. What is compiled stays as it is.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import pkgutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from local_ranks import LocalGroup, run_ranks
from shotcast.collectives.registry import registered
from shotcast.transport.cpu.layout import OUTBOX_SLOTS
from shotcast.wire import CallPlan, LaunchShape, Op

from . import test_send_recv as send_recv
from .machine import Await, Start, Steps, Store
from .test_host_staging import ROOTED, SCHEDULES, Rules, rank_program
from .words import Call

PACKAGE = "shotcast.transport.cpu"
CHUNK_BYTES, CHUNKS = 192, 2
"""Slices and pieces of two and of three ranks divide a chunk."""
OPERATIONS = {
    "one_shot": (Op.ALL_REDUCE, "one_shot"),
    "two_shot": (Op.ALL_REDUCE, "two_shot"),
    "ring": (Op.ALL_REDUCE, "ring"),
    "reduce_scatter": (Op.REDUCE_SCATTER, "one_shot"),
    "all_gather": (Op.ALL_GATHER, "one_shot"),
    "all_to_all": (Op.ALL_TO_ALL, "one_shot"),
    "ring_reduce_scatter": (Op.REDUCE_SCATTER, "ring"),
    "ring_all_gather": (Op.ALL_GATHER, "ring"),
    "broadcast": (Op.BROADCAST, "one_shot"),
    "barrier": (Op.BARRIER, "one_shot"),
    "max": (Op.ALL_REDUCE, "one_shot"),
    "two_shot_max": (Op.ALL_REDUCE, "two_shot"),
    "uneven": (Op.ALL_TO_ALL_UNEVEN, "one_shot"),
    "gather": (Op.GATHER, "one_shot"),
    "scatter": (Op.SCATTER, "one_shot"),
    "reduce": (Op.REDUCE, "one_shot"),
    "slices_to_root": (Op.REDUCE, "two_shot"),
    "mapped_all_reduce": (Op.ALL_REDUCE, "two_shot"),
    "mapped_reduce_scatter": (Op.REDUCE_SCATTER, "one_shot"),
    "mapped_all_gather": (Op.ALL_GATHER, "one_shot"),
    "mapped_broadcast": (Op.BROADCAST, "one_shot"),
    "mixed_all_reduce": (Op.ALL_REDUCE, "two_shot"),
    "mixed_reduce_scatter": (Op.REDUCE_SCATTER, "one_shot"),
    "mixed_all_gather": (Op.ALL_GATHER, "one_shot"),
}
"""Operations and algorithms, by the model's schedule or, where every rank reads from all, by their own name."""
MODELS = {"gather": "to_root", "reduce": "to_root", "scatter": "from_root", "two_shot_max": "two_shot"}
"""The models of other schedules than those of their name."""
PARTS = ("reduce_scatter", "all_gather", "all_to_all", "ring_reduce_scatter", "ring_all_gather", "gather", "scatter")
PARTS += ("mapped_reduce_scatter", "mapped_all_gather", "mixed_reduce_scatter", "mixed_all_gather")
"""Those in which each rank has a part of the message."""
SEQUENCE = (
    *("one_shot", "ring", "broadcast", "two_shot", "barrier", "broadcast", "ring", "two_shot", "one_shot"),
    *("ring_reduce_scatter", "reduce_scatter", "all_gather", "ring_all_gather", "all_to_all", "ring_all_gather"),
    *("gather", "reduce", "scatter", "max", "slices_to_root", "uneven", "slices_to_root", "gather", "two_shot_max"),
    *("scatter", "uneven", "broadcast", "reduce", "mapped_all_reduce", "two_shot", "mixed_all_reduce"),
    *("mapped_broadcast", "broadcast", "mapped_broadcast", "mapped_all_gather", "mixed_all_gather", "all_gather"),
    *("mixed_reduce_scatter", "mapped_reduce_scatter", "reduce_scatter", "mapped_all_reduce", "mapped_all_reduce"),
)


class Event(NamedTuple):
    """An access to a word of the model: "await", "read", "stage", "publish" or "header", of rank ``owner``.

    ``value`` is the progress waited for or published, the generation of staging, or the parity of a header. Of the
    mapped tensor of another rank, the action says so, and ``value`` is the part. In
    messages, the action also says the counter, or the part of the slot, and the rank that it is for.
    """

    call: int
    action: str
    owner: int
    value: int


class Change(NamedTuple):
    """A line of a schedule's module that is replaced."""

    module: str
    old: str
    new: str


class ReplayError(AssertionError):
    """A schedule does what the model does not, or leaves out what it does."""


def play_in_python(executor: Any, events: list[Event], change: Change | None) -> Callable[[int, int], None]:
    """Replace compiled helpers by their Python source, and accesses of memory by functions that record them.

    Returns the function that says which call begins.
    """
    from shotcast.device.cpu import atomics
    from shotcast.transport.cpu import layout

    regions, rank, call, part_bytes = executor._regions, executor._rank, -1, 1

    def note(action: str, address: int, value: int | None = None) -> None:
        for owner, base in enumerate(regions):
            offset = address - base
            outbox = offset - layout.CONTROL_BYTES - 2 * executor._generation
            if executor._heap.start <= offset < executor._heap.end and owner != rank:
                events.append(Event(call, f"{action} x", owner, (offset - executor._heap.start) // part_bytes))
            if not 0 <= offset < executor._buffer.nbytes:
                continue
            if outbox >= 0:
                slot_bytes = layout.OUTBOX_HEADER_BYTES + executor.context[layout.OUTBOX_CHUNK // 8]
                slot, place = divmod(outbox, slot_bytes)
                if action in ("stage", "read"):
                    receiver, slot = divmod(slot, layout.OUTBOX_SLOTS)
                    what = "header" if place < layout.OUTBOX_HEADER_BYTES else "data"
                    events.append(Event(call, f"{action} {what} {receiver}", owner, slot))
            elif offset >= layout.CONTROL_BYTES:
                generation = (offset - layout.CONTROL_BYTES) // executor._generation
                if action in ("stage", "read"):
                    events.append(Event(call, action, owner, generation))
            elif offset == layout.PROGRESS and action in ("await", "publish"):
                events.append(Event(call, action, owner, value or 0))
            elif action in ("await", "publish") and layout.SENT <= offset < layout.RECEIVED + 8 * layout.LINE:
                counter, peer = divmod(offset - layout.SENT, layout.RECEIVED - layout.SENT)
                events.append(
                    Event(call, f"{action} {('sent', 'received')[counter]} {peer // layout.LINE}", owner, value or 0)
                )
            elif layout.HEADERS <= offset < layout.HEADERS + 32 and action in ("acquire", "publish"):
                events.append(Event(call, "header", owner, (offset - layout.HEADERS) // 16))

    def load(address: int) -> int:
        note("read", address)
        return ctypes.c_int64.from_address(address).value

    def store(address: int, value: int) -> None:
        note("stage", address)
        ctypes.c_int64.from_address(address).value = value

    def load_acquire(address: int) -> int:
        note("acquire", address)
        return load(address)

    def store_release(address: int, value: int) -> None:
        note("publish", address, value)
        store(address, value)

    def copy(target: int, source: int, nbytes: int) -> None:
        if nbytes > 0 and target != source:
            note("read", source)
            note("stage", target)
            ctypes.memmove(target, source, nbytes)

    def call_arithmetic(function: int, target: int, sources: int, count: int, elements: int) -> None:
        if elements > 0:
            for number in range(count):
                note("read", load(sources + 8 * number))
            note("stage", target)
            ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(function)(target, sources, count, elements)

    def wait(context: int, peer: int, needs_peer: bool, address: int, target: int) -> int:
        status = waits(context, peer, needs_peer, address, target)
        note("await", address, target)
        return status

    python = {
        "load": load,
        "store": store,
        "load_acquire": load_acquire,
        "store_release": store_release,
        "copy": copy,
        "call_arithmetic": call_arithmetic,
        "pause": lambda: None,
        "interrupted": lambda: 0,
        "monotonic_ns": time.monotonic_ns,
        "sleep_ns": lambda duration: time.sleep(duration / 1e9),
    }
    package = importlib.import_module(PACKAGE)
    modules = [importlib.import_module(found.name) for found in pkgutil.iter_modules(package.__path__, f"{PACKAGE}.")]
    for module in modules:
        if change is not None and module.__name__ == f"{PACKAGE}.{change.module}":
            assert module.__file__ is not None
            source = Path(module.__file__).read_text()
            assert source.count(change.old) == 1, (change, source.count(change.old))
            exec(compile(source.replace(change.old, change.new), module.__file__, "exec"), vars(module))
        for name, value in list(vars(module).items()):
            if name in python and value is getattr(atomics, name):
                setattr(module, name, python[name])
            elif hasattr(value, "py_func"):
                setattr(module, name, value.py_func)
    waits = importlib.import_module(f"{PACKAGE}.waiting").wait
    for module in modules:
        if getattr(module, "wait", None) is waits:
            module.wait = wait  # type: ignore[attr-defined]

    def begin(number: int, nbytes: int) -> None:
        nonlocal call, part_bytes
        call, part_bytes = number, max(1, nbytes // len(regions))

    assert rank < len(regions)
    return begin


def plan_of(op: str, number: int, ranks: int) -> CallPlan:
    operation, algorithm = OPERATIONS[op]
    nbytes = 0 if op == "barrier" else CHUNKS * CHUNK_BYTES * (ranks if op in PARTS else 1)
    launch = LaunchShape(1, 128, 1, CHUNK_BYTES)
    if op == "uneven":
        return CallPlan(operation, algorithm, "float32", 0, sizes=(nbytes // 4,) * 2 * ranks, launch=launch)
    root, reduction = number % ranks if schedule_of(op) in ROOTED else 0, "max" if op.endswith("max") else "sum"
    return CallPlan(operation, algorithm, "float32", nbytes, root=root, launch=launch, reduction=reduction)


def schedule_of(op: str) -> str:
    """Return the model's schedule of a call."""
    return MODELS.get(op, op if op in SCHEDULES else "one_shot")


def message_plan(number: int, rank: int, chunk_bytes: int) -> CallPlan | None:
    sender, receiver, chunks = MESSAGES[number]
    if rank not in (sender, receiver):
        return None
    op, peer = (Op.SEND, receiver) if rank == sender else (Op.RECV, sender)
    return CallPlan(op, "one_shot", "float32", chunks * chunk_bytes, root=peer)


def traced(group: LocalGroup, ops: Sequence[str], change: Change | None) -> list[Event]:
    """Make these calls, or without any the messages, and return what this rank did.

    If a line is changed, it ends with the first call that fails.
    """
    from shotcast.transport.cpu import layout, mapped, two_shot
    from shotcast.transport.cpu.executor import CpuExecutor

    algorithms = registered()
    algorithms._kernels.clear()  # those that this process has used before are not changed
    executor = CpuExecutor(group, 1 << 20, 3.0 if change else 30.0, algorithms)
    events: list[Event] = []
    begin = play_in_python(executor, events, change)
    mapped.LEAST_BYTES, two_shot.PIECE_BYTES = 0, 64  # type: ignore[attr-defined]
    tensor = executor.empty((CHUNKS * CHUNK_BYTES * group.world_size // 4,), torch.float32)
    assert tensor is not None
    group.barrier()
    chunk_bytes = executor.context[layout.OUTBOX_CHUNK // 8]
    for number in range(len(ops or MESSAGES)):
        plan = plan_of(ops[number], number, group.world_size) if ops else message_plan(number, group.rank, chunk_bytes)
        if plan is None:
            continue
        call = executor.bind(plan).call
        record = executor.record(plan, call)
        count = sum(plan.sizes) // 2 if plan.sizes else plan.nbytes // 4
        x, out = torch.full((count,), group.rank + 1.0), torch.zeros(count)
        if ops and (ops[number].startswith("mapped") or (ops[number].startswith("mixed") and group.rank == 0)):
            x = tensor[:count].fill_(group.rank + 1.0)
            out = x if plan.op in (Op.ALL_REDUCE, Op.BROADCAST) else out
        begin(number, plan.nbytes)
        addresses = executor.context_address, record.buffer_info()[0], x.data_ptr(), out.data_ptr()
        if call.schedule._function(*addresses) != 0:
            assert change is not None
            break
        if change is None and plan.op is Op.ALL_REDUCE:
            combine = max if plan.reduction == "max" else sum
            assert out.tolist() == [combine(range(1, group.world_size + 1))] * len(out)
    group.barrier()
    executor.close()
    return events


class Section:
    """The part of a rank between two publications: reads and stagings, each after certain waits."""

    def __init__(self) -> None:
        self.awaited: set[tuple[int, int]] = set()
        self.after: dict[tuple[str, int, int], set[tuple[int, int]]] = {}

    def add(self, action: str, owner: int, value: int) -> None:
        if action == "await":
            self.awaited.add((owner, value))
        else:
            self.after.setdefault((action, owner, value), set(self.awaited))


def sections(items: Sequence[tuple[str, int, int]], rank: int) -> list[tuple[Section, int]]:
    """Divide what a rank does in a call by its publications of progress, which are returned with the sections."""
    found, section = [], Section()
    for action, owner, value in items:
        if action == "publish":
            assert owner == rank
            found.append((section, value))
            section = Section()
        else:
            section.add(action, owner, value)
    return [*found, (section, -1)]


def modelled(rank: int, ranks: int, ops: Sequence[str]) -> list[list[tuple[str, int, int]]]:
    """Return what the model's program of a rank does in each call."""
    calls = [
        Call(op, (1,) * ranks, root=number % ranks if op in ROOTED else 0)
        for number, op in enumerate(map(schedule_of, ops))
    ]
    steps: Steps = rank_program(rank, ranks, calls, CHUNKS, Rules())
    found: list[list[tuple[str, int, int]]] = []
    for step in steps:
        if isinstance(step, Start):
            found.append([])
        elif isinstance(step, Store):
            owner, region, *rest = step.address
            if region in ("place", "tensor"):
                if owner != rank:
                    found[-1].append(("stage x", owner, rest[0]))
            elif region == "progress":
                assert isinstance(step.value, int)
                found[-1].append(("publish", owner, step.value))
            else:
                found[-1].append(("stage" if region == "staging" else "header", owner, rest[0]))
        elif isinstance(step, Await):
            for address in step.words:
                if address[1] == "progress":
                    # the least progress that ends the wait
                    needed = next(value for value in range(1000) if step.arrived(value))
                    found[-1].append(("await", address[0], needed))
                elif address[1] == "tensor" and address[0] != rank:
                    found[-1].append(("read x", address[0], address[2]))
                elif address[1] in ("staging", "header"):
                    found[-1].append(("read" if address[1] == "staging" else "header", address[0], address[2]))
    return found


def replay(ranks: int, ops: Sequence[str], traces: list[list[Event]]) -> None:
    """Compare each call of each rank with the model.

    Between two publications a schedule must wait for the same progress of the same peers, read and write the same
    staging and headers, and do each of these after all waits that the model does before it.
    """
    for rank, events in enumerate(traces):
        for number, expected in enumerate(modelled(rank, ranks, ops)):
            where = f"rank {rank}, call {number} ({ops[number]})"
            mine = [(e.action, e.owner, e.value) for e in events if e.call == number]
            done, wanted = sections(mine, rank), sections(expected, rank)
            if [value for _, value in done] != [value for _, value in wanted]:
                raise ReplayError(f"{where} publishes {[v for _, v in done]}, the model {[v for _, v in wanted]}")
            for (real, _), (model, step) in zip(done, wanted, strict=True):
                if real.awaited != model.awaited:
                    raise ReplayError(f"{where} before {step} waits for {real.awaited}, the model for {model.awaited}")
                if real.after.keys() != model.after.keys():
                    raise ReplayError(f"{where} before {step} does {real.after}, the model {model.after}")
                for item, before in model.after.items():
                    if not before <= real.after[item]:
                        raise ReplayError(f"{where} does {item} after {real.after[item]}, the model after {before}")


@pytest.mark.parametrize("ranks", [2, 3])
def test_schedules(ranks: int) -> None:
    replay(ranks, SEQUENCE, run_ranks(ranks, traced, SEQUENCE, None))


MESSAGES = [(0, 1, 3), (1, 0, 1), (0, 1, 6), (2, 1, 5), (1, 0, 4), (0, 2, 1)]
"""(sender, receiver, chunks): two of them have more chunks than an outbox has slots."""


def modelled_messages(rank: int) -> list[tuple[str, int, int]]:
    """Return what the model's program of a rank does in all messages."""
    found: list[tuple[str, int, int]] = []
    for step in send_recv.cpu_program(rank, MESSAGES, send_recv.Rules()):
        if isinstance(step, Store):
            owner, region, peer, *slot = step.address
            if region != "mailbox":
                assert isinstance(step.value, int)
                found.append((f"publish {region} {peer}", owner, step.value))
            elif slot[1] == 0:
                found += [(f"stage {part} {peer}", owner, slot[0]) for part in ("header", "header", "data")]
        elif isinstance(step, Await):
            owner, region, peer, *slot = next(iter(step.words))
            if region == "mailbox":
                found += [(f"read {part} {peer}", owner, slot[0]) for part in ("header", "header", "data")]
            else:
                needed = next(value for value in range(-10, 1000) if step.arrived(value))
                found.append((f"await {region} {peer}", owner, needed))
    return found


def replay_messages(traces: list[list[Event]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_recv, "SLOTS", OUTBOX_SLOTS)
    for rank, events in enumerate(traces):
        done, wanted = [(e.action, e.owner, e.value) for e in events], modelled_messages(rank)
        for position, (real, model) in enumerate(itertools.zip_longest(done, wanted)):
            if real != model:
                raise ReplayError(f"rank {rank}, access {position}: {real}, the model {model}")


def test_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_messages(run_ranks(3, traced, (), None), monkeypatch)


CHANGES = {
    "a ring without its permission": (
        "ring",
        Change("ring", "if status == DONE and sends and step > first_step:", "if False:"),
        "waits for",
    ),
    "a ring that ends at once": (
        "ring",
        Change(
            "ring",
            "            break\n    status = await_peer(context, wrap_rank(rank + 1, world_size), step, word)",
            "            break\n    status = DONE",
        ),
        "waits for",
    ),
    "a broadcast that ends at once": (
        "broadcast",
        Change(
            "copies",
            "    status = await_all(context, step if rank == root else first + 1, word)",
            "    status = DONE",
        ),
        "waits for",
    ),
    "one generation": (
        "one_shot",
        Change(
            "one_shot",
            "    done = 0\n    while True:\n        size = min(chunk, nbytes - done)\n"
            "        staging = generation(context, step)",
            "    done = 0\n    while True:\n        size = min(chunk, nbytes - done)\n"
            "        staging = generation(context, 0)",
        ),
        "does",
    ),
    "progress before the data": (
        "one_shot",
        Change(
            "one_shot",
            "        if world_size > 1 and rank != root:\n"
            "            copy(region(context, rank) + staging, x + done, size)\n"
            "        step = publish(context, step)\n",
            "        step = publish(context, step)\n        copy(region(context, rank) + staging, x + done, size)\n",
        ),
        "does",
    ),
    "sums read before their wait": (
        "two_shot",
        Change(
            "two_shot",
            "        step = publish(context, step)\n        status = await_all(context, step, word)\n",
            "        step = publish(context, step)\n        copy(out, region(context, 1 - rank) + staging, 16)\n"
            "        status = await_all(context, step, word)\n",
        ),
        "does",
    ),
    "a gather of one generation": (
        "gather",
        Change(
            "rooted",
            "        staging = generation(context, step)\n        if rank != root:\n"
            "            copy(region(context, rank) + staging, x + done, size)\n        step = publish(context, step)\n"
            "        if rank == root:\n            copy(out + rank * part",
            "        staging = generation(context, 0)\n        if rank != root:\n"
            "            copy(region(context, rank) + staging, x + done, size)\n        step = publish(context, step)\n"
            "        if rank == root:\n            copy(out + rank * part",
        ),
        "does",
    ),
    "a scatter read before its wait": (
        "scatter",
        Change(
            "rooted",
            "            copy(out + done, x + rank * part + done, size)\n"
            "        status = await_all(context, step, word)\n",
            "            copy(out + done, x + rank * part + done, size)\n        if rank != root:\n"
            "            copy(out, region(context, root) + staging, 16)\n"
            "        status = await_all(context, step, word)\n",
        ),
        "does",
    ),
    "a sum that waits for nobody": (
        "one_shot",
        Change(
            "one_shot",
            "        status = await_all(context, step, word)\n        if status != DONE:\n            return status\n"
            "        if root < 0 or rank == root:\n",
            "        if root < 0 or rank == root:\n",
        ),
        "waits for",
    ),
    "sums where they are read": (
        "two_shot",
        Change(
            "two_shot",
            "            result = own + generation(context, step)\n",
            "            result = own + staging\n",
        ),
        "does",
    ),
    "uneven parts of one generation": (
        "uneven",
        Change(
            "uneven",
            "        staging = generation(context, step)\n",
            "        staging = generation(context, 0)\n",
        ),
        "does",
    ),
    "sizes read before they are there": (
        "uneven",
        Change(
            "uneven",
            "        step = publish(context, step)\n        status = await_all(context, step, word)\n",
            "        step = publish(context, step)\n"
            "        longest = _look(context, plan, staging, 0) if done == 0 else longest\n"
            "        status = await_all(context, step, word)\n",
        ),
        "does",
    ),
    "a mapped tensor whose call ends at once": (
        "mapped_reduce_scatter",
        Change("one_shot", "return meet(context, step, word)", "return finish(context, publish(context, step))"),
        "waits for",
    ),
    "mapped tensors read before all have come": (
        "mapped_reduce_scatter",
        Change(
            "one_shot",
            "        status = await_all(context, step, word)\n        if status != DONE:\n            return status\n"
            "        if maps and step == first + 1:\n",
            "        status = DONE\n        if maps and step == first + 1:\n",
        ),
        "waits for|publishes",  # by who comes first
    ),
    "a sum in the part of another rank": (
        "mapped_all_reduce",
        Change(
            "two_shot", "place(context, peer, OUT) + low, out + low, size)", "place(context, peer, OUT), out, size)"
        ),
        "does",
    ),
    "nothing staged again for ranks without mapped tensors": (
        "mixed_reduce_scatter",
        Change("one_shot", "            if ranks > 0:\n", "            if False:\n"),
        "publishes",
    ),
    "a root that does not wait for who reads its mapped tensor": (
        "mapped_broadcast",
        Change(
            "copies",
            "await_all(context, step if rank == root else first + 1, word)",
            "await_all(context, first + 1, word)",
        ),
        "waits for",
    ),
    "a message is counted before it is there": (
        "messages",
        Change(
            "send_recv",
            "        copy(slot + layout.OUTBOX_HEADER_BYTES, x + done, size)\n        sent += 1\n"
            "        store_release(own + layout.SENT + layout.LINE * peer, sent)\n",
            "        sent += 1\n        store_release(own + layout.SENT + layout.LINE * peer, sent)\n"
            "        copy(slot + layout.OUTBOX_HEADER_BYTES, x + done, size)\n",
        ),
        "publish sent",
    ),
    "a message is taken before it is there": (
        "messages",
        Change(
            "send_recv", "wait(context, peer, False, sent, received + 1)", "wait(context, peer, False, sent, received)"
        ),
        "await sent",
    ),
    "a sender is a chunk too far ahead": (
        "messages",
        Change("send_recv", "received, sent - layout.OUTBOX_SLOTS + 1)", "received, sent - layout.OUTBOX_SLOTS)"),
        "await received",
    ),
    "credit for a message comes before the copy": (
        "messages",
        Change(
            "send_recv",
            "        copy(out + done, slot + layout.OUTBOX_HEADER_BYTES, size)\n        received += 1\n"
            "        store_release(own + layout.RECEIVED + layout.LINE * peer, received)\n",
            "        received += 1\n        store_release(own + layout.RECEIVED + layout.LINE * peer, received)\n"
            "        copy(out + done, slot + layout.OUTBOX_HEADER_BYTES, size)\n",
        ),
        "publish received",
    ),
    "one word of a message's header is not compared": (
        "messages",
        Change("send_recv", " or load(slot + 8) != load(plan + layout.HEADER + 8)", ""),
        "read header",
    ),
}

OFTEN = ("a ring without its permission", "progress before the data", "a message is counted before it is there")
"""The changes that the default run tries."""


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in CHANGES]
)
def test_a_changed_schedule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, change, message = CHANGES[name]
    if op == "messages":
        with pytest.raises(ReplayError, match=message):
            replay_messages(run_ranks(3, traced, (), change), monkeypatch)
        return
    ranks = 3 if op == "ring" else 2  # of two ranks, the reader of a ring is also the one whose data is waited for
    traces = run_ranks(ranks, traced, (op, op), change)
    with pytest.raises(ReplayError, match=message):
        replay(ranks, (op, op), traces)
