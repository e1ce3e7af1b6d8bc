"""The one timing harness: correct before timed, all contenders of a size in turn, the slowest rank counts.

Method, for each message size:

1. Every contender makes one call on the same random tensors. Results are compared with a float64 sum. A wrong one is
   reported and not timed.
2. Warm-up; its duration, the slowest rank's, sets how many calls fit the time budget of the point.
3. Contenders are timed in turn, in :data:`ROUNDS` rounds, so that a disturbance of the machine meets them all.
   CUDA: calls are captured in one graph; replays are enqueued back to back, and CUDA events between them are read
   afterwards (``eager`` times calls one by one instead). CPU: a clock before and after each call.
4. Results are compared once more after timing, where a call leaves its input alone.

A time is the median of one rank's samples, and the largest of those medians over all ranks. For CUDA a sample is a
replay's time divided by its calls; replays that started a round are left out, as they hold the ranks' different starts.
Calls that add in place (``torch.distributed.all_reduce``) run on zeros while timed, or values would overflow.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shotcast import env, wire
from shotcast.bench import baselines
from shotcast.bench.report import OPS, Row
from shotcast.collectives.communicator import DEFAULT_MAX_BYTES, Communicator
from shotcast.collectives.spawn import spawn
from shotcast.errors import ConfigError
from shotcast.units import align_up, format_size

ROUNDS = 3
MIN_CALLS = 5
REPLAYS_PER_ROUND = 4
RENDEZVOUS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure; picklable, as it travels to the ranks.

    Attributes:
        sizes: bytes of the whole tensor, ascending. A size is raised to what the ranks can share out evenly.
        algorithms: own ones and baselines; empty for all that are legal.
        iters: timed calls a point at most.
        budget_s: seconds of timed calls a point and contender; at least :data:`MIN_CALLS` calls are timed.
        timeout_s: seconds for all sizes at one world size; then the ranks are ended.
    """

    op: str
    device: str
    dtype: str
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...] = ()
    iters: int = 1000
    warmup_iters: int = 5
    check: bool = True
    eager: bool = False
    budget_s: float = 0.4
    timeout_s: float = 600.0
    progress: bool = False

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ConfigError(f"there is no benchmark of {self.op!r}; there are {', '.join(OPS)}")
        if self.dtype not in wire.REDUCIBLE:
            raise ConfigError(f"dtype {self.dtype!r} is not measured; choose from {', '.join(wire.REDUCIBLE)}")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device is cpu or cuda, not {self.device!r}")
        known = (*wire.ALGORITHMS, "auto", *baselines.names(self.op, self.device))
        if unknown := [name for name in self.algorithms if name not in known]:
            raise ConfigError(
                f"unknown algorithms for {self.op} on {self.device}: {', '.join(unknown)}; known: {', '.join(known)}"
            )
        if self.iters < MIN_CALLS:
            raise ConfigError(f"a median needs at least {MIN_CALLS} timed calls, not {self.iters}")
        if self.warmup_iters < 0:
            raise ConfigError(f"warm-up calls cannot be negative: {self.warmup_iters}")
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError("message sizes start at 1 byte")

    def contenders(self) -> tuple[str, ...]:
        """Names in the order of the report. ``vendor`` is the library that stands there by its own name."""
        own = tuple(name for name in wire.ALGORITHMS if name != "vendor")
        return self.algorithms or (*own, *baselines.names(self.op, self.device))

    def nbytes(self, world_size: int) -> tuple[int, ...]:
        """Sizes that hold whole elements, equally many a rank where the tensor is shared out."""
        parts = 1 if self.op == "all_reduce" else world_size
        return tuple(dict.fromkeys(align_up(size, parts * wire.DTYPES[self.dtype]) for size in self.sizes))


def run(plan: BenchPlan, world_size: int) -> list[Row]:
    """Start ``world_size`` ranks and measure; a baseline that needs another environment gets ranks of its own."""
    settings: dict[str, list[str]] = {}
    for name in plan.contenders():
        settings.setdefault(baselines.NCCL_ALGO.get(name, ""), []).append(name)
    rows: list[Row] = []
    for nccl_algo, contenders in settings.items():
        extra = dict(baselines.NCCL_FAVOURABLE) | ({"NCCL_ALGO": nccl_algo} if nccl_algo else {})
        rows += spawn(measure, world_size, plan, tuple(contenders), timeout_s=plan.timeout_s, env=extra)[0]
    order = {name: number for number, name in enumerate(plan.contenders())}
    return sorted(rows, key=lambda row: (row.nbytes, order[row.algorithm]))


def run_under_torchrun(plan: BenchPlan) -> list[Row]:
    """Measure with the ranks that are there already. All of them call this; all get the rows."""
    contenders = plan.contenders()
    if fixed := [name for name in plan.algorithms if name in baselines.NCCL_ALGO]:
        raise ConfigError(
            f"{', '.join(fixed)} need ranks started with NCCL_ALGO set; run without torchrun, or set it and name nccl"
        )
    # Nobody watches these ranks as spawn watches its own.
    faulthandler.dump_traceback_later(plan.timeout_s, exit=True)
    try:
        return measure(plan, tuple(name for name in contenders if name not in baselines.NCCL_ALGO))
    finally:
        faulthandler.cancel_dump_traceback_later()


def measure(plan: BenchPlan, contenders: tuple[str, ...]) -> list[Row]:
    """One rank's part; every rank returns all rows."""
    job = env.job()
    assert job is not None
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", job.local_rank)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if plan.device == "cpu" else "cpu:gloo,cuda:nccl",
            timeout=datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        )
    group = dist.group.WORLD
    assert group is not None
    bench = _Rank(plan, contenders, device, group, _Control(group))
    try:
        return list(bench.rows())
    finally:
        bench.close()


def _workspace(device: str, largest: int) -> int | None:
    """What people have, unless on CUDA a size would go past it to the vendor; beyond the most there is, it may."""
    if device == "cpu":
        return None
    return min(max(DEFAULT_MAX_BYTES["cuda"], largest), 512 << 20)


class _Control:
    """Small facts that ranks share beside what is measured; by Gloo, from host memory."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        self.rank, self.world_size = group.rank(), group.size()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.group)


class _Rank:
    def __init__(
        self,
        plan: BenchPlan,
        contenders: tuple[str, ...],
        device: torch.device,
        group: dist.ProcessGroup,
        control: _Control,
    ):
        self.plan, self.contenders, self.device, self.group, self.control = plan, contenders, device, group, control
        self.dtype = getattr(torch, plan.dtype)
        largest = plan.nbytes(control.world_size)[-1]
        self.comm: Communicator | None = None
        if any(baselines.is_own(name) for name in contenders):
            self.comm = Communicator(device=plan.device, max_bytes=_workspace(plan.device, largest))
        self.symmetric: baselines.SymmetricMemoryOps | None = None
        if any(name.startswith("torch_") for name in contenders):
            self.symmetric = baselines.SymmetricMemoryOps(group, largest, self.dtype, device)

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()

    def rows(self) -> Iterator[Row]:
        sizes = self.plan.nbytes(self.control.world_size)
        with _progress(self.plan.progress and self.control.rank == 0, len(sizes)) as advance:
            for number, nbytes in enumerate(sizes):
                advance(f"{self.control.world_size} ranks, {format_size(nbytes)}")
                yield from self._size(nbytes, seed=number)

    # --- one size -----------------------------------------------------------------------------------------------------

    def _size(self, nbytes: int, seed: int) -> Iterator[Row]:
        x, out = self._tensors(nbytes, seed)
        calls = self._calls(nbytes, x, out)
        reference = self._reference(nbytes, seed) if self.plan.check else None
        errors: dict[str, int | None] = {call.name: None for call in calls}
        for call in calls:
            call.load()
            if not call.overwrites:
                call.result.fill_(float("nan"))
            call.run()
            if reference is not None:
                errors[call.name] = self._wrong(call, reference)
        timed = [call for call in calls if not errors[call.name]]
        samples = self._time(timed)
        if self.comm is not None:
            self.comm.check()  # a replayed graph reports nothing by itself
        for call in timed:
            if reference is not None and not call.overwrites:
                errors[call.name] = self._wrong_after(call, reference)
        for call in calls:
            statistics = []
            if call in timed and not errors[call.name]:
                us = samples[call.name]
                statistics = self.control.gather((float(np.median(us)), float(np.percentile(us, 99))))
            yield Row.of(
                op=self.plan.op,
                device=self.plan.device,
                world_size=self.control.world_size,
                dtype=self.plan.dtype,
                algorithm=call.name,
                nbytes=nbytes,
                medians_us=[median for median, _ in statistics],
                p99s_us=[p99 for _, p99 in statistics],
                errors=errors[call.name],
            )

    def _tensors(self, nbytes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output of this rank."""
        count, world_size = nbytes // self.dtype.itemsize, self.control.world_size
        part = count // world_size
        x = self._input(seed, self.control.rank, part if self.plan.op == "all_gather" else count)
        outputs = {"all_reduce": count, "reduce_scatter": part, "all_gather": count}
        return x, torch.empty(outputs[self.plan.op], dtype=self.dtype, device=self.device)

    def _input(self, seed: int, rank: int, count: int) -> torch.Tensor:
        """Rank ``rank``'s input: any rank can make it, so the reference needs no communication that could be wrong."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + rank)
        values = torch.empty(count, dtype=torch.float32, device=self.device)
        return values.uniform_(-1.0, 1.0, generator=generator).to(self.dtype)

    def _calls(self, nbytes: int, x: torch.Tensor, out: torch.Tensor) -> list[baselines.Call]:
        op, calls = self.plan.op, []
        legal = (*self.comm.candidates(x, op=op), "auto") if self.comm is not None else ()
        for name in self.contenders:
            if baselines.is_own(name):
                if name in legal:
                    calls.append(baselines.own(name, op, self.comm, x, torch.empty_like(out)))
            elif not baselines.serves(name, self.plan.dtype, nbytes, self.control.world_size):
                continue
            elif name.startswith("torch_"):
                assert self.symmetric is not None
                calls.append(self.symmetric.call(name, x, torch.empty_like(out)))
            else:
                calls.append(baselines.library(name, op, self.group, x, torch.empty_like(out)))
        return calls

    # --- correctness --------------------------------------------------------------------------------------------------

    def _reference(self, nbytes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank should get, in float64, and the error that any order of additions may make.

        With u the spacing of the dtype at 1, n ranks and every partial sum rounded to the dtype:
        ``|error| <= n * u * sum_r |x_r|``. Gathered data must be exact.
        """
        world_size = self.control.world_size
        count = nbytes // self.dtype.itemsize
        part = count // world_size
        if self.plan.op == "all_gather":
            parts = [self._input(seed, rank, part) for rank in range(world_size)]
            expected = torch.cat(parts).double()
            return expected, torch.zeros_like(expected)
        mine = slice(None)
        if self.plan.op == "reduce_scatter":
            mine = slice(self.control.rank * part, (self.control.rank + 1) * part)
        expected = torch.zeros(part if self.plan.op == "reduce_scatter" else count, dtype=torch.float64)
        expected = expected.to(self.device)
        magnitude = torch.zeros_like(expected)
        for rank in range(world_size):
            values = self._input(seed, rank, count)[mine].double()
            expected += values
            magnitude += values.abs()
        return expected, magnitude * (world_size * torch.finfo(self.dtype).eps)

    def _wrong(self, call: baselines.Call, reference: tuple[torch.Tensor, torch.Tensor]) -> int:
        """Elements beyond the error bound, on all ranks together. NaN is wrong."""
        expected, bound = reference
        right = (call.result.double() - expected).abs() <= bound
        return sum(self.control.gather(int((~right).sum())))

    def _wrong_after(self, call: baselines.Call, reference: tuple[torch.Tensor, torch.Tensor]) -> int:
        """One more call after all the timed ones, on a result that was wiped: what was timed must still be right."""
        call.result.fill_(float("nan"))
        self.control.barrier()
        call.run()
        return self._wrong(call, reference)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _time(self, calls: Sequence[baselines.Call]) -> dict[str, np.ndarray]:
        """Microseconds of a call by contender: this rank's samples."""
        prepare = _cpu_timer if self.device.type == "cpu" else _eager_timer if self.plan.eager else _graph_timer
        timers = {}
        for call in calls:
            if call.overwrites:
                call.result.zero_()
            timers[call.name] = prepare(call.run, self._affordable(call))
        samples: dict[str, list[np.ndarray]] = {call.name: [] for call in calls}
        for _ in range(ROUNDS):
            for name, timer in timers.items():
                self.control.barrier()
                samples[name].append(timer())
        return {name: np.concatenate(parts) for name, parts in samples.items()}

    def _affordable(self, call: baselines.Call) -> int:
        """Calls a round that fit the budget, by the slowest rank's warm-up."""
        self.control.barrier()
        start = time.perf_counter()
        for _ in range(max(1, self.plan.warmup_iters)):
            call.run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        each_s = max(self.control.gather((time.perf_counter() - start) / max(1, self.plan.warmup_iters)))
        total = min(self.plan.iters, max(MIN_CALLS, int(self.plan.budget_s / each_s)))
        return -(-total // ROUNDS)


def _cpu_timer(call: Callable[[], Any], count: int) -> Callable[[], np.ndarray]:
    def timed() -> np.ndarray:
        clock = time.perf_counter_ns
        times_ns = np.empty(count)
        for i in range(count):
            start = clock()
            call()
            times_ns[i] = clock() - start
        return times_ns / 1e3

    return timed


def _eager_timer(call: Callable[[], Any], count: int) -> Callable[[], np.ndarray]:
    def timed() -> np.ndarray:
        call()  # takes in the ranks' different starts
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        marks[-1].synchronize()
        return np.array([a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)])

    return timed


def _graph_timer(call: Callable[[], Any], count: int) -> Callable[[], np.ndarray]:
    """``count`` calls spread over :data:`REPLAYS_PER_ROUND` replays of one graph (fewer when there are fewer calls)."""
    replays = min(REPLAYS_PER_ROUND, count)
    calls_per_graph = -(-count // replays)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile; only this thread's calls must be capturable.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls_per_graph):
            call()
    graph.replay()
    torch.cuda.synchronize()

    def timed() -> np.ndarray:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        graph.replay()  # takes in the ranks' different starts
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        marks[-1].synchronize()
        return np.array([a.elapsed_time(b) * 1e3 / calls_per_graph for a, b in itertools.pairwise(marks)])

    return timed


@contextlib.contextmanager
def _progress(shown: bool, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; the function it gives ends one size and names the next."""
    if not shown:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda text: bar.update(task, description=text, advance=1)
