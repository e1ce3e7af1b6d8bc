"""Traces that an engine served in real time, as ``research/served_trace.py`` keeps them, and what is predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shotcast.cost.collective import NO_NETWORK
from shotcast.engine.scheduler import SchedulerConfig
from shotcast.errors import ConfigError
from shotcast.models.presets import preset
from shotcast.models.source import PACKAGED, PACKAGED_PRESET
from shotcast.planner.calibration import Calibration
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.cpu_rows import step_model
from shotcast.planner.step import Layout
from shotcast.simulator.serving import Arrival, SimulatedService, percentile, serve
from shotcast.simulator.traffic import PricedSteps

PERCENTS = (50, 90, 99)
METRICS = ("tokens_per_s", *(f"{name}_p{percent}_ms" for name in ("ttft", "tpot") for percent in PERCENTS))
_BLOCK = 16


class Answered(NamedTuple):
    """A request that was served: when it was sent, when its first and its last token were there, and its output."""

    sent_s: float
    first_s: float
    last_s: float
    output: int


class Step(NamedTuple):
    """One step as the client saw it, or several that it saw together.

    Attributes:
        seen_s: when it noticed.
        steps: how many steps.
        outputs: tokens that they sampled.
        prompt: tokens of prompts that they began.
        time_ms: what they took by the engine's own timer.
    """

    seen_s: float
    steps: int
    outputs: int
    prompt: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A trace that an engine served.

    Attributes:
        model: a preset.
        layout: of the engine.
        limits: options of the engine.
        load: the rate of arrivals as a part of the capacity; None where all requests came at once, which is how the
            capacity was measured.
        arrivals: the requests, each with the time at which it was sent.
        answers: in the same order.
        steps: in their order.
        others_cores: the cores that other processes of the machine kept busy meanwhile, on average.
        kernels: fingerprints of the kernels.
    """

    model: str
    layout: Layout
    limits: Mapping[str, int]
    load: float | None
    arrivals: tuple[Arrival, ...]
    answers: tuple[Answered, ...]
    steps: tuple[Step, ...]
    others_cores: float
    kernels: Mapping[str, str]

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of :data:`METRICS`."""
        return metrics(self.answers)


def read(path: Path) -> list[ServedRun]:
    """Return the runs in a result of ``research/served_trace.py``.

    Raises:
        ConfigError: it is another file.
    """
    try:
        value = json.loads(path.read_text())
        return [_run(value, run) for run in value["served"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no result of research/served_trace.py: {error!r}") from error


def _run(value: Mapping[str, Any], run: Mapping[str, Any]) -> ServedRun:
    lengths = [(int(prompt), int(output)) for _, prompt, output in value["trace"]]
    answers = []
    for (sent_s, first_s, last_s), (_, output) in zip(run["requests"], lengths, strict=True):
        answers.append(Answered(float(sent_s), float(first_s), float(last_s), output))
    tensor, stages = (int(number) for number in run["layout"].split("x"))
    arrivals = [Arrival(answer.sent_s, *each) for answer, each in zip(answers, lengths, strict=True)]
    return ServedRun(
        str(value["model"]),
        Layout(tensor, stages),
        {str(name): int(limit) for name, limit in value["limits"].items()},
        run["load"],
        tuple(arrivals),
        tuple(answers),
        tuple(Step(*step) for step in run["steps"]),
        float(run["others_cores"]),
        dict(value["kernels"]),
    )


def answers_of(service: SimulatedService) -> list[Answered]:
    """Return the requests of a simulation."""
    return [
        Answered(request.arrival_s, request.times_s[0], request.times_s[-1], len(request.times_s))
        for request in service.requests
    ]


def metrics(answers: Sequence[Answered]) -> dict[str, float]:
    """Return the figures of :data:`METRICS`: tokens a second from the first arrival to the last token, percentiles of
    the time to the first token, and of the mean time of each later one."""
    seconds = max(answer.last_s for answer in answers) - min(answer.sent_s for answer in answers)
    ttft = [1e3 * (answer.first_s - answer.sent_s) for answer in answers]
    tpot = [1e3 * (one.last_s - one.first_s) / (one.output - 1) for one in answers if one.output > 1]
    found = {"tokens_per_s": sum(answer.output for answer in answers) / seconds}
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        found |= {f"{name}_p{percent}_ms": percentile(values, percent) for percent in PERCENTS}
    return found


def predict(run: ServedRun, calibration: Calibration) -> SimulatedService:
    """Return what the simulated engine makes of the requests of a run, with steps by a calibration of the machine.

    Raises:
        ConfigError: the calibration says nothing of this many ranks.
    """
    constants = calibration.of_ranks(run.layout.ranks)
    collectives = CollectiveCosts(constants.link, NO_NETWORK, run.layout.ranks)
    model = step_model(
        preset(PACKAGED_PRESET if run.model in PACKAGED else run.model), run.layout, constants, collectives
    )
    limits = run.limits
    config = SchedulerConfig(
        max_num_seqs=limits["max_num_seqs"],
        max_num_batched_tokens=limits["max_num_batched_tokens"],
        max_model_len=limits["max_model_len"],
        block_size=_BLOCK,
        num_blocks=limits["max_num_seqs"] * -(-limits["max_model_len"] // _BLOCK),
        prefix_caching=False,
        lookahead=int(model.hides_host),
        pipeline=run.layout.pipeline_parallel,
    )
    return serve(run.arrivals, config, PricedSteps(model))


def errors(run: ServedRun, service: SimulatedService) -> dict[str, float]:
    """Return by how much each figure is predicted too high, as a part of the measured one."""
    predicted = metrics(answers_of(service))
    return {name: predicted[name] / measured - 1 for name, measured in run.metrics.items()}
