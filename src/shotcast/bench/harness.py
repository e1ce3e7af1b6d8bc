"""The one timing harness: correct before timed, all contenders of a size in turn, the slowest rank counts.

Method, for each message size:

1. Every contender makes one call on the same random tensors. Results are compared with a float64 reference. A wrong one
   is reported and not timed.
2. Warm-up; its duration, the slowest rank's, sets how many calls fit the time budget of the point.
3. Contenders are timed in turn, in :data:`ROUNDS` rounds, so that a disturbance of the machine meets them all.
   CUDA: calls are captured in one graph; replays are enqueued back to back, and CUDA events between them are read
   afterwards (``eager`` times calls one by one instead). CPU: a clock before and after each call.
4. Every contender makes one more call, whose results are compared.

A time is the median of one rank's samples, and the largest of those medians over all ranks. For CUDA a sample is a
replay's time divided by its calls; replays that started a round are left out, as they hold the ranks' different starts.
Calls that add in place (``torch.distributed.all_reduce``) run on zeros while timed, or values would overflow.

``between``: in the same rounds, the same calls are also timed in alternation with a matrix product that writes the
tensor they read (:mod:`shotcast.bench.work`), and so is the product alone. A rank's time of a call is the sample of the
alternation less that rank's median of the product alone.

``host``: instead, the time the host spends on a call, without waiting for the GPU (:func:`shotcast.bench.timers.host`),
and how often the calls took memory of the GPU's allocator.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shotcast import env
from shotcast.bench import baselines, contenders, timers
from shotcast.bench.baselines import Call
from shotcast.bench.cases import Case, Place, Reference
from shotcast.bench.fused_case import FusedCase
from shotcast.bench.plan import MIN_CALLS, BenchPlan
from shotcast.bench.report import MEASURES, Row
from shotcast.bench.work import Gemm
from shotcast.collectives.communicator import DEFAULT_MAX_BYTES, Communicator
from shotcast.errors import ConfigError
from shotcast.launcher.spawn import spawn
from shotcast.units import format_size

ROUNDS = 3
RENDEZVOUS_TIMEOUT_S = 60.0
_WORK_ALONE = ""

_Task = tuple[str, str]
"""What is timed: measure and contender; the work alone has no contender."""


def run(plan: BenchPlan, world_size: int) -> list[Row]:
    """Start ``world_size`` ranks and measure; a baseline that needs another environment gets ranks of its own."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name in plan.contenders():
        groups.setdefault(tuple(contenders.NCCL_SETTINGS.get(name, {}).items()), []).append(name)
    rows: list[Row] = []
    for setting, names in groups.items():
        extra = baselines.NCCL_FAVOURABLE | dict(setting)
        rows += spawn(measure, world_size, plan, tuple(names), timeout_s=plan.timeout_s, env=extra)[0]
    order = {name: number for number, name in enumerate(plan.contenders())}
    return sorted(rows, key=lambda row: (MEASURES.index(row.measure), row.nbytes, order[row.algorithm]))


def run_under_torchrun(plan: BenchPlan) -> list[Row]:
    """Measure with the ranks that are there already. All of them call this; all get the rows."""
    if fixed := [name for name in plan.algorithms if name in contenders.NCCL_SETTINGS]:
        variables = sorted({variable for name in fixed for variable in contenders.NCCL_SETTINGS[name]})
        raise ConfigError(
            f"{', '.join(fixed)} need ranks started with {', '.join(variables)} set; run without torchrun, or set it "
            "and name nccl"
        )
    # Nobody watches these ranks as spawn watches its own.
    faulthandler.dump_traceback_later(plan.timeout_s, exit=True)
    try:
        return measure(plan, tuple(name for name in plan.contenders() if name not in contenders.NCCL_SETTINGS))
    finally:
        faulthandler.cancel_dump_traceback_later()


def measure(plan: BenchPlan, names: tuple[str, ...]) -> list[Row]:
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
    bench = _Rank(plan, names, device, group, _Control(group))
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
        names: tuple[str, ...],
        device: torch.device,
        group: dist.ProcessGroup,
        control: _Control,
    ):
        self.plan, self.names, self.device, self.control = plan, names, device, control
        dtype = getattr(torch, plan.dtype)
        largest = max(plan.nbytes(control.world_size))
        comm: Communicator | None = None
        if any(contenders.is_own(name) for name in names):
            comm = Communicator(device=plan.device, max_bytes=_workspace(plan.device, largest))
        symmetric = nccl_memory = None
        if any(contenders.is_torch(name) for name in names):
            symmetric = baselines.SymmetricMemoryOps(group, largest, dtype, device)
        if contenders.NCCL_SYMMETRIC in names:
            nccl_memory = baselines.NcclMemory(group, largest, dtype, device)
        self.place = Place(device, dtype, control.rank, control.world_size, group, comm, symmetric, nccl_memory)

    def close(self) -> None:
        if self.place.nccl_memory is not None:
            self.place.nccl_memory.close()
        if self.place.comm is not None:
            self.place.comm.close()

    def rows(self) -> Iterator[Row]:
        sizes = self.plan.nbytes(self.control.world_size)
        with _progress(self.plan.progress and self.control.rank == 0, len(sizes)) as advance:
            for number, nbytes in enumerate(sizes):
                advance(f"{self.control.world_size} ranks, {format_size(nbytes)}")
                yield from self._size(nbytes, seed=number)

    # --- one size -----------------------------------------------------------------------------------------------------

    def _size(self, nbytes: int, seed: int) -> Iterator[Row]:
        plan = self.plan
        here = self._case(nbytes, seed)
        calls = here.calls(self.names)
        reference = here.reference() if plan.check else None
        errors: dict[str, int | None] = {call.name: None for call in calls}
        for call in calls:
            errors[call.name] = self._made_once(call, reference)
        timed = [call for call in calls if not errors[call.name]]
        work = self._work(nbytes)
        samples, taken = self._time(timed, work, here)
        if self.place.comm is not None:
            self.place.comm.check()  # a replayed graph reports nothing by itself
        if work is not None:
            here.restore()
        for call in timed:
            errors[call.name] = self._made_once(call, reference)
        alone = [self.control.gather(float(np.median(samples[task]))) for task in samples if task[1] == _WORK_ALONE]
        for measure in plan.measures:
            for call in calls:
                statistics, allocations = [], None
                if call in timed and not errors[call.name]:
                    us = samples[measure, call.name]
                    statistics = self.control.gather((float(np.median(us)), float(np.percentile(us, 99))))
                    allocations = taken.get(call.name)
                between = measure == "between" and work is not None
                yield Row.of(
                    op=plan.op,
                    device=plan.device,
                    world_size=self.control.world_size,
                    dtype=plan.dtype,
                    algorithm=call.name,
                    nbytes=nbytes,
                    medians_us=[median for median, _ in statistics],
                    p99s_us=[p99 for _, p99 in statistics],
                    errors=errors[call.name],
                    measure=measure,
                    hidden=plan.hidden,
                    work=work.name if between and work is not None else "",
                    works_us=alone[0] if between and statistics else (),
                    allocations=allocations,
                )

    def _case(self, nbytes: int, seed: int) -> Case:
        if self.plan.op in contenders.FUSED_OPS:
            return FusedCase(self.place, nbytes, self.plan.hidden, seed)
        return Case(self.place, self.plan.op, nbytes, seed)

    def _work(self, nbytes: int) -> Gemm | None:
        plan, place = self.plan, self.place
        if not plan.between:
            return None
        tokens = nbytes // (place.dtype.itemsize * plan.hidden)
        inner = plan.inner or max(1, plan.hidden // place.world_size)
        return Gemm(tokens, inner, plan.hidden, place.dtype, self.device)

    # --- correctness --------------------------------------------------------------------------------------------------

    def _made_once(self, call: Call, reference: Reference | None) -> int | None:
        """One call whose results were wiped before: how many of their elements are wrong; None without a reference."""
        call.load()
        if not call.overwrites:
            call.wipe()
        self.control.barrier()
        call.run()
        return None if reference is None else self._wrong(call, reference)

    def _wrong(self, call: Call, reference: Reference) -> int:
        """Elements beyond the error bound, on all ranks together. NaN is wrong."""
        wrong = 0
        for name, value in call.output.items():
            expected, bound = reference[name]
            right = (value.double() - expected).abs() <= bound
            wrong += int((~right).sum())
        return sum(self.control.gather(wrong))

    # --- time ---------------------------------------------------------------------------------------------------------

    def _time(
        self, calls: Sequence[Call], work: Gemm | None, here: Case
    ) -> tuple[Mapping[_Task, np.ndarray], Mapping[str, int]]:
        """This rank's samples, in microseconds of a call; and how often all ranks' timed calls allocated."""
        ready: dict[_Task, timers.Timer] = {}
        in_place: dict[_Task, torch.Tensor] = {}
        for call in calls:
            task = (self.plan.measures[0], call.name)
            if call.overwrites:
                in_place[task] = call.source.zero_()
            ready[task] = self._timer(call.run)
        if work is not None:
            ready["between", _WORK_ALONE] = self._timer(lambda: work(here.x))
            for call in calls:
                ready["between", call.name] = self._timer(lambda call=call: (work(call.source), call.run()))  # type: ignore[misc]
        samples: dict[_Task, list[np.ndarray]] = {task: [] for task in ready}
        taken: dict[str, int] = {}
        for _ in range(ROUNDS):
            for task, timer in ready.items():
                if task in in_place:
                    in_place[task].zero_()
                self.control.barrier()
                before = timers.allocations(self.device)
                samples[task].append(timer())
                after = timers.allocations(self.device)
                if self.plan.host and before is not None and after is not None:
                    taken[task[1]] = taken.get(task[1], 0) + after - before
        joined = {task: np.concatenate(parts) for task, parts in samples.items()}
        if work is not None:
            alone_us = np.median(joined["between", _WORK_ALONE])
            for call in calls:
                joined["between", call.name] -= alone_us
        return joined, {name: sum(self.control.gather(count)) for name, count in taken.items()}

    def _timer(self, run: Callable[[], Any]) -> timers.Timer:
        count = self._affordable(run)
        if self.plan.host:
            return timers.host(run, count, self._synchronize)
        if self.device.type == "cpu":
            return timers.cpu(run, count)
        return (timers.eager if self.plan.eager else timers.graph)(run, count)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _affordable(self, run: Callable[[], Any]) -> int:
        """Calls a round that fit the budget, by the slowest rank's warm-up, after a call that sets libraries up."""
        run()
        self._synchronize()
        self.control.barrier()
        start = time.perf_counter()
        for _ in range(max(1, self.plan.warmup_iters)):
            run()
        self._synchronize()
        each_s = max(self.control.gather((time.perf_counter() - start) / max(1, self.plan.warmup_iters)))
        total = min(self.plan.iters, max(MIN_CALLS, int(self.plan.budget_s / each_s)))
        return -(-total // ROUNDS)


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
