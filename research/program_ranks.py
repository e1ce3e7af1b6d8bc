"""Ranks that run programs by a backend of torch.distributed and compare what they get with plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import struct
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist
from program_draw import draw
from program_steps import (
    FACTOR,
    STREAMS,
    Capture,
    Collective,
    Fill,
    Group,
    HostSleep,
    Messages,
    Product,
    Program,
    Replay,
    Shorten,
    Step,
    StreamSleep,
    Wait,
    every_step,
    written,
)
from program_values import Expected, concerns, pattern, shorten_

from shotcast.collectives.rank_device import gpu_of
from shotcast.process_group.registration import register

GROUPS_KEPT = 100
"""Programs after which groups are made anew."""
PLACE = struct.Struct("=qqqd")
"""The place of a rank: program, step, step in a graph, and when it came there."""
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "avg": dist.ReduceOp.AVG,
}


@dataclass(frozen=True)
class Orders:
    """The purpose of a set of ranks.

    Attributes:
        device: ``cpu`` or ``cuda``.
        backend: of torch.distributed.
        timeout_s: of its groups.
        plant: called before the first program, for tests.
    """

    device: str
    backend: str
    timeout_s: float
    plant: Callable[[], None] | None = None


class Place:
    """The place of this rank, in a file that its parent reads."""

    def __init__(self, path: str, rank: int):
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._offset = rank * PLACE.size

    def at(self, number: int, step: int = -1, inner: int = -1) -> None:
        PLACE.pack_into(self._memory, self._offset, number, step, inner, time.monotonic())


def serve(orders: Orders, address: str, places: str) -> None:
    """Run what the parent sends: numbers of programs or a program; tell it how each ended."""
    rank = int(os.environ["RANK"])
    with Client(address, "AF_UNIX") as parent:
        parent.send(rank)
        ranks = Ranks(orders, Place(places, rank))
        parent.send("ready")
        while True:
            order = parent.recv()
            if order is None:
                return dist.destroy_process_group()
            seed, numbers, given = order
            for number in numbers:
                program = given or draw(seed, number, orders.device, ranks.world_size)
                try:
                    wrong = ranks.run(program, number)
                except Exception:
                    parent.send((number, "error", traceback.format_exc()))
                    return time.sleep(3600)  # the groups are of no use now, and the parent ends this process
                if wrong:
                    parent.send((number, "wrong", "\n".join(wrong)))
                    break
            else:
                parent.send("done")


class Ranks:
    """This rank, for one program after the other."""

    def __init__(self, orders: Orders, place: Place):
        warnings.filterwarnings("ignore", ".* is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", message=".*barrier.*device.*", category=UserWarning)
        self.orders, self.place = orders, place
        self.device = torch.device("cpu")
        self.streams: list[torch.cuda.Stream] = []
        if orders.device == "cuda":
            self.device = torch.device("cuda", gpu_of(int(os.environ["LOCAL_RANK"])))
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False
            self.streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
            self.capturing = torch.cuda.Stream()
        else:
            torch.set_num_threads(1)
        if orders.backend == "shotcast":
            register()
        self.timeout = timedelta(seconds=orders.timeout_s)
        dist.init_process_group(orders.backend, timeout=self.timeout)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.groups: dict[Group, Any] = {}
        self.period = -1
        if orders.plant is not None:
            orders.plant()
        gc.collect()
        gc.freeze()  # captures collect garbage

    def group(self, group: Group) -> Any:
        """Return a process group; all ranks make it at once."""
        if group.copy == 0 and len(group.ranks) == self.world_size:
            return None
        if group not in self.groups:
            self.groups[group] = dist.new_group(list(group.ranks), timeout=self.timeout)
        return self.groups[group]

    def renew(self, number: int) -> None:
        """Make groups anew after some programs."""
        if number // GROUPS_KEPT != self.period:
            self.period = number // GROUPS_KEPT
            for group in self.groups.values():
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(group)
            self.groups = {}

    def run(self, program: Program, number: int) -> list[str]:
        """Run a program. Return what came out wrong."""
        self.place.at(number)
        self.renew(number)
        run = Run(self, program, [self.group(group) for group in program.groups])
        for index, step in enumerate(program.steps):
            self.place.at(number, index)
            run.inner = functools.partial(self.place.at, number, index)
            if concerns(step, self.rank, program):
                run.make(step)
        self.place.at(number, len(program.steps))
        run.settle()
        return run.wrong()


class Run:
    """A program on this rank."""

    def __init__(self, ranks: Ranks, program: Program, groups: list[Any]):
        self.ranks, self.program, self.groups, self.device = ranks, program, groups, ranks.device
        self.rank = ranks.rank
        self.inner: Callable[[int], None] = lambda inner: None
        self.slots = [self._pattern(number, 0) for number in range(len(program.slots))]
        fills = {(one.slot, one.value) for one in every_step(program.steps) if isinstance(one, Fill)}
        self.fills = {fill: self._pattern(*fill) for fill in fills}
        self.products = {
            id(one): product_of(one.size, self.device.type)
            for one in every_step(program.steps)
            if isinstance(one, Product)
        }
        self.outs = {key: torch.zeros_like(product[2]) for key, product in self.products.items()}
        self.works: dict[int, Any] = {}
        self.kept: list[torch.Tensor] = []
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.calls = {getattr(one, "label", 0): one for one in every_step(program.steps) if not isinstance(one, Wait)}
        self.capturing = False
        self.last = [ranks.streams[0] if ranks.streams else None for _ in self.slots]
        if ranks.streams:
            for stream in (*ranks.streams[1:], ranks.capturing):
                stream.wait_stream(ranks.streams[0])

    def _pattern(self, slot: int, value: int) -> torch.Tensor:
        return pattern(self.program.slots[slot], slot, self.rank, value, self.device)

    # -- streams ------------------------------------------------------------------------------------------------------

    def on(self, step: Any) -> Any:
        """Return the context of a step's stream."""
        if not self.ranks.streams or self.capturing:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.ranks.streams[step.stream])

    def follow(self, slots: tuple[int, ...]) -> None:
        """Let the current stream wait for those that used the slots last."""
        if self.ranks.streams and not self.capturing:
            current = torch.cuda.current_stream()
            for slot in slots:
                if self.last[slot] != current:
                    current.wait_stream(self.last[slot])
                    self.last[slot] = current

    def keep(self, step: Any) -> None:
        if step.keep:
            for slot in written(step, self.program.steps):
                self.kept.append(self.slots[slot].clone())

    # -- steps --------------------------------------------------------------------------------------------------------

    def make(self, step: Step) -> None:
        if isinstance(step, HostSleep):
            time.sleep(step.ms / 1000)
        elif isinstance(step, Capture):
            self.capture(step)
        elif isinstance(step, Replay):
            with self.on(step):
                self.follow(self.used(step.graph))
                self.graphs[step.graph].replay()
                self.keep(step)
        elif isinstance(step, Wait):
            call = self.calls[step.label]
            with self.on(step):
                for work in self.works.pop(step.label):
                    work.wait()
                if self.ranks.streams and not self.capturing:
                    for slot in call.slots:
                        self.last[slot] = torch.cuda.current_stream()
                self.keep(step)
        else:
            with self.on(step):
                self.compute(step)

    def used(self, graph: int) -> tuple[int, ...]:
        """Return the slots of a graph."""
        capture = next(one for one in self.program.steps if isinstance(one, Capture) and one.graph == graph)
        found: set[int] = set()
        for step in capture.steps:
            found |= set(getattr(step, "slots", ())) | ({step.slot} if isinstance(step, Fill | Shorten) else set())
        return tuple(sorted(found))

    def compute(self, step: Step) -> None:
        if isinstance(step, Fill):
            self.follow((step.slot,))
            self.slots[step.slot].copy_(self.fills[step.slot, step.value])
        elif isinstance(step, Shorten):
            self.follow((step.slot,))
            shorten_(self.slots[step.slot])
        elif isinstance(step, Product):
            a, b, _ = product_of(step.size, self.device.type)
            torch.mm(a, b, out=self.outs[id(step)])
        elif isinstance(step, StreamSleep):
            torch.cuda._sleep(step.cycles)
        elif isinstance(step, Messages):
            self.follow(step.slots)
            self.messages(step)
            self.keep(step)
        elif isinstance(step, Collective):
            self.follow(step.slots)
            work = call(step, self.groups[step.group], self.program, self.slots, self.rank)
            if step.label:
                self.works[step.label] = [work]
            self.keep(step)

    def messages(self, step: Messages) -> None:
        group, m = self.groups[step.group], step.elements
        ranks = self.program.groups[step.group].ranks
        source, target = (self.slots[slot] for slot in step.slots)
        sent = [(source[b * m : (b + 1) * m], ranks[b]) for a, b in step.pairs if ranks[a] == self.rank]
        came = [(target[a * m : (a + 1) * m], ranks[a]) for a, b in step.pairs if ranks[b] == self.rank]
        if step.form == "batch":
            ops = [dist.P2POp(dist.isend, x, peer, group) for x, peer in sent]
            ops += [dist.P2POp(dist.irecv, x, peer, group) for x, peer in came]
            works = dist.batch_isend_irecv(ops)
        elif step.label:
            works = [dist.isend(x, peer, group) for x, peer in sent]
            works += [dist.irecv(x, peer, group) for x, peer in came]
        else:
            works = []
            for x, peer in sent:
                dist.send(x, peer, group)
            for x, peer in came:
                dist.recv(x, peer, group)
        if step.label:
            self.works[step.label] = works
        else:
            for work in works:
                work.wait()

    def capture(self, step: Capture) -> None:
        """Make the steps on the stream of captures, and then capture them there."""
        part = replace(self.program, steps=step.steps)  # whose waits are for calls of the graph
        with torch.cuda.stream(self.ranks.capturing):
            self.follow(self.used(step.graph))
        for captured in (False, True):
            graph = torch.cuda.CUDAGraph()
            stream = self.ranks.capturing
            with torch.cuda.graph(graph, stream=stream) if captured else torch.cuda.stream(stream):
                self.capturing = True
                for number, one in enumerate(step.steps):
                    self.inner(number)
                    if concerns(one, self.rank, part):
                        self.make(one)
                self.capturing = False
        self.graphs[step.graph] = graph

    def settle(self) -> None:
        """Wait for everything."""
        for works in self.works.values():
            for work in works:
                work.wait()
        if self.ranks.streams:
            torch.cuda.synchronize()

    def wrong(self) -> list[str]:
        """Return how results differ from what plain PyTorch computes."""
        expected = Expected(self.program, self.rank, self.device)
        found = []
        for number, (x, wanted) in enumerate(zip(self.kept, expected.kept, strict=True)):
            found += difference(f"kept result {number}", x, wanted)
        for number, (x, wanted) in enumerate(zip(self.slots, expected.values[self.rank], strict=True)):
            found += difference(f"slot {number} at the end", x, wanted)
        for number, (x, product) in enumerate(zip(self.outs.values(), self.products.values(), strict=True)):
            found += difference(f"product {number}", x.flatten(), product[2].flatten())
        return [f"rank {self.rank}: {one}" for one in found]


def difference(name: str, x: torch.Tensor, wanted: torch.Tensor | None) -> list[str]:
    if wanted is None or torch.equal(x, wanted):
        return []
    places = (x != wanted).nonzero().flatten()
    first = int(places[0])
    return [
        f"{name} ({x.dtype}, {x.numel()} elements): {len(places)} differ, the first at {first}: "
        f"{x[first].item()} instead of {wanted[first].item()}"
    ]


@functools.cache
def product_of(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices and their product, whose values bfloat16 has exactly."""
    at = torch.device(device)
    i, j = torch.arange(size, device=at)[:, None], torch.arange(size, device=at)[None, :]
    a, b = ((i + j) % max(1, size // 64) == 0).float(), ((i * 3 + j) % 4).float()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return a.to(dtype), b.to(dtype), (a @ b).to(dtype)


def call(step: Collective, group: Any, program: Program, slots: list[torch.Tensor], rank: int) -> Any:
    """Make a collective call."""
    ranks, m, started = program.groups[step.group].ranks, step.elements, bool(step.label)
    size, place = len(ranks), ranks.index(rank)
    xs = [slots[slot] for slot in step.slots]
    root = ranks[step.root]
    how = {"group": group, "async_op": started}
    op: Any = REDUCE_OPS.get(step.reduction)
    if step.reduction == "premul":
        op = dist._make_nccl_premul_sum(FACTOR)
    if step.op == "barrier":
        return dist.barrier(group=group)
    if step.op == "all_reduce":
        return dist.all_reduce(xs[0][:m], op, **how)
    if step.op == "broadcast":
        return dist.broadcast(xs[0][:m], root, **how)
    if step.op == "reduce":
        return dist.reduce(xs[0][:m], root, op, **how)
    if step.op == "all_gather":
        return dist.all_gather_into_tensor(xs[1][: size * m], xs[0][:m], **how)
    if step.op == "all_gather_list":
        return dist.all_gather(list(xs[1][: size * m].split(m)), xs[0][:m], **how)
    if step.op == "reduce_scatter":
        return dist.reduce_scatter_tensor(xs[1][:m], xs[0][: size * m], op, **how)
    if step.op == "all_to_all":
        return dist.all_to_all_single(xs[1][: size * m], xs[0][: size * m], **how)
    if step.op == "all_to_all_uneven":
        sent, came = list(step.sizes[place]), [row[place] for row in step.sizes]
        return dist.all_to_all_single(xs[1][: sum(came)], xs[0][: sum(sent)], came, sent, **how)
    if step.op == "gather":
        return dist.gather(xs[0][:m], list(xs[1][: size * m].split(m)) if rank == root else None, root, **how)
    if step.op == "scatter":
        return dist.scatter(xs[1][:m], list(xs[0][: size * m].split(m)) if rank == root else None, root, **how)
    with dist._coalescing_manager(group, async_ops=started) as together:
        if step.op == "all_reduce_coalesced":
            for x in xs:
                dist.all_reduce(x[:m], op, group)
        for x, out in zip(xs[::2], xs[1::2], strict=False):
            if step.op == "all_gather_coalesced":
                dist.all_gather_into_tensor(out[: size * m], x[:m], group)
            if step.op == "reduce_scatter_coalesced":
                dist.reduce_scatter_tensor(out[:m], x[: size * m], op, group)
    return together
