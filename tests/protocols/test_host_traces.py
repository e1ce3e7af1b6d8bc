"""The compiled schedules of CPU ranks do what their model says: traces are replayed against the state model.

Schedules run as Python here, on ranks that are processes with shared memory: every helper by its Python source, and
every access of memory by a function that records it. What is compiled stays as it is.
"""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from local_ranks import LocalGroup, run_ranks
from shotcast.collectives.registry import registered
from shotcast.wire import CallPlan, LaunchShape, Op

from .machine import Await, Start, Steps, Store
from .test_host_staging import Rules, rank_program
from .words import Call

PACKAGE = "shotcast.transport.cpu"
CHUNK_BYTES, CHUNKS = 192, 2
"""Slices and pieces of two and of three ranks divide a chunk."""
OPERATIONS = {
    "one_shot": (Op.ALL_REDUCE, "one_shot"),
    "two_shot": (Op.ALL_REDUCE, "two_shot"),
    "ring": (Op.ALL_REDUCE, "ring"),
    "broadcast": (Op.BROADCAST, "one_shot"),
    "barrier": (Op.BARRIER, "one_shot"),
}
SEQUENCE = ("one_shot", "ring", "broadcast", "two_shot", "barrier", "broadcast", "ring", "two_shot", "one_shot")


class Event(NamedTuple):
    """An access to a word of the model: "await", "read", "stage", "publish" or "header", of rank ``owner``.

    ``value`` is the progress waited for or published, the generation of staging, or the parity of a header.
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


def play_in_python(executor: Any, events: list[Event], change: Change | None) -> Callable[[int], None]:
    """Replace compiled helpers by their Python source, and accesses of memory by functions that record them.

    Returns the function that says which call begins.
    """
    from shotcast.device.cpu import atomics
    from shotcast.transport.cpu import layout

    regions, rank, call = executor._regions, executor._rank, -1

    def note(action: str, address: int, value: int | None = None) -> None:
        for owner, base in enumerate(regions):
            offset = address - base
            if not 0 <= offset < layout.CONTROL_BYTES + 2 * executor._generation:
                continue
            if offset >= layout.CONTROL_BYTES:
                generation = (offset - layout.CONTROL_BYTES) // executor._generation
                if action in ("stage", "read"):
                    events.append(Event(call, action, owner, generation))
            elif offset == layout.PROGRESS and action in ("await", "publish"):
                events.append(Event(call, action, owner, value or 0))
            elif layout.HEADERS <= offset < layout.HEADERS + 32 and action in ("acquire", "publish"):
                events.append(Event(call, "header", owner, (offset - layout.HEADERS) // 16))

    def load(address: int) -> int:
        return ctypes.c_int64.from_address(address).value

    def store(address: int, value: int) -> None:
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

    def begin(number: int) -> None:
        nonlocal call
        call = number

    assert rank < len(regions)
    return begin


def plan_of(op: str, number: int, ranks: int) -> CallPlan:
    operation, algorithm = OPERATIONS[op]
    nbytes = 0 if op == "barrier" else CHUNKS * CHUNK_BYTES
    root = number % ranks if op == "broadcast" else 0
    return CallPlan(operation, algorithm, "float32", nbytes, root=root, launch=LaunchShape(1, 128, 1, CHUNK_BYTES))


def traced(group: LocalGroup, ops: Sequence[str], change: Change | None) -> list[Event]:
    """Make these calls, and return what this rank did; until the first call that fails, if a line is changed."""
    from shotcast.transport.cpu.executor import CpuExecutor

    algorithms = registered()
    algorithms._kernels.clear()  # those that this process has used before are not changed
    executor = CpuExecutor(group, 1 << 20, 3.0 if change else 30.0, algorithms)
    events: list[Event] = []
    begin = play_in_python(executor, events, change)
    group.barrier()
    for number, op in enumerate(ops):
        plan = plan_of(op, number, group.world_size)
        call = executor.bind(plan).call
        record = executor.record(plan, call)
        x, out = torch.full((plan.nbytes // 4,), group.rank + 1.0), torch.zeros(plan.nbytes // 4)
        begin(number)
        addresses = executor.context_address, record.buffer_info()[0], x.data_ptr(), out.data_ptr()
        if call.schedule._function(*addresses) != 0:
            assert change is not None
            break
        if change is None and plan.op is Op.ALL_REDUCE:
            assert out.tolist() == [sum(range(1, group.world_size + 1))] * len(out)
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
    calls = [Call(op, (1,) * ranks, root=number % ranks if op == "broadcast" else 0) for number, op in enumerate(ops)]
    steps: Steps = rank_program(rank, ranks, calls, CHUNKS, Rules())
    found: list[list[tuple[str, int, int]]] = []
    for step in steps:
        if isinstance(step, Start):
            found.append([])
        elif isinstance(step, Store):
            owner, region, *rest = step.address
            if region == "progress":
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
                else:
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
            "        staging = CONTROL_BYTES + (step & 1) * generation_bytes",
            "    done = 0\n    while True:\n        size = min(chunk, nbytes - done)\n        staging = CONTROL_BYTES",
        ),
        "does",
    ),
    "progress before the data": (
        "one_shot",
        Change(
            "one_shot",
            "        if world_size > 1:\n            copy(region(context, rank) + staging, x + done, size)\n"
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
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_schedule_is_caught(name: str) -> None:
    op, change, message = CHANGES[name]
    ranks = 3 if op == "ring" else 2  # of two ranks, the reader of a ring is also the one whose data is waited for
    traces = run_ranks(ranks, traced, (op, op), change)
    with pytest.raises(ReplayError, match=message):
        replay(ranks, (op, op), traces)
