"""Traffic for a planned deployment: requests that arrive over time, served by simulated engines."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shotcast.engine.scheduler import SchedulerConfig
from shotcast.engine.step_plan import StepPlan
from shotcast.errors import ConfigError, shorten
from shotcast.hardware.cluster import read_text
from shotcast.planner.calibration import Calibration
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.cpu_rows import step_model
from shotcast.planner.plan import Point, Query
from shotcast.planner.step import StepModel, StepWork
from shotcast.simulator.serving import Arrival, SimulatedService, StepTimes, percentile, serve

_BLOCK = 16
MOST_REQUESTS = 100_000
MOST_SECONDS = 1e9
"""The latest arrival time: beyond it, rounding loses microseconds."""


_CONTEXT_UNIT = 32
"""Contexts of decoding sequences are averaged and rounded to this many tokens, so that equal steps are priced once."""


def work_of(plan: StepPlan) -> StepWork:
    """Return the tokens computed by a plan."""
    decoding = [part.num_computed for part in plan.sequences if len(part.tokens) == 1]
    context = sum(decoding) / len(decoding) if decoding else 0.0
    return StepWork(
        decoding=len(decoding),
        context=round(context / _CONTEXT_UNIT) * _CONTEXT_UNIT,
        prompts=tuple((len(part.tokens), part.num_computed) for part in plan.sequences if len(part.tokens) > 1),
        sampled=sum(part.do_sample for part in plan.sequences),
    )


class PricedSteps:
    """Predicts the times of a plan with a step model."""

    def __init__(self, model: StepModel):
        self._model = model

    def __call__(self, plan: StepPlan) -> StepTimes:
        work = work_of(plan)
        stages = self._model.stages(work)
        return StepTimes(
            [stage.time_us / 1e6 for stage in stages],
            [transfer / 1e6 for transfer in self._model.transfers_us(work)],
            self._model.host_us(work) / 1e6,
            not self._model.hides_host,
            [stage.saved_us / 1e6 for stage in stages],
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """The latencies and throughput of requests, in milliseconds and tokens per second."""

    services: tuple[SimulatedService, ...]  # of each engine

    def ttft_ms(self, percent: float) -> float:
        """Return a percentile of the time to the first token."""
        return percentile([request.ttft_s * 1e3 for one in self.services for request in one.requests], percent)

    def tpot_ms(self, percent: float) -> float | None:
        """Return a percentile of the time per later token; None if there are none."""
        times = [request.tpot_s * 1e3 for one in self.services for request in one.requests if len(request.times_s) > 1]
        return percentile(times, percent) if times else None

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all engines, from the first arrival to the last token."""
        requests = [request for one in self.services for request in one.requests]
        seconds = max(one.times_s[-1] for one in requests) - min(one.arrival_s for one in requests)
        return sum(len(one.times_s) for one in requests) / seconds

    @property
    def preemptions(self) -> int:
        """The number of times that a sequence lost its cache blocks."""
        return sum(one.preemptions for one in self.services)

    def as_json(self) -> dict[str, float | None]:
        """Return the figures in seconds and tokens per second, under InferenceX's names where they exist."""
        median_ms, most_ms = self.tpot_ms(50), self.tpot_ms(99)
        return {
            "requests": sum(len(one.requests) for one in self.services),
            "output_tput": self.tokens_per_s,
            "median_ttft": self.ttft_ms(50) / 1e3,
            "p99_ttft": self.ttft_ms(99) / 1e3,
            "median_tpot": None if median_ms is None else median_ms / 1e3,
            "p99_tpot": None if most_ms is None else most_ms / 1e3,
            "preemptions": self.preemptions,
        }


def poisson(rate: float, requests: int, prompt: int, output: int, seed: int = 0) -> list[Arrival]:
    """Generate requests of equal lengths that arrive independently at a mean rate per second."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate must be above 0 requests a second, not {rate}")
    if not 1 <= requests <= MOST_REQUESTS:
        raise ConfigError(f"requests must be from 1 to {MOST_REQUESTS}, not {requests}")
    numbers, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(requests):
        now += numbers.expovariate(rate)
        arrivals.append(Arrival(now, prompt, output))
    if now > MOST_SECONDS:
        raise ConfigError(f"{requests} requests at {rate:g} a second take longer than {MOST_SECONDS:g} s to arrive")
    return arrivals


def read_trace(path: Path) -> list[Arrival]:
    """Read requests from JSON lines with ``time_s``, ``prompt`` and ``output``. Raises ConfigError on failure."""
    lines = [(number, line) for number, line in enumerate(read_text(path, "the trace").split("\n"), 1) if line.strip()]
    if not 1 <= len(lines) <= MOST_REQUESTS:
        raise ConfigError(f"a trace has 1 to {MOST_REQUESTS} requests, and {path} has {len(lines)}")
    return [_arrival(line, f"{path}, line {number}") for number, line in lines]


def _arrival(line: str, origin: str) -> Arrival:
    """Parse the request in a line. Raises ConfigError naming ``origin`` if it is not one."""
    try:
        fields = json.loads(line, object_pairs_hook=tuple)
        if not isinstance(fields, tuple) or sorted(name for name, _ in fields) != ["output", "prompt", "time_s"]:
            raise ValueError("its fields are time_s, prompt and output, each once")
        value = dict(fields)
        time_s, prompt, output = (value[name] for name in ("time_s", "prompt", "output"))
        if {type(prompt), type(output)} != {int} or type(time_s) not in (int, float):
            raise ValueError("prompt and output are whole numbers, and time_s is a number")
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f'{origin}: a request is {{"time_s": 0.5, "prompt": 100, "output": 20}}, not {line.strip()[:80]} ({error})'
        ) from error
    if not 0 <= time_s <= MOST_SECONDS:
        raise ConfigError(f"{origin}: time_s must be at least 0 and at most {MOST_SECONDS:g}, not {shorten(time_s)}")
    if min(prompt, output) < 1:
        raise ConfigError(f"{origin}: prompt and output must be at least 1, not {shorten(min(prompt, output))}")
    return Arrival(float(time_s), prompt, output)


def longest(query: Query, arrivals: Sequence[Arrival]) -> int:
    """Return the tokens of the longest request. Raises ConfigError if it is too long for the model."""
    tokens = max(arrival.prompt + arrival.output for arrival in arrivals)
    if tokens > query.model.max_position:
        raise ConfigError(f"{query.name} takes {query.model.max_position} tokens of a sequence, and one has {tokens}")
    return tokens


def simulate(query: Query, point: Point, calibration: Calibration, arrivals: Sequence[Arrival]) -> Traffic:
    """Simulate requests at a point of a plan, where they take the engines in turn."""
    constants = calibration.scaled_to(query.cluster.gpu).of_ranks(query.gpus)
    collectives = CollectiveCosts.on(query.cluster, constants.link)
    limits = query.limits
    model = step_model(
        query.model, point.layout, constants, collectives, query.quantization, limits.algorithm, kv_item=limits.kv_item
    )
    config = SchedulerConfig(
        max_num_seqs=point.sequences,
        max_num_batched_tokens=max(limits.batch_tokens, point.sequences),
        block_size=_BLOCK,
        num_blocks=point.memory.cache(point.sequences) // (point.memory.per_token * _BLOCK),
        max_model_len=max(longest(query, arrivals), 2),
        prefix_caching=False,
        lookahead=int(model.hides_host),
        pipeline=point.layout.pipeline_parallel,
    )
    ordered = sorted(arrivals)
    parts = [ordered[first :: point.engines] for first in range(point.engines)]
    return Traffic(tuple(serve(part, config, PricedSteps(model), model.client_us / 1e6) for part in parts if part))
