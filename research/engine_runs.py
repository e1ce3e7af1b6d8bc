r"""Kept results of ``shotcast bench engine``, what is predicted for them, and how far off that is.

Nothing is fitted to a run. Runs only say how long error bars have to be: where b is the error of a step by the
residuals of its kernels, and of the host in a first token, and e that of a run, bars have a part s that these do not
explain, by which errors are one bar long as a root mean square over n runs,

.. math:: bar = \sqrt{b^2 + s^2}, \quad \frac{1}{n} \sum \frac{e^2}{b^2 + s^2} = 1

or 0 where they are shorter without it. The bar of a run has s from the runs of other models alone (:func:`error_bars`),
so it says how far off a prediction may be for a model that was never run.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from nccl_costs import NcclCosts, NcclStepModel

from shotcast.collectives.algorithm import LIBRARY
from shotcast.engine.scheduler import SchedulerConfig
from shotcast.errors import ConfigError
from shotcast.models.presets import preset
from shotcast.planner.calibration import Calibration
from shotcast.planner.plan import BATCH_TOKENS, fullest_rank
from shotcast.planner.step import Layout, StepModel, StepWork, kernel_error
from shotcast.simulator.serving import Arrival, SimulatedService, serve
from shotcast.simulator.traffic import PricedSteps

METRICS = ("ttft_ms", "tpot_ms", "itl_ms", "tokens_per_s")
BARRED = ("ttft_ms", "tpot_ms")
"""The metrics that have error bars."""
ALGORITHMS = {"auto": "auto", "nccl": LIBRARY}
"""The algorithms of sums that are predicted, by their names in results."""
_BLOCK = 16
_UTILIZATION = 0.9
_HALVINGS = 40
_OF_SAMPLING = tuple(f"kernels.triton.{name}" for name in ("sampling", "sampling_scores", "top_k_top_p"))


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One row of a result, and the most sequences of the engine that gave it.

    Attributes:
        model: a preset, with the number of layers where it is not the model's.
        algorithm: of sums, as a step model names it.
        values: by name in :data:`METRICS`.
        kernels: fingerprints of the kernels of the run.
    """

    model: str
    quantization: str
    layout: Layout
    algorithm: str
    sequences: int
    most_sequences: int
    prompt: int
    output: int
    values: Mapping[str, float]
    kernels: Mapping[str, str]

    @property
    def family(self) -> str:
        """The preset, however many layers of it were run."""
        return self.model.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Forecast:
    """A run and its prediction.

    Attributes:
        run: as measured.
        values: as predicted, by name in :data:`METRICS`.
        kernel_errors: one standard deviation of :data:`BARRED` by the residuals of kernels, and of the host in a first
            token, as a part of the value.
        others: the kernels that the run had in another version than the measurements behind the constants.
    """

    run: EngineRun
    values: Mapping[str, float]
    kernel_errors: Mapping[str, float]
    others: tuple[str, ...]

    def error(self, metric: str) -> float:
        """Return the relative error of the prediction; below 0 where it is too small."""
        return self.values[metric] / self.run.values[metric] - 1


def runs(folder: Path, algorithm: str = "auto") -> Iterator[EngineRun]:
    """Yield the runs in ``engine*.json`` of a folder with random weights of a preset.

    Args:
        folder: with the results.
        algorithm: of sums, by its name in :data:`ALGORITHMS`.

    Raises:
        ConfigError: a file is no result.
    """
    for file in sorted(folder.glob("engine*.json")):
        try:
            result = json.loads(file.read_text())
            rows = result["rows"]
            most = max(row["batch"] for row in rows)
            for row in rows:
                if row["algorithm"] != algorithm or not row["model"].startswith("random:"):
                    continue
                tensor, stages = map(int, row["layout"].split("x"))
                yield EngineRun(
                    row["model"].removeprefix("random:"),
                    row["quantization"],
                    Layout(tensor, stages),
                    ALGORITHMS[algorithm],
                    row["batch"],
                    most,
                    row["prompt"],
                    row["output"],
                    {name: row[name] for name in METRICS},
                    result.get("kernels", {}),
                )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is no result of shotcast bench engine: {error!r}") from error


def forecasts(
    found: Iterable[EngineRun],
    calibration: Calibration,
    collectives: NcclCosts,
    known: Mapping[str, Collection[str]],
) -> list[Forecast]:
    """Return the predictions of runs.

    Args:
        found: the runs.
        calibration, collectives: constants.
        known: fingerprints of each kernel that the constants were measured with.
    """
    return [
        Forecast(
            run,
            predict(run, calibration, collectives),
            _kernel_errors(run, calibration, collectives),
            others(run, known),
        )
        for run in found
    ]


def predict(run: EngineRun, calibration: Calibration, collectives: NcclCosts) -> dict[str, float]:
    """Return the predicted metrics of a run: all its requests arrive at once, and the scheduler serves them."""
    model = _step_model(run, calibration, collectives)
    config = SchedulerConfig(
        max_num_seqs=run.most_sequences,
        max_num_batched_tokens=BATCH_TOKENS,
        block_size=_BLOCK,
        num_blocks=_blocks(run, calibration, model),
        max_model_len=run.prompt + run.output,
        prefix_caching=False,
        lookahead=1,
        pipeline=run.layout.pipeline_parallel,
    )
    arrivals = [Arrival(0.0, run.prompt, run.output)] * run.sequences
    return metrics(serve(arrivals, config, PricedSteps(model), model.client_us / 1e6))


def others(run: EngineRun, known: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Return the kernels that a run had in another version than all those that are known.

    Kernels that nothing is known of do not count, nor do those that runs do not have: of sampling, as they are greedy,
    and of the library, whose calls are not ours.
    """
    names = sorted(
        name
        for name in run.kernels.keys() & known.keys()
        if name not in _OF_SAMPLING and not name.endswith(f"/{LIBRARY}")
    )
    return tuple(name for name in names if run.kernels[name] not in known[name])


def systematic(found: Sequence[Forecast], metric: str) -> float:
    """Return the part of error bars that kernels do not explain, s above."""
    squares = [(each.error(metric) ** 2, each.kernel_errors[metric] ** 2) for each in found]
    least, most = 0.0, max(error for error, _ in squares)  # of the square of s
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        if fmean(error / (bar + middle) for error, bar in squares) > 1:
            least = middle
        else:
            most = middle
    return math.sqrt(least)


def error_bars(found: Sequence[Forecast], metric: str) -> list[float]:
    """Return the error bar of each prediction by the runs of other models.

    Raises:
        ConfigError: the runs are of one model.
    """
    beyond: dict[str, float] = {}
    for family in {each.run.family for each in found}:
        rest = [each for each in found if each.run.family != family]
        if not rest:
            raise ConfigError(f"all runs are of {family}; error bars take the runs of other models")
        beyond[family] = systematic(rest, metric)
    return [math.hypot(each.kernel_errors[metric], beyond[each.run.family]) for each in found]


def _kernel_errors(run: EngineRun, calibration: Calibration, collectives: NcclCosts) -> dict[str, float]:
    sequences = -(-run.sequences // run.layout.pipeline_parallel)
    prompts = min(run.sequences, max(1, BATCH_TOKENS // run.prompt))
    prefill = StepWork(0, 0.0, ((run.prompt, 0),) * prompts, prompts)
    decode = StepWork(sequences, run.prompt + run.output / 2, (), sequences)
    model = _step_model(run, calibration, collectives)
    return {"ttft_ms": model.first_token_error([prefill]), "tpot_ms": kernel_error(model.stages(decode))}


def metrics(service: SimulatedService) -> dict[str, float]:
    """Return what ``shotcast bench engine`` reports, of a simulation."""
    gaps = [after - before for request in service.requests for before, after in itertools.pairwise(request.times_s)]
    return {
        "ttft_ms": fmean(request.ttft_s for request in service.requests) * 1e3,
        "tpot_ms": fmean(request.tpot_s for request in service.requests) * 1e3,
        "itl_ms": median(gaps) * 1e3,
        "tokens_per_s": service.tokens_per_s,
    }


def _blocks(run: EngineRun, calibration: Calibration, model: StepModel) -> int:
    """Return the blocks of the cache: what all sequences need, or what the estimate of a rank's memory leaves."""
    usable = int(calibration.gpu.memory_bytes * _UTILIZATION)
    memory = fullest_rank(model.model, run.quantization, run.layout, usable, BATCH_TOKENS, calibration.itemsize)
    needed = run.most_sequences * -(-(run.prompt + run.output) // _BLOCK)
    return min(needed, memory.cache(run.most_sequences) // (memory.per_token * _BLOCK))


def _step_model(run: EngineRun, calibration: Calibration, collectives: NcclCosts) -> StepModel:
    kind = NcclStepModel if run.algorithm == LIBRARY else StepModel
    return kind(preset(run.model), run.layout, calibration, collectives, run.quantization)
