"""Traces of the interpreted kernels: which words of the regions each program loads, stores and adds to, in order.

Ranks of tests/protocols/test_kernel_traces.py run :func:`traced`, with kernels as they are or with one line changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import shotcast
from emulated_multicast import with_multicast
from executor_calls import clear_after_read_from, run_call
from shotcast import wire
from shotcast.memory.operands import NormTensors
from shotcast.wire import DTYPES, CallPlan, Op

PACKAGE = "shotcast.transport.triton"
CHANNELS = 1
"""Channels of a mailbox in traces: as many as the model has, so that all chunks pass through one."""
COPIES = 2
"""Copies of the epoch in traces: calls of one data program count programs, those of more count by copy."""
WITHHELD = 6
"""Words of a poll that come later than all others, each in its turn."""
POLLED = ("slots", "cells", "mailbox", "header", "flags", "credits", "receives_begun_cell", "progress")
"""Regions in which programs wait for words."""


class Event(NamedTuple):
    """One access of a program to words of one kind in the regions, or a barrier or fence of a program.

    Attributes:
        call: the position of the call among those traced.
        program: the program of the grid.
        action: "load" (volatile), "plain load", "store", "release" (a store), "add", "barrier", "warp" (a barrier of a
            warp), "fence", or "prior": the program waits for the kernel before.
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


@dataclass(frozen=True)
class Circumstances:
    """The circumstances of traced calls.

    Attributes:
        change: a line of the kernels that is changed.
        clears_from: calls with slots of more bytes clear them as they read; None: as on GPUs.
        multicast: the ranks have an emulated multicast address.
        silent: (rank, call): this rank's data of this call never lands.
        two_steps: sums of nodes in 16 bits pass in two steps, however short.
        mapped: the ranks whose tensors lie in memory that all ranks map.
        timeout_s: the deadline. If it is below 2, a call may go wrong: one more is made after it, and no word is
            withheld.
    """

    change: Change | None = None
    clears_from: int | None = None
    multicast: bool = False
    silent: tuple[int, int] | None = None
    two_steps: bool = False
    mapped: tuple[int, ...] = ()
    timeout_s: float = 30.0


class Recorder:
    """Records what interpreted kernels do to the regions of all ranks, and has each word that is polled come last once.

    A word that a program polls, and that has come, is withheld for one poll, one word at a time: the program sees what
    lay there before. It must then poll again. So a wait that leaves out a word, or a part of it, ends too early in the
    trace, however quick the ranks are.
    """

    def __init__(self, executor: Any, silent_call: int | None) -> None:
        from shotcast.transport.triton import layout

        workspace = executor.workspaces[0]
        self.layout, self.where, self.rank = layout, workspace.where, workspace.context.rank
        self.bases = list(workspace.memory.addresses)
        self.tensors: list[tuple[int, str, int, int]] = []
        """(owner, name, address here, bytes) of tensors that all ranks map, which are traced by words of 4 bytes."""
        self.events: list[Event] = []
        self.call, self.silent_call = -1, silent_call
        self.header: tuple[int, int] = (0, 0)
        self.releases = False
        self.withholds = True
        self.chosen: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
        self.withheld: dict[int, tuple[Any, ...] | None] = {}

    def begin(self, call: int, plan: CallPlan, header: tuple[int, int]) -> None:
        self.call, self.header, self.chosen, self.withheld = call, header, {}, {}
        self.header_cells = self.layout.MESSAGE_SLOTS if plan.op in (Op.SEND, Op.RECV) else 2

    def place_of(self, offset: int) -> tuple[Any, ...] | None:
        """Return the model's word at byte ``offset`` of a region."""
        layout, where = self.layout, self.where
        if where.window_quads and offset >= 16 * where.window_at:
            return "window", (offset - 16 * where.window_at) // 4
        if offset >= 16 * where.slots_at:
            generation, rest = divmod(offset - 16 * where.slots_at, 16 * where.slots_quads)
            return "slots", generation, rest // 4
        if offset >= 16 * where.cells_at:
            generation, rest = divmod(offset - 16 * where.cells_at, 16 * where.cells_quads)
            return "cells", generation, rest // 8
        if offset >= 16 * where.places_at:
            row, word = divmod((offset - 16 * where.places_at) // 8, 2 * layout.PLACE_ROW_QUADS)
            return "place", word, row
        if offset >= 16 * where.progress_at:
            program, rest = divmod((offset - 16 * where.progress_at) // 8, 2 * layout.FLAG_ROW_QUADS)
            return "progress", rest, program
        if offset >= 16 * where.flags_at:
            worker, rest = divmod((offset - 16 * where.flags_at) // 8, 2 * layout.FLAG_ROW_QUADS)
            return "flags", rest, worker
        if offset >= 16 * where.mailboxes_at:
            chunk, cell = divmod((offset - 16 * where.mailboxes_at) // 8, layout.CHUNK_WORDS)
            sender, slot = divmod(chunk, 2)
            return "mailbox", sender, slot, cell
        at = offset // 8
        if layout.EPOCH <= at < layout.EPOCH + layout.COPIES * layout.COPY_WORDS:
            copy, word = divmod(at - layout.EPOCH, layout.COPY_WORDS)
            copied = {
                layout.EPOCH: "epoch",
                layout.GENERATION: "generation",
                layout.READERS: "readers",
                layout.ABORT: "abort",
            }
            return copied[layout.EPOCH + word], copy
        if layout.HEADERS <= at < layout.HEADERS + 32:
            parity, rest = divmod(at - layout.HEADERS, 16)
            return "header", rest // 2, parity, rest % 2
        if layout.CREDITS <= at < layout.CREDITS + 8 * CHANNELS:
            return "credits", (at - layout.CREDITS) // CHANNELS
        if layout.MESSAGE_HEADERS <= at < layout.RECEIVES_BEGUN:
            sender, rest = divmod(at - layout.MESSAGE_HEADERS, 2 * layout.MESSAGE_SLOTS)
            return "header", sender, rest // 2, rest % 2
        if layout.RECEIVES_BEGUN <= at < layout.RECEIVES_BEGUN + 8:
            return "receives_begun_cell", at - layout.RECEIVES_BEGUN
        return None

    def value(self, place: tuple[Any, ...], word: int) -> Any:
        """Return what a word says: the models' value, as far as the protocol depends on it."""
        region = place[1]
        if region == "slots":
            return "sentinel" if word & 0xFFFFFFFF == 0xFFFFFFFF else "data"
        if region in ("cells", "mailbox"):
            return word >> 32 & 0xFFFFFFFF
        if region == "header":
            same = word & (1 << 48) - 1 == self.header[place[4]]
            return (word >> 48 & 0xFFFF, "same" if same else "other") if word else 0
        if region == "generation":
            return word & 3, word >> 2
        return word

    def places(self, pointers: Any, mask: Any) -> list[tuple[int, tuple[Any, ...]]]:
        """Return (position, the model's word) of each pointer into a region."""
        found = []
        flat = np.asarray(pointers).ravel()
        for position in np.flatnonzero(np.broadcast_to(mask, np.shape(pointers)).ravel()):
            for owner, base in enumerate(self.bases):
                if 0 <= (offset := int(flat[position]) - base) < self.where.nbytes:
                    if named := self.place_of(offset):
                        found.append((int(position), (owner, *named)))
                    break
            for owner, name, base, nbytes in self.tensors:
                if 0 <= (offset := int(flat[position]) - base) < nbytes:
                    found.append((int(position), (owner, name, offset // 4)))
        return found

    def see(self, comm: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Trace these tensors of all ranks, as far as all ranks map them. Collective."""
        executor = comm._executor
        own = [(name, *executor.places(x.data_ptr()), x.nbytes) for name, x in tensors.items()]
        self.tensors = []
        for owner, told in enumerate(comm._host.all_gather(own)):
            for name, place, nbytes in told:
                if place:
                    number, start = divmod(place, 1 << self.layout.PLACE_AT)
                    base = int(executor._blocks[owner * self.layout.BLOCKS + number - 1])
                    self.tensors.append((owner, name, base + start, nbytes))

    def record(self, program: int, action: str, places: Any, values: Any, shape: Any) -> None:
        if places:
            flat = np.broadcast_to(values, shape).ravel()
            words = {place: self.value(place, int(flat[position])) for position, place in places}
            self.events.append(Event(self.call, program, action, words))

    def mark(self, program: int, action: str) -> None:
        self.events.append(Event(self.call, program, action, {}))

    def withhold(self, program: int, places: list[tuple[int, tuple[Any, ...]]], data: Any) -> Any:
        """Return what a poll finds, without a word that is yet to come last."""
        polled = [
            (position, place)
            for position, place in places
            if place[0] == self.rank and place[1] in POLLED and (place[1] != "header" or program == 0)
        ]
        if not polled:
            return data
        key = program, polled[0][1], len(polled)
        if key not in self.chosen:
            step = max(1, (len(polled) - 1) // (WITHHELD - 1))
            self.chosen[key] = {place for _, place in (*polled[::step], polled[-1])}
        missing = self.withheld.get(program)
        if missing is not None:
            if missing not in {place for _, place in polled}:
                return data  # another part of the same poll
            self.withheld[program] = None
        flat = data.reshape(-1)
        for position, place in polled:
            if place in self.chosen[key] and (old := self.before(place, int(flat[position]))) is not None:
                self.chosen[key].discard(place)
                self.withheld[program] = place
                flat = flat.copy()
                flat[[other for other, same in polled if same == place]] = old  # lanes may load a word together
                return flat.reshape(data.shape)
        return data

    def before(self, place: tuple[Any, ...], word: int) -> int | None:
        """Return what lay in a word before ``word``, or None if that has not come."""
        region = place[1]
        if region == "slots":
            return None if word & 0xFFFFFFFF == 0xFFFFFFFF else -1
        if region == "header":  # that of another call, the one before that used the cell
            previous = (word >> 48) - self.header_cells & 0xFFFF
            return None if not word else _signed(previous << 48 | (word ^ 1) & (1 << 48) - 1)
        if region in ("cells", "mailbox"):
            return _signed(((word >> 32) - 2 & 0xFFFFFFFF) << 32 | ~word & 0xFFFFFFFF)
        return word - 1 if word > 0 else None

    def install(self, changed: Any) -> None:
        from triton.runtime import interpreter

        builder = type(interpreter.interpreter_builder)
        self._replaced: list[tuple[Any, str, Any]] = []

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            original = getattr(owner, name)
            self._replaced.append((owner, name, original))
            setattr(owner, name, make(original))

        def load(original: Any) -> Any:
            def traced_load(made: Any, pointers: Any, mask: Any, other: Any, cache: Any, policy: Any, vol: Any) -> Any:
                result = original(made, pointers, mask, other, cache, policy, vol)
                if places := self.places(pointers.data, mask.data):
                    program = made.grid_idx[0]
                    if vol and self.withholds:
                        result.data = self.withhold(program, places, result.data)
                    self.record(program, "load" if vol else "plain load", places, result.data, np.shape(result.data))
                return result

            return traced_load

        def store(original: Any) -> Any:
            def traced_store(made: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
                places = self.places(pointers.data, mask.data)
                action = "release" if self.releases else "store"
                self.record(made.grid_idx[0], action, places, value.data, np.shape(pointers.data))
                if self.call == self.silent_call and any(p[1] == "slots" and p[0] != self.rank for _, p in places):
                    return None
                return original(made, pointers, value, mask, *others)

            return traced_store

        def add(original: Any) -> Any:
            def traced_add(made: Any, operation: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
                result = original(made, operation, pointers, value, mask, *others)
                places = self.places(pointers.data, mask.data)
                self.record(made.grid_idx[0], "add", places, result.data, np.shape(pointers.data))
                return result

            return traced_add

        def barrier(original: Any) -> Any:
            def traced_barrier(made: Any) -> Any:
                self.mark(made.grid_idx[0], "barrier")
                return original(made)

            return traced_barrier

        def fence(original: Any) -> Any:
            def traced_fence() -> None:
                self.mark(interpreter.interpreter_builder.grid_idx[0], "fence")
                original()

            return traced_fence

        def warp(original: Any) -> Any:
            def traced_warp() -> None:
                self.mark(interpreter.interpreter_builder.grid_idx[0], "warp")
                original()

            return traced_warp

        def release(original: Any) -> Any:
            def traced_release(*args: Any) -> None:
                self.releases = True
                try:
                    original(*args)
                finally:
                    self.releases = False

            return traced_release

        def prior(original: Any) -> Any:
            def traced_prior(pdl: Any) -> None:
                if getattr(pdl, "value", pdl):
                    self.mark(interpreter.interpreter_builder.grid_idx[0], "prior")
                original(pdl)

            return traced_prior

        replace(builder, "create_masked_load", load)
        replace(builder, "create_masked_store", store)
        replace(builder, "create_atomic_rmw", add)
        replace(builder, "create_barrier", barrier)
        for module in [module for name, module in sys.modules.items() if name.startswith(PACKAGE)] + [changed]:
            for name, make in (
                ("fence_acquire", fence),
                ("sync_warp", warp),
                ("store_release", release),
                ("await_prior_kernel", prior),
            ):
                if hasattr(module, name):
                    replace(module, name, make)

    def remove(self) -> None:
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def import_kernels() -> None:
    """Import all kernels: a module imported later would keep functions that are replaced."""
    for found in pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__, f"{PACKAGE}."):
        importlib.import_module(found.name)


@contextlib.contextmanager
def changed_kernels(change: Change) -> Iterator[Any]:
    """Put functions of a module with one line changed in the place of its own, in all modules that import them.

    The interpreter reads the functions from a file when it first runs them, so the file stays until the end. Ranks are
    shared by tests, so the functions are put back.
    """
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
        sys.modules[spec.name] = changed  # where its dataclasses look for it
        spec.loader.exec_module(changed)
        for name in (
            "yield_core",
            "POLLS_PER_CHECK",
            "CHANNELS",
            "COPIES",
            "SERIAL",
        ):  # which ranks quicken, and traces set
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
            yield changed
        finally:
            for module, attribute, value in replaced:
                setattr(module, attribute, value)


@contextlib.contextmanager
def program_0_last() -> Iterator[None]:
    """Run program 0 of each grid after all others, so that it advances the epoch as it does on GPUs.

    Not where a fault is expected: then program 0 must see early that a header differs. Nor in calls with parts of any
    sizes, in which the programs wait for the sizes that program 0 of each rank sends.
    """
    from triton.runtime.interpreter import interpreter_builder

    from shotcast.transport.triton import sync

    in_order = interpreter_builder.set_grid_idx

    def rotated(x: int, y: int, z: int) -> None:
        in_order((x + 1) % interpreter_builder.grid_dim[0], y, z)

    with (
        mock.patch.object(interpreter_builder, "set_grid_idx", rotated),
        mock.patch.object(sync, "SERIAL", type(sync.SERIAL)(False)),
    ):
        yield


def tensors_of(plan: CallPlan, rank: int, world_size: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if plan.op is Op.BARRIER:
        return None, None
    dtype = getattr(torch, plan.dtype)
    if plan.op is Op.ALL_TO_ALL_UNEVEN:
        sent, received = sum(plan.sizes[:world_size]), sum(plan.sizes[world_size:])
        return torch.full((sent,), rank + 1).to(dtype), torch.empty(received, dtype=dtype)
    count = plan.nbytes // dtype.itemsize
    part = count // world_size
    x = torch.full((count,), rank + 1).to(dtype)
    if plan.op is Op.ALL_GATHER:
        return x[: plan.sizes[rank] if plan.sizes else part], torch.empty(count, dtype=dtype)
    if plan.op is Op.REDUCE_SCATTER:
        return x, torch.empty(part, dtype=dtype)
    if plan.op in (Op.SEND, Op.RECV):
        return (x, None) if plan.op is Op.SEND else (None, x)
    return x, torch.empty(count, dtype=dtype)


def norm_tensors(plan: CallPlan) -> NormTensors:
    assert plan.norm is not None
    dtype, hidden = getattr(torch, plan.dtype), plan.norm.hidden
    rows = plan.nbytes // DTYPES[plan.dtype] // hidden
    residual = torch.ones(rows, hidden, dtype=dtype)
    return NormTensors(
        residual,
        residual[0].clone(),
        1e-5,
        torch.empty_like(residual),
        normed=torch.empty(rows, hidden, dtype=dtype) if plan.norm.keeps_normed else None,
        quantized=torch.empty(rows, hidden, dtype=torch.float8_e4m3fn) if plan.norm.quantize else None,
        scale=torch.ones(rows, 1) if plan.norm.quantize else None,
    )


def traced(plans: list[list[CallPlan | None]], circumstances: Circumstances) -> list[Event]:
    """Make the calls of this rank, ``plans[rank]`` (None: it takes no part), and return their trace.

    A changed kernel may hang: then the trace ends with the call that the deadline has ended.
    """
    if circumstances.multicast:
        events: list[Event] = with_multicast(_traced, plans, circumstances)
        return events
    return _traced(plans, circumstances)


def _traced(plans: list[list[CallPlan | None]], circumstances: Circumstances) -> list[Event]:
    from shotcast.transport.triton import layout, send_recv, sync

    layout.CHANNELS, send_recv.CHANNELS = CHANNELS, type(send_recv.CHANNELS)(CHANNELS)  # type: ignore[misc]
    import_kernels()
    change, timeout_s = circumstances.change, circumstances.timeout_s
    tells_sizes = any(plan and plan.op is Op.ALL_TO_ALL_UNEVEN for calls in plans for plan in calls)
    with (
        mock.patch.object(layout, "COPIES", COPIES),
        mock.patch.object(sync, "COPIES", type(sync.COPIES)(COPIES)),
        program_0_last() if timeout_s >= 2.0 and not tells_sizes else contextlib.nullcontext(),
        changed_kernels(change) if change else contextlib.nullcontext() as changed,
        mock.patch.object(wire, "_MOST_MORE_BYTES", -1) if circumstances.two_steps else contextlib.nullcontext(),
        shotcast.Communicator(device="cpu", timeout_s=timeout_s, max_bytes=1 << 14, exclusive=True) as comm,
    ):
        executor: Any = comm._executor
        if circumstances.clears_from is not None:
            clear_after_read_from(comm, circumstances.clears_from)
        # each program is to wait for the kernel before, as if that could still run
        (workspace,) = executor.workspaces
        workspace.context = dataclasses.replace(workspace.context, pdl=True)
        silent_rank, silent_call = circumstances.silent or (-1, -1)
        recorder = Recorder(executor, silent_call if comm.rank == silent_rank else None)
        expects_fault = timeout_s < 2.0
        recorder.withholds = not expects_fault
        comm._host.barrier()
        recorder.install(changed)
        try:
            more = 1 if expects_fault else 0  # calls after a fault
            for number, plan in enumerate(plans[comm.rank]):
                if plan is None or (executor.fault() is not None and not more):
                    continue
                more -= executor.fault() is not None
                named = dataclasses.replace(plan, op=Op.SEND, root=comm.rank) if plan.op is Op.SEND else plan
                recorder.begin(number, plan, tuple(workspace.context.header_of(named)))
                x, out = tensors_of(plan, comm.rank, comm.world_size)
                if circumstances.mapped:
                    assert x is not None
                    assert out is not None
                    if comm.rank in circumstances.mapped:
                        x, out = (comm.empty(*one.shape, dtype=one.dtype).copy_(one) for one in (x, out))
                    recorder.see(comm, {"x": x, "out": out})
                norm = norm_tensors(plan) if plan.norm else None
                run_call(executor, plan, x, None if norm else out, norm)
        finally:
            recorder.remove()
        comm._host.barrier()
        if change is None and not expects_fault:
            assert executor.fault() is None
        return recorder.events
