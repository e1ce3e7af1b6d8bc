"""Programs of ranks that compute steps with prompts in halves: on GPUs, or in the interpreter."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

import shotcast
from shotcast.engine import prefill_forms
from shotcast.engine.cuda_graphs import decode_capture_sizes
from shotcast.engine.model_runner import ModelRunner
from shotcast.engine.requests import Request
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.step_plan import ScheduledSequence, StepPlan
from shotcast.layers.linear import Linear
from shotcast.layers.parallel import Parallel
from shotcast.layers.step_timer import DeviceStepTimer, HostStepTimer
from shotcast.layers.weights import Weights
from shotcast.models.causal_lm import CausalLM
from shotcast.models.source import open_checkpoint
from shotcast.overlap.lanes import StreamLanes
from shotcast.overlap.policy import SEQUENTIAL, Decision

BLOCK, SEQUENCES = 16, 4
ROWS = 16
"""Rows of a matmul of :func:`multiply_in_equal_parts`."""


class OneThread:
    """Stands in for ``torch.cuda``: all runs at once, where it is given. The interpreter knows one thread only."""

    def __init__(self) -> None:
        self.current = mock.Mock()
        self.Stream = self.Event = lambda *_, **__: mock.Mock()

    def current_stream(self, device: torch.device) -> Any:
        return self.current

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()


class Rank:
    """A rank of a model, for which runners are made that differ in overlap.

    Args:
        sizes: numbers of tokens of graphs; the last is the most tokens of a step.
        limit: tokens of a sequence.
    """

    def __init__(
        self, folder: str, device: str, dtype: torch.dtype, sizes: tuple[int, ...], limit: int, timeout_s: float = 60.0
    ):
        if device == "cpu":
            prefill_forms.lanes_of = lambda comm: StreamLanes(comm, streams=OneThread())
            prefill_forms.LEAST_TOKENS[True] = 4
        self.sizes, self.limit = sizes, limit
        checkpoint = open_checkpoint(folder)
        self.comm = shotcast.Communicator(device=device, timeout_s=timeout_s, max_bytes=32 << 20)
        assert self.comm.explain(torch.ones(64, device=self.comm.device), sms=0).algorithm == "copy_engines"
        self.cuda = device == "cuda"
        timer = DeviceStepTimer(self.comm.device) if self.cuda else HostStepTimer()
        weights = Weights(checkpoint, dtype, self.comm.device)
        self.model = CausalLM(checkpoint.config, weights, Parallel(self.comm, timer=timer), limit, SEQUENCES)
        self.blocks = SEQUENCES * -(-limit // BLOCK)

    @contextlib.contextmanager
    def runner(self, overlap: str) -> Iterator[ModelRunner]:
        """Make a runner; ``overlap`` may also be the name of a way, which serves steps of all sizes."""
        decisions = {}
        if overlap in (SEQUENTIAL, prefill_forms.BY_COPIES):
            decisions = {size: Decision(overlap, "chosen by a test", {}, {}) for size in self.sizes}
            overlap = "auto"
        options = decode_capture_sizes(SEQUENCES), self.sizes, True, overlap, self.sizes[-1], decisions
        runner = ModelRunner(self.model, self.blocks, BLOCK, SEQUENCES, self.limit, 11, *options)
        try:
            runner.capture(stamped=False)
            yield runner
        finally:
            runner.close()

    def answers(self, runner: ModelRunner, prompts: list[list[int]], length: int) -> list[list[int]]:
        """Return the greedy answers to some prompts, which arrive one by one. On CUDA the host never waits."""
        scheduler = Scheduler(SchedulerConfig(SEQUENCES, self.sizes[-1], BLOCK, self.blocks, self.limit, lookahead=1))
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        waiting = deque(Request(str(number), tuple(prompt), params) for number, prompt in enumerate(prompts))
        found: dict[str, list[int]] = {request.request_id: [] for request in waiting}
        outstanding: deque[Any] = deque()
        while waiting or outstanding or scheduler.unfinished:
            if waiting:
                scheduler.add(waiting.popleft())
            while (plan := scheduler.schedule()) is not None:
                with self.no_wait():
                    outstanding.append(runner.execute(plan))
            output = outstanding.popleft().result()
            self.comm.check()
            for progress in scheduler.update(output):
                found[progress.request_id].extend(progress.tokens)
        return list(found.values())

    def logits(self, runner: ModelRunner, lengths: tuple[int, ...], seed: int = 1) -> torch.Tensor:
        """Return the logits after prompts of some lengths, computed in one step."""
        draw, blocks = np.random.default_rng(seed), iter(range(self.blocks))
        sequences = []
        for slot, length in enumerate(lengths):
            tokens = tuple(draw.integers(50, 400, length).tolist())
            own = tuple(next(blocks) for _ in range(-(-length // BLOCK)))
            params = SamplingParams(temperature=0.0)
            sequences.append(ScheduledSequence(slot, 0, tokens, own, True, True, params, str(slot), ()))
        with self.no_wait():
            output = runner.execute(StepPlan(0, tuple(sequences)))
        assert output is not None
        output.result()
        self.comm.check()
        logits = runner._prefill_graphs._results[_next(decode_capture_sizes(SEQUENCES), len(lengths))]  # type: ignore[union-attr]
        return logits.values[: len(lengths)].cpu()

    @contextlib.contextmanager
    def no_wait(self) -> Iterator[None]:
        """On CUDA, fail if the host waits for the device."""
        if self.cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if self.cuda:
                torch.cuda.set_sync_debug_mode("default")


def _next(sizes: tuple[int, ...], count: int) -> int:
    return next(size for size in sizes if size >= count)


def answers(
    folder: str, device: str, sizes: tuple[int, ...], limit: int, ways: tuple[str, ...], prompts: list[list[int]]
) -> dict[str, Any]:
    """Return the answers by each way, computed twice; and the decisions."""
    rank = Rank(folder, device, torch.float32, sizes, limit)
    found: dict[str, Any] = {}
    with rank.comm:
        for way in ways:
            with rank.runner(way) as runner:
                found[way] = rank.answers(runner, prompts, 4), rank.answers(runner, prompts, 4), dict(runner.overlap)
    return found


def logits(
    folder: str,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    ways: tuple[str, ...],
    steps: tuple[tuple[int, ...], ...],
) -> dict[str, list[torch.Tensor]]:
    """Return the logits of steps by each way, each step computed twice between others.

    Results of matmuls do not depend on the number of rows.
    """
    Linear._by_library = multiply_in_equal_parts  # type: ignore[method-assign,assignment]
    rank = Rank(folder, device, dtype, sizes, sizes[-1])
    found: dict[str, list[torch.Tensor]] = {}
    with rank.comm:
        for way in ways:
            with rank.runner(way) as runner:
                found[way] = [rank.logits(runner, lengths) for lengths in (*steps, *steps)]
    return found


def multiply_in_equal_parts(self: Linear, x: torch.Tensor) -> torch.Tensor:
    """Multiply a few rows at a time by the library; the number of all rows is a multiple of theirs."""
    return torch.cat([F.linear(rows, self.weight, self.bias) for rows in x.view(-1, ROWS, x.shape[1])])


def killed(folder: str, sizes: tuple[int, ...], way: str, victim: int) -> tuple[str, tuple[int, ...], str, float]:
    """Have a rank end between two steps. Return the error that the others see in the next: what, who, why, after how
    many seconds."""
    rank = Rank(folder, "cuda", torch.bfloat16, sizes, sizes[-1], timeout_s=30.0)
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(rank.runner(way))
        rank.logits(runner, (sizes[-1],))
        rank.comm._host.barrier()
        if rank.comm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            rank.logits(runner, (sizes[-1],))
        except shotcast.CollectiveTimeout as error:
            return type(error).__name__, error.missing, error.reason, time.monotonic() - started
    raise AssertionError("the step went on without a rank")
