"""The harness of ``shotcast bench`` with fused operations, work between calls, and host time.

With ``between``, each round also times the same calls in alternation with a matrix product that writes the tensor they
read (:mod:`call_modes.gemm`), and the product by itself. A rank's time for a call is then the sample of the alternation
minus that rank's median for the product.

With ``host``, the harness instead measures how long the host takes to make a call, without waiting for the GPU
(:func:`call_modes.host_time.host`), and how often the calls allocate GPU memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from call_modes import host_time, names
from call_modes.fused_case import FusedCase
from call_modes.gemm import MeasuredGemm
from call_modes.mode_config import ModeConfig
from call_modes.registered_nccl import RegisteredNccl
from call_modes.rows import MEASURES, CallRow
from shotcast.bench import baselines, harness, implementations, timers
from shotcast.bench.baselines import BenchCall
from shotcast.bench.cases import Case
from shotcast.bench.harness import ROUNDS, ControlGroup, RankHarness
from shotcast.launcher.spawn import spawn

_WORK_ALONE = ""

_Task = tuple[str, str]
"""A timed task: the measure, and the implementation (empty for the work without calls)."""


def run(config: ModeConfig, world_size: int) -> list[CallRow]:
    """Start ``world_size`` ranks and measure; a baseline that needs another environment gets separate ranks."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name in config.implementations():
        groups.setdefault(tuple(implementations.NCCL_SETTINGS.get(name, {}).items()), []).append(name)
    rows: list[CallRow] = []
    for setting, of_setting in groups.items():
        extra = baselines.NCCL_FAVOURABLE | dict(setting)
        rows += spawn(measure, world_size, config, tuple(of_setting), timeout_s=config.timeout_s, env=extra)[0]
    order = {name: number for number, name in enumerate(config.implementations())}
    return sorted(rows, key=lambda row: (MEASURES.index(row.measure), row.nbytes, order[row.algorithm]))


def measure(config: ModeConfig, measured: tuple[str, ...]) -> list[CallRow]:
    """Measure on this rank; all rows are returned on every rank."""
    of_rank = ModeHarness(config, measured, *harness.join(config.device))
    try:
        return list(of_rank.rows())
    finally:
        of_rank.close()


class ModeHarness(RankHarness):
    """The harness of one rank."""

    config: ModeConfig

    def __init__(
        self,
        config: ModeConfig,
        measured: tuple[str, ...],
        device: Any,
        group: dist.ProcessGroup,
        control: ControlGroup,
    ):
        communicates = (implementations.AUTO,) if any(names.is_own(name) for name in measured) else ()
        super().__init__(config, (*measured, *communicates), device, group, control)
        self.names = tuple(name for name in measured if name != names.NCCL_SYMMETRIC)
        self._registered: RegisteredNccl | None = None
        if names.NCCL_SYMMETRIC in measured:
            self._registered = RegisteredNccl(group, max(config.nbytes(control.world_size)), self.context.dtype, device)

    def close(self) -> None:
        if self._registered is not None:
            self._registered.close()
        super().close()

    def _case(self, nbytes: int, seed: int) -> Case:
        if self.config.fused:
            return FusedCase(self.context, self.config.op, nbytes, self.config.hidden, seed)
        return super()._case(nbytes, seed)

    def _size(self, nbytes: int, seed: int) -> Iterator[CallRow]:
        config = self.config
        case = self._case(nbytes, seed)
        calls = case.calls(self.names)
        if self._registered is not None:
            calls.append(self._registered.call(names.NCCL_SYMMETRIC, case.x))
        reference = case.reference() if config.check else None
        errors: dict[str, int | None] = {call.name: None for call in calls}
        for call in calls:
            errors[call.name] = self._call_once(call, reference)
        timed = [call for call in calls if not errors[call.name]]
        work = self._work(nbytes)
        samples, allocated = self._tasks(timed, work, case)
        if self.context.comm is not None:
            self.context.comm.check()  # the replay of a graph does not report a fault by itself
        if work is not None:
            case.x.copy_(case._input(self.context.rank))  # work has overwritten it
        for call in timed:
            errors[call.name] = self._call_once(call, reference)
        mode = "graph" if self.device.type == "cuda" and not (config.eager or config.host) else "eager"
        alone = [self.control.gather(float(np.median(samples[task]))) for task in samples if task[1] == _WORK_ALONE]
        for of_measure in config.measures:
            for call in calls:
                right = call in timed and not errors[call.name]
                between = of_measure == "between" and work is not None
                yield CallRow.from_ranks(
                    **self._gathered(samples[of_measure, call.name] if right else None),
                    op=config.op,
                    device=config.device,
                    world_size=self.control.world_size,
                    dtype=config.dtype,
                    algorithm=call.name,
                    nbytes=nbytes,
                    errors=errors[call.name],
                    measure=of_measure,
                    hidden=config.hidden,
                    work=work.name if between and work is not None else "",
                    works_us=alone[0] if between and right else (),
                    allocations=allocated.get(call.name) if right else None,
                    nodes=config.nodes,
                    reduction=config.reduction,
                    chosen=case.chosen(mode) if call.name == implementations.AUTO else "",
                )

    def _work(self, nbytes: int) -> MeasuredGemm | None:
        config, context = self.config, self.context
        if not config.between:
            return None
        tokens = nbytes // (context.dtype.itemsize * config.hidden)
        inner = config.inner or max(1, config.hidden // context.world_size)
        return MeasuredGemm(tokens, inner, config.hidden, context.dtype, self.device)

    def _tasks(
        self, calls: Sequence[BenchCall], work: MeasuredGemm | None, case: Case
    ) -> tuple[dict[_Task, np.ndarray], dict[str, int]]:
        """Return this rank's samples in microseconds per call, and the number of allocations in timed calls of all
        ranks.
        """
        task_timers: dict[_Task, timers.Timer] = {}
        in_place = {}
        for call in calls:
            task = (self.config.measures[0], call.name)
            if call.load is not None:
                in_place[task] = call.source.zero_()
            task_timers[task] = self._timer(call.run)
        if work is not None:
            task_timers["between", _WORK_ALONE] = self._timer(lambda: work(case.x))
            for call in calls:
                task_timers["between", call.name] = self._timer(functools.partial(_work_and_call, work, call))
        samples: dict[_Task, list[np.ndarray]] = {task: [] for task in task_timers}
        allocated: dict[str, int] = {}
        for _ in range(ROUNDS):
            for task, timer in task_timers.items():
                if task in in_place:
                    in_place[task].zero_()
                self.control.barrier()
                before = host_time.allocations(self.device)
                samples[task].append(timer())
                after = host_time.allocations(self.device)
                if self.config.host and before is not None and after is not None:
                    allocated[task[1]] = allocated.get(task[1], 0) + after - before
        joined = {task: np.concatenate(parts) for task, parts in samples.items()}
        if work is not None:
            alone_us = np.median(joined["between", _WORK_ALONE])
            for call in calls:
                joined["between", call.name] -= alone_us
        return joined, {name: sum(self.control.gather(count)) for name, count in allocated.items()}

    def _timer(self, run: Callable[[], Any]) -> timers.Timer:
        if self.config.host:
            return host_time.host(run, self._calls_per_round(run), self._synchronize)
        return super()._timer(run)


def _work_and_call(work: MeasuredGemm, call: BenchCall) -> None:
    work(call.source)
    call.run()
