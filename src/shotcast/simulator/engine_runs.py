"""Kept results of ``shotcast bench engine``, and what is predicted for them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from shotcast.engine.scheduler import SchedulerConfig
from shotcast.errors import ConfigError
from shotcast.models.presets import preset
from shotcast.planner.calibration import Calibration
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.plan import BATCH_TOKENS
from shotcast.planner.step import Layout, StepModel, StepWork
from shotcast.simulator.priced_steps import PricedSteps
from shotcast.simulator.serving import Arrival, Service, serve

METRICS = ("ttft_ms", "tpot_ms", "itl_ms", "tokens_per_s")
_ENOUGH_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One row of a result, and the most sequences of the engine that gave it.

    Attributes:
        model: a preset, with the number of layers where it is not the model's.
        values: by name in :data:`METRICS`.
        kernels: fingerprints of the kernels of the run.
    """

    model: str
    quantization: str
    layout: Layout
    sequences: int
    most_sequences: int
    prompt: int
    output: int
    values: Mapping[str, float]
    kernels: Mapping[str, str]


def runs(folder: Path) -> Iterator[EngineRun]:
    """Yield the runs in ``engine*.json`` of a folder with random weights of a preset and our own algorithms.

    Raises:
        ConfigError: a file is no result.
    """
    for file in sorted(folder.glob("engine*.json")):
        try:
            result = json.loads(file.read_text())
            rows = result["rows"]
            most = max(row["batch"] for row in rows)
            for row in rows:
                if row["algorithm"] != "auto" or not row["model"].startswith("random:"):
                    continue
                tensor, stages = map(int, row["layout"].split("x"))
                yield EngineRun(
                    row["model"].removeprefix("random:"),
                    row["quantization"],
                    Layout(tensor, stages),
                    row["batch"],
                    most,
                    row["prompt"],
                    row["output"],
                    {name: row[name] for name in METRICS},
                    result.get("kernels", {}),
                )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is no result of shotcast bench engine: {error!r}") from error


def predict(run: EngineRun, calibration: Calibration, collectives: CollectiveCosts) -> dict[str, float]:
    """Return the predicted metrics of a run: all its requests arrive at once, and the scheduler serves them."""
    config = SchedulerConfig(
        max_sequences=run.most_sequences,
        max_batch_tokens=BATCH_TOKENS,
        block_size=16,
        num_blocks=_ENOUGH_BLOCKS,
        max_model_len=run.prompt + run.output,
        prefix_caching=False,
        lookahead=1,
        pipeline=run.layout.pipeline_parallel,
    )
    model = _step_model(run, calibration, collectives)
    arrivals = [Arrival(0.0, run.prompt, run.output)] * run.sequences
    return metrics(serve(arrivals, config, PricedSteps(model)))


def other_kernels(run: EngineRun, calibration: Calibration) -> list[str]:
    """Return the kernels that a run had in another version than the measurements of the calibration."""
    known = calibration.kernels
    return sorted(name for name, version in run.kernels.items() if known.get(name, version) != version)


def error_bar(run: EngineRun, calibration: Calibration, collectives: CollectiveCosts) -> float:
    """Return how far off a step that decodes may be, as a part of it, by the residuals of the calibration."""
    sequences = -(-run.sequences // run.layout.pipeline_parallel)
    work = StepWork(sequences, run.prompt + run.output / 2, (), sequences)
    stages = _step_model(run, calibration, collectives).stages(work)
    return sum(stage.error_us for stage in stages) / sum(stage.time_us for stage in stages)


def metrics(service: Service) -> dict[str, float]:
    """Return what ``shotcast bench engine`` reports, of a simulation."""
    gaps = [after - before for request in service.requests for before, after in itertools.pairwise(request.times_s)]
    return {
        "ttft_ms": fmean(request.ttft_s for request in service.requests) * 1e3,
        "tpot_ms": fmean(request.tpot_s for request in service.requests) * 1e3,
        "itl_ms": median(gaps) * 1e3,
        "tokens_per_s": service.tokens_per_s,
    }


def _step_model(run: EngineRun, calibration: Calibration, collectives: CollectiveCosts) -> StepModel:
    return StepModel(preset(run.model), run.layout, calibration, collectives, run.quantization)
