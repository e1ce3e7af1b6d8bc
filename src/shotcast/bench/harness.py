"""The timing harness: results are checked before they are timed, and the slowest rank counts.

For each message size:

1. Each implementation makes one call on the same random tensors, and its results are compared with a float64 reference.
   An implementation with wrong results is reported and not timed.
2. Each implementation is warmed up. The slowest rank's warm-up determines how many calls fit the point's time budget.
3. The implementations are timed in turn, in :data:`ROUNDS` rounds, so that a disturbance affects them all. On CUDA the
   calls are captured in one graph; replays are enqueued back to back, and CUDA events between them are read afterwards
   (``eager`` times single calls instead). On the CPU, each call is timed with a clock.
4. Each implementation makes one more call, and its results are compared again.

A time is the maximum over the ranks of each rank's median sample. On CUDA a sample is the time of a replay divided by
its number of calls. The first replay of each round is dropped because the ranks start it at different times. Calls that
add in place (``torch.distributed.all_reduce``) run on zeros while they are timed; otherwise values would overflow.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shotcast import env
from shotcast.bench import baselines, implementations, timers
from shotcast.bench.baselines import BenchCall
from shotcast.bench.cases import Case, RankContext, Reference
from shotcast.bench.config import MIN_CALLS, BenchConfig
from shotcast.bench.progress import progress
from shotcast.bench.report import Row
from shotcast.collectives.choice.select import predicted_us
from shotcast.collectives.communicator import DEFAULT_MAX_BYTES, Communicator
from shotcast.collectives.rank_device import gpu_of
from shotcast.errors import ConfigError
from shotcast.launcher.spawn import spawn
from shotcast.units import format_size
from shotcast.wire import Op

ROUNDS = 3
RENDEZVOUS_TIMEOUT_S = 60.0


def run(config: BenchConfig, world_size: int) -> list[Row]:
    """Start ``world_size`` ranks and measure; a baseline that needs another environment gets separate ranks."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name in config.implementations():
        groups.setdefault(tuple(implementations.NCCL_SETTINGS.get(name, {}).items()), []).append(name)
    rows: list[Row] = []
    for setting, names in groups.items():
        extra = baselines.NCCL_FAVOURABLE | dict(setting)
        rows += spawn(measure, world_size, config, tuple(names), timeout_s=config.timeout_s, env=extra)[0]
    order = {name: number for number, name in enumerate(config.implementations())}
    return sorted(rows, key=lambda row: (row.nbytes, order[row.algorithm]))


def run_under_torchrun(config: BenchConfig) -> list[Row]:
    """Measure on ranks that torchrun started. Every rank calls this and gets all rows."""
    if fixed := [name for name in config.algorithms if name in implementations.NCCL_SETTINGS]:
        variables = sorted({variable for name in fixed for variable in implementations.NCCL_SETTINGS[name]})
        raise ConfigError(
            f"{', '.join(fixed)} need ranks started with {', '.join(variables)} set; run without torchrun, or set the "
            "variable and name nccl"
        )
    names = (name for name in config.implementations() if name not in implementations.NCCL_SETTINGS)
    with ending_after(config.timeout_s):
        return measure(config, tuple(names))


@contextlib.contextmanager
def ending_after(timeout_s: float) -> Iterator[None]:
    """Exit if the block takes longer than ``timeout_s``, since no parent process watches the ranks of torchrun."""
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def measure(config: BenchConfig, names: tuple[str, ...]) -> list[Row]:
    """Measure on this rank; all rows are returned on every rank."""
    harness = RankHarness(config, names, *join(config.device))
    try:
        return list(harness.rows())
    finally:
        harness.close()


def join(device_name: str) -> tuple[torch.device, dist.ProcessGroup, ControlGroup]:
    """Join the job's process group; return this rank's device, the group, and a group to control measurements."""
    job = env.job()
    assert job is not None
    device = torch.device("cpu")
    if device_name == "cuda":
        device = torch.device("cuda", gpu_of(job.local_rank))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if device_name == "cpu" else "cpu:gloo,cuda:nccl",
            timeout=datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        )
    group = dist.group.WORLD
    assert group is not None
    return device, group, ControlGroup(group)


def workspace_bytes(device: str, largest: int) -> int | None:
    """Return the communicator's ``max_bytes`` for the benchmark.

    This is the default, except on CUDA if the largest message exceeds it: then it is that size, up to the
    communicator's limit.
    """
    if device == "cpu":
        return None
    return min(max(DEFAULT_MAX_BYTES["cuda"], largest), 512 << 20)


class ControlGroup:
    """A Gloo group that shares small host objects between the ranks, separate from the measured calls."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        self.rank, self.world_size = group.rank(), group.size()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.group)


class RankHarness:
    """The harness of one rank: its communicators, and the points that it measures with the other ranks."""

    def __init__(
        self,
        config: BenchConfig,
        names: tuple[str, ...],
        device: torch.device,
        group: dist.ProcessGroup,
        control: ControlGroup,
    ):
        self.config, self.names, self.device, self.control = config, names, device, control
        dtype = getattr(torch, config.dtype)
        largest = max(config.nbytes(control.world_size))
        comm: Communicator | None = None
        if any(implementations.is_own(name) for name in names):
            comm = Communicator(device=config.device, max_bytes=workspace_bytes(config.device, largest), exclusive=True)
        symmetric = None
        if any(implementations.is_torch(name) for name in names):
            symmetric = baselines.SymmetricMemoryOps(group, largest, dtype, device)
        self.context = RankContext(device, dtype, control.rank, control.world_size, group, comm, symmetric)

    def close(self) -> None:
        if self.context.comm is not None:
            self.context.comm.close()

    def rows(self) -> Iterator[Row]:
        sizes = self.config.nbytes(self.control.world_size)
        with progress(len(sizes), self.config.progress and self.control.rank == 0) as advance:
            for number, nbytes in enumerate(sizes):
                advance(f"{self.config.op} of {self.control.world_size} ranks, {format_size(nbytes)}")
                yield from self._size(nbytes, seed=number)

    # --- one size -----------------------------------------------------------------------------------------------------

    def _size(self, nbytes: int, seed: int) -> Iterator[Row]:
        config = self.config
        case = self._case(nbytes, seed)
        calls = case.calls(self.names)
        reference = case.reference() if config.check else None
        errors: dict[str, int | None] = {call.name: None for call in calls}
        for call in calls:
            errors[call.name] = self._call_once(call, reference)
        timed = [call for call in calls if not errors[call.name]]
        samples = self._time(timed)
        if self.context.comm is not None:
            self.context.comm.check()  # the replay of a graph does not report a fault by itself
        for call in timed:
            errors[call.name] = self._call_once(call, reference)
        mode = "graph" if self.device.type == "cuda" and not config.eager else "eager"
        for call in calls:
            right = call in timed and not errors[call.name]
            yield Row.from_ranks(
                **self._gathered(samples[call.name] if right else None),
                op=config.op,
                device=config.device,
                world_size=self.control.world_size,
                dtype=config.dtype,
                algorithm=call.name,
                nbytes=nbytes,
                errors=errors[call.name],
                nodes=config.nodes,
                predicted_us=self._predicted_us(call.name, case.x),
                reduction=config.reduction,
                chosen=case.chosen(mode) if call.name == implementations.AUTO else "",
            )

    def _gathered(self, samples_us: np.ndarray | None) -> dict[str, Any]:
        """Gather the statistics of all ranks for :meth:`Row.from_ranks`; none for a call that has no time."""
        if samples_us is None:
            return {"medians_us": [], "p99s_us": []}
        medians_us, p99s_us = zip(
            *self.control.gather((float(np.median(samples_us)), float(np.percentile(samples_us, 99)))), strict=True
        )
        rounds_us = self.control.gather([float(np.median(part)) for part in np.array_split(samples_us, ROUNDS)])
        return {"medians_us": medians_us, "p99s_us": p99s_us, "rounds_us": rounds_us}

    def _case(self, nbytes: int, seed: int) -> Case:
        return Case(self.context, self.config.op, nbytes, seed, self.config.reduction)

    def _predicted_us(self, name: str, x: torch.Tensor) -> float | None:
        """Predict the time of an all-reduce between nodes with the cost model; None if the model does not cover it."""
        comm, op = self.context.comm, self.config.op
        if comm is None or self.config.nodes == 1 or op != "all_reduce":
            return None
        if name == implementations.AUTO:
            name = comm.explain(x).algorithm
        algorithm = comm.topology.algorithms.get(name)
        if algorithm is None or algorithm.library:
            return None
        return predicted_us(comm.topology, Op.ALL_REDUCE, self.config.dtype, x.nbytes, name)

    # --- correctness --------------------------------------------------------------------------------------------------

    def _call_once(self, call: BenchCall, reference: Reference | None) -> int | None:
        """Make one call after wiping its results; return the number of wrong elements, or None without a reference."""
        (call.load or call.wipe)()
        self.control.barrier()
        call.run()
        return None if reference is None else self._wrong(call, reference)

    def _wrong(self, call: BenchCall, reference: Reference) -> int:
        """Count the elements beyond the error bound over all ranks. NaN is wrong."""
        wrong = 0
        for name, value in call.output.items():
            expected, bound = reference[name]
            right = (value.double() - expected).abs() <= bound
            wrong += int((~right).sum())
        return sum(self.control.gather(wrong))

    # --- time ---------------------------------------------------------------------------------------------------------

    def _time(self, calls: Sequence[BenchCall]) -> dict[str, np.ndarray]:
        """Return this rank's samples in microseconds per call, by implementation."""
        call_timers: dict[str, timers.Timer] = {}
        for call in calls:
            if call.load is not None:
                call.source.zero_()
            call_timers[call.name] = self._timer(call.run)
        samples: dict[str, list[np.ndarray]] = {call.name: [] for call in calls}
        for _ in range(ROUNDS):
            for call in calls:
                if call.load is not None:
                    call.source.zero_()
                self.control.barrier()
                samples[call.name].append(call_timers[call.name]())
        return {name: np.concatenate(parts) for name, parts in samples.items()}

    def _timer(self, run: Callable[[], Any]) -> timers.Timer:
        count = self._calls_per_round(run)
        if self.device.type == "cpu":
            return timers.cpu(run, count)
        return (timers.eager if self.config.eager else timers.graph)(run, count)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _calls_per_round(self, run: Callable[[], Any]) -> int:
        """Return how many calls of a round fit the budget, based on the slowest rank's warm-up.

        One call precedes the warm-up to initialize libraries.
        """
        run()
        self._synchronize()
        self.control.barrier()
        start = time.perf_counter()
        for _ in range(max(1, self.config.warmup_iters)):
            run()
        self._synchronize()
        each_s = max(self.control.gather((time.perf_counter() - start) / max(1, self.config.warmup_iters)))
        total = min(self.config.iters, max(MIN_CALLS, int(self.config.budget_s / each_s)))
        return -(-total // ROUNDS)
