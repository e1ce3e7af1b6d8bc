"""An engine serving requests in simulated time: the real loop and scheduler, with predicted step times.

:class:`shotcast.engine.engine_core.EngineCore` runs as it does on rank 0; its clock, its client and its ranks are
simulated. Requests arrive while it waits, and are noticed when the loop checks for them between steps. A step first
takes the host's time. Then stages work on plans in order, each as soon as it is free and the previous stage's rows have
arrived. Tokens are available once they are back at the first stage; a plan with a token that is still being sampled
waits for it. A rested GPU computes at its full clock for a while (:mod:`shotcast.cost.inference`). GPUs compute while
the loop continues; a CPU rank computes in the loop itself.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shotcast.cost.inference import FullClock
from shotcast.engine.engine_core import EngineCore
from shotcast.engine.messages import EngineCoreOutputs, RejectedRequest
from shotcast.engine.outputs import EngineCoreOutput, ModelRunnerOutput
from shotcast.engine.requests import Request
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.scheduler import Scheduler, SchedulerConfig
from shotcast.engine.step_plan import PENDING_TOKEN, StepPlan
from shotcast.errors import ConfigError


class Arrival(NamedTuple):
    """A request's arrival time and tokens."""

    time_s: float
    prompt: int
    output: int


class StepTimes(NamedTuple):
    """The time of a step in seconds."""

    stages_s: Sequence[float]  # each stage, among steps in a row
    transfers_s: Sequence[float]  # for each stage the way to the next, of the last one to the first
    host_s: float = 0.0  # rank 0 before its stage begins: it plans, and builds and enqueues the inputs
    in_loop: bool = False  # rank 0 computes the first stage itself, as on a CPU, and does nothing else meanwhile
    # what each stage takes less at the full clock of its GPUs, which they have after a rest; () for nothing
    saved_s: Sequence[float] = ()


Predict = Callable[[StepPlan], StepTimes]
"""Predicts the step times of a plan."""


@dataclass(slots=True)
class Served:
    """A served request: its arrival time, and the time of each of its tokens."""

    arrival_s: float
    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """The mean time per later token; 0 if there are none."""
        later = len(self.times_s) - 1
        return (self.times_s[-1] - self.times_s[0]) / later if later else 0.0


@dataclass(frozen=True, slots=True)
class SimulatedService:
    """The result of a simulation."""

    requests: tuple[Served, ...]  # in the order in which they were given
    steps: int  # plans that were computed
    preemptions: int  # sequences that lost their blocks
    busy_s: tuple[float, ...]  # seconds in which each stage computed

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last token."""
        last = max(request.times_s[-1] for request in self.requests)
        return last - min(request.arrival_s for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return sum(len(request.times_s) for request in self.requests) / self.seconds


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that ``percent`` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def serve(
    arrivals: Sequence[Arrival], config: SchedulerConfig, times_of: Predict, client_s: float = 0.0
) -> SimulatedService:
    """Serve requests in simulated time. Raises ConfigError if there are none, or the scheduler rejects one.

    Args:
        config: the scheduler's configuration; ``pipeline`` is the number of stages in the results of ``times_of``.
        client_s: the seconds from the client to the loop for a request, plus the way back for its tokens.
    """
    if not arrivals:
        raise ConfigError("there is no request to serve")
    scheduler = Scheduler(config)
    clock = _Clock(min(arrival.time_s for arrival in arrivals))
    client = _Client(arrivals, clock, client_s)
    ranks = _Ranks(config.pipeline, times_of, clock)
    EngineCore(scheduler, ranks, ranks, client, check=lambda: None, stamp_every=0, stage_timeout_s=math.inf).run()
    stats = scheduler.stats()
    return SimulatedService(tuple(client.served), stats.steps, stats.preemptions, tuple(ranks.busy_s))


@dataclass(slots=True)
class _Clock:
    """The clock of rank 0's loop."""

    now: float

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


class _Client:
    """The client, which sends each request at its time, and records when its tokens arrive.

    The whole round-trip time passes before a request is noticed.
    """

    def __init__(self, arrivals: Sequence[Arrival], clock: _Clock, client_s: float):
        self.served = [Served(arrival.time_s) for arrival in arrivals]
        self._arrivals, self._clock = arrivals, clock
        self._waiting = [(arrival.time_s + client_s, number) for number, arrival in enumerate(arrivals)]
        heapq.heapify(self._waiting)
        self._idle = False  # nothing was computed since the last look for requests

    def poll(self) -> bool:
        if self._idle:
            if not self._waiting:
                raise ConfigError("requests wait for room in the cache that nothing will free; give it more blocks")
            self._clock.wait(self._waiting[0][0])
        found = bool(self._waiting) and self._waiting[0][0] <= self._clock.now
        self._idle = not found
        return found

    def recv(self) -> Request | None:
        """Wait for the next request; None, which ends the loop, if there are no more."""
        if not self._waiting:
            return None
        time_s, number = heapq.heappop(self._waiting)
        self._clock.wait(time_s)
        arrival = self._arrivals[number]
        params = SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True)
        # ids of tokens are the request's own, so that no prompt begins as another one does
        return Request(str(number), (number,) * arrival.prompt, params)

    def send(self, message: Any) -> None:
        if isinstance(message, RejectedRequest):
            raise ConfigError(message.reason)
        assert isinstance(message, EngineCoreOutputs)
        self._idle = False
        for output in map(EngineCoreOutput._make, message.outputs):
            self.served[int(output.request_id)].times_s.extend([self._clock.now] * len(output.tokens))


class _Pending(NamedTuple):
    """The output of a plan, available at a set time."""

    output: ModelRunnerOutput
    time_s: float
    clock: _Clock

    def result(self) -> ModelRunnerOutput:
        self.clock.wait(self.time_s)
        return self.output


class _Ranks:
    """All stages, each of which computes one plan after the other; messages from rank 0 to the others take no time."""

    step_s = communication_s = 0.0

    def __init__(self, stages: int, times_of: Predict, clock: _Clock):
        self._times_of, self._clock = times_of, clock
        self._free_s = [0.0] * stages
        self._full_clocks = [FullClock() for _ in range(stages)]
        self._sampled_s: dict[int, float] = {}  # by slot, when the last token that it samples is there
        self.busy_s = [0.0] * stages

    def send_plan(self, plan: StepPlan | None) -> None:
        """Do nothing, in no time."""

    def recv_output(self, timeout_s: float) -> ModelRunnerOutput:
        raise AssertionError("execute returns the output of all stages")

    def execute(self, plan: StepPlan) -> _Pending:
        """Return the plan's output, available once it has passed all stages and its tokens are back."""
        times = self._times_of(plan)
        self._clock.now += times.host_s
        ready = self._clock.now
        for sequence in plan.sequences:
            if sequence.tokens == (PENDING_TOKEN,):
                ready = max(ready, self._sampled_s[sequence.slot])
        for stage, (seconds, saved_s) in enumerate(itertools.zip_longest(times.stages_s, times.saved_s, fillvalue=0.0)):
            begin = max(ready, self._free_s[stage])
            self._full_clocks[stage].rest((begin - self._free_s[stage]) * 1e6)
            seconds -= self._full_clocks[stage].take(saved_s * 1e6) / 1e6
            done = begin + seconds
            self._free_s[stage] = done
            self.busy_s[stage] += seconds
            if times.in_loop and stage == 0:
                self._clock.wait(done)
            ready = done + times.transfers_s[stage]
        sampled = 0
        for sequence in plan.sequences:
            if sequence.do_sample:
                self._sampled_s[sequence.slot] = ready
                sampled += 1
        return _Pending(ModelRunnerOutput(plan.number, (0,) * sampled, (None,) * sampled), ready, self._clock)
