"""Traces of the interpreted kernels: which words of the regions each program loads, stores and adds to, in order.

Ranks of tests/protocols/test_kernel_traces.py run :func:`traced`, with kernels as they are or with one line changed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import shotcast
from executor_calls import run_call
from shotcast.memory.operands import NormTensors
from shotcast.wire import CallPlan, Op

PACKAGE = "shotcast.transport.triton"
CHANNELS = 1
"""Channels of a mailbox in traces: as many as the model has, so that all chunks pass through one."""
CELLS_OF_WORD = 256
"""Cells of a chunk that stand for one of the two words that a chunk of the model has."""


class Event(NamedTuple):
    """One access of a program to words of one kind in the regions.

    Attributes:
        call: the position of the call among those traced.
        program: the program of the grid.
        action: "load", "store" or "add".
        words: the value by (owner, region, *index), as the models name words; the word before an "add".
    """

    call: int
    program: int
    action: str
    words: dict[tuple[Any, ...], Any]


class Change(NamedTuple):
    """A line of a kernel's module that is replaced."""

    module: str
    old: str
    new: str


class Recorder:
    """Records what interpreted kernels do to the regions of all ranks."""

    def __init__(self, executor: Any) -> None:
        from shotcast.transport.triton import layout

        where = executor._layout
        self.layout, self.where, self.rank = layout, where, executor._rank
        self.bases = list(executor._buffer.addresses)
        self.events: list[Event] = []
        self.call = -1
        self.header: tuple[int, int] = (0, 0)

    def word(self, offset: int) -> tuple[tuple[Any, ...], int] | None:
        """Return the model's word of which the byte ``offset`` of a region is a part, and the number of the part."""
        layout, where = self.layout, self.where
        if offset >= 16 * where.slots_at:
            generation, rest = divmod(offset - 16 * where.slots_at, 16 * where.slots_quads)
            return ("slots", generation, rest // 16), rest % 16 // 4
        if offset >= 16 * where.cells_at:
            generation, rest = divmod(offset - 16 * where.cells_at, 16 * where.cells_quads)
            return ("cells", generation, rest // 32), rest % 32 // 8
        if offset >= 16 * where.mailboxes_at:
            chunk, cell = divmod((offset - 16 * where.mailboxes_at) // 8, layout.CHUNK_WORDS)
            sender, slot = divmod(chunk, 2)
            return ("mailbox", sender, slot, cell // CELLS_OF_WORD), cell % CELLS_OF_WORD
        at = offset // 8
        single = {layout.EPOCH: "epoch", layout.GENERATION: "generation", layout.READERS: "readers"}
        if at in single:
            return (single[at],), 0
        if layout.EXTENT <= at < layout.EXTENT + 3:
            return ("extent", at - layout.EXTENT), 0
        if layout.HEADERS <= at < layout.HEADERS + 32:
            parity, rest = divmod(at - layout.HEADERS, 16)
            return ("header", rest // 2, parity), rest % 2
        if layout.CREDITS <= at < layout.CREDITS + 8 * CHANNELS:
            return ("credits", (at - layout.CREDITS) // CHANNELS), 0
        if layout.MESSAGE_HEADERS <= at < layout.RECEIVES_BEGUN:
            sender, rest = divmod(at - layout.MESSAGE_HEADERS, 2 * layout.MESSAGE_SLOTS)
            return ("header", sender, rest // 2), rest % 2
        if layout.RECEIVES_BEGUN <= at < layout.RECEIVES_BEGUN + 8:
            return ("receives_begun_cell", at - layout.RECEIVES_BEGUN), 0
        return None

    def record(self, program: int, action: str, pointers: Any, values: Any, mask: Any) -> None:
        found: dict[tuple[Any, ...], dict[int, int]] = {}
        chosen = np.broadcast_to(mask, np.shape(pointers)).ravel().astype(bool)
        values = np.broadcast_to(values, np.shape(pointers)).ravel()
        for address, value in zip(np.asarray(pointers).ravel()[chosen], values[chosen], strict=True):
            for owner, base in enumerate(self.bases):
                if 0 <= int(address) - base < self.where.nbytes:
                    named = self.word(int(address) - base)
                    if named is not None:
                        found.setdefault((owner, *named[0]), {})[named[1]] = int(value)
        if found:
            words = {place: self.value(place, parts) for place, parts in found.items()}
            self.events.append(Event(self.call, program, action, words))

    def value(self, place: tuple[Any, ...], parts: dict[int, int]) -> Any:
        """Return what the parts of a word say: the models' value, as far as the protocol depends on it."""
        region = place[1]
        complete = {"slots": 4, "cells": 4, "mailbox": CELLS_OF_WORD, "header": 2}.get(region, 1)
        if len(parts) != complete:
            return f"{len(parts)} of {complete} parts"
        values = [parts[part] for part in sorted(parts)]
        if region == "slots":
            missing = [value & 0xFFFFFFFF == 0xFFFFFFFF for value in values]
            return "sentinel" if all(missing) else "torn" if any(missing) else "data"
        if region in ("cells", "mailbox"):
            flags = {value >> 32 & 0xFFFFFFFF for value in values}
            return flags.pop() if len(flags) == 1 else "torn"
        if region == "header":
            tags = {value >> 48 & 0xFFFF for value in values}
            same = tuple(value & (1 << 48) - 1 for value in values) == self.header
            return (tags.pop(), "same" if same else "other") if len(tags) == 1 and all(values) else "torn or zero"
        return values[0]

    def install(self) -> None:
        from triton.runtime import interpreter

        builder = type(interpreter.interpreter_builder)
        load, store, add = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

        def traced_load(made: Any, pointers: Any, mask: Any, *others: Any) -> Any:
            result = load(made, pointers, mask, *others)
            self.record(made.grid_idx[0], "load", pointers.data, result.data, mask.data)
            return result

        def traced_store(made: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
            self.record(made.grid_idx[0], "store", pointers.data, value.data, mask.data)
            return store(made, pointers, value, mask, *others)

        def traced_add(made: Any, operation: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
            result = add(made, operation, pointers, value, mask, *others)
            self.record(made.grid_idx[0], "add", pointers.data, result.data, mask.data)
            return result

        builder.create_masked_load, builder.create_masked_store = traced_load, traced_store
        builder.create_atomic_rmw = traced_add
        self._originals = builder, load, store, add

    def remove(self) -> None:
        builder, load, store, add = self._originals
        builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw = load, store, add


@contextlib.contextmanager
def changed_kernels(change: Change) -> Iterator[None]:
    """Put functions of a module with one line changed in the place of its own, in all modules that import them.

    The interpreter reads the functions from a file when it first runs them, so the file stays until the end. Ranks are
    shared by tests, so the functions are put back.
    """
    package = importlib.import_module(PACKAGE)
    for found in pkgutil.iter_modules(package.__path__, f"{PACKAGE}."):
        importlib.import_module(found.name)  # a module imported later would keep the changed functions
    original = importlib.import_module(f"{PACKAGE}.{change.module}")
    assert original.__file__ is not None
    source = Path(original.__file__).read_text()
    assert source.count(change.old) == 1, f"{change.module} has {source.count(change.old)} times {change.old!r}"
    replaced: list[tuple[Any, str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        path = Path(folder) / f"{change.module}.py"
        path.write_text(source.replace(change.old, change.new))
        spec = importlib.util.spec_from_file_location(f"changed_{change.module}", path)
        assert spec is not None
        assert spec.loader is not None
        changed = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(changed)
        for name in ("yield_core", "POLLS_PER_CHECK", "CHANNELS"):  # which ranks quicken, and traces set
            if hasattr(changed, name):
                setattr(changed, name, getattr(original, name))
        for name, module in list(sys.modules.items()):
            for attribute, value in list(vars(module).items()) if name.startswith(PACKAGE) else []:
                function = getattr(value, "fn", None)
                if hasattr(value, "rewrite") and getattr(function, "__module__", "") == original.__name__:
                    replaced.append((module, attribute, value))
                    setattr(module, attribute, getattr(changed, attribute))
        assert replaced
        try:
            yield
        finally:
            for module, attribute, value in replaced:
                setattr(module, attribute, value)


def tensors_of(plan: CallPlan, rank: int, world_size: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    dtype = getattr(torch, plan.dtype)
    count = plan.nbytes // dtype.itemsize
    part = count // world_size
    x = torch.full((count,), rank + 1).to(dtype)
    if plan.op is Op.ALL_GATHER:
        return x[:part], torch.empty(count, dtype=dtype)
    if plan.op is Op.REDUCE_SCATTER:
        return x, torch.empty(part, dtype=dtype)
    if plan.op in (Op.SEND, Op.RECV):
        return (x, None) if plan.op is Op.SEND else (None, x)
    return x, torch.empty(count, dtype=dtype)


def norm_tensors(plan: CallPlan) -> NormTensors:
    assert plan.norm is not None
    dtype = getattr(torch, plan.dtype)
    residual = torch.ones(plan.nbytes // dtype.itemsize // plan.norm.hidden, plan.norm.hidden, dtype=dtype)
    return NormTensors(
        residual, residual[0].clone(), 1e-5, torch.empty_like(residual), normed=torch.empty_like(residual)
    )


def traced(plans: list[list[CallPlan | None]], change: Change | None = None) -> list[Event]:
    """Make the calls of this rank, ``plans[rank]`` (None: it takes no part), and return their trace.

    A changed kernel may hang: then the trace ends with the call that the deadline has ended.
    """
    from shotcast.transport.triton import layout, send_recv

    layout.CHANNELS, send_recv.CHANNELS = CHANNELS, type(send_recv.CHANNELS)(CHANNELS)  # type: ignore[misc]
    timeout_s = 2.0 if change else 30.0
    with (
        changed_kernels(change) if change else contextlib.nullcontext(),
        shotcast.Communicator(device="cpu", timeout_s=timeout_s, max_bytes=1 << 14) as comm,
    ):
        executor: Any = comm._executor
        recorder = Recorder(executor)
        comm._host.barrier()
        recorder.install()
        try:
            for number, plan in enumerate(plans[comm.rank]):
                if plan is None or executor.fault() is not None:
                    continue
                header = (
                    plan
                    if plan.op is not Op.SEND
                    else CallPlan(Op.SEND, plan.algorithm, plan.dtype, plan.nbytes, root=comm.rank, launch=plan.launch)
                )
                recorder.call, recorder.header = number, tuple(executor.context.header_of(header))
                x, out = tensors_of(plan, comm.rank, comm.world_size)
                run_call(executor, plan, x, None if plan.norm else out, norm_tensors(plan) if plan.norm else None)
        finally:
            recorder.remove()
        comm._host.barrier()
        if change is None:
            assert executor.fault() is None
        return recorder.events
