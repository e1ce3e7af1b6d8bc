"""Our own engine on 2 and 4 H200 by layout: measured, predicted, and AIConfigurator's answers.

The runs are those of ``benchmarks/data/h200``, which no constant was fitted to. AIConfigurator knows the kernels of
TensorRT-LLM and not ours, so what it says of these runs is that of another engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from engine_runs import EngineRun, predict, runs
from external_answers import answer, batch_tokens_per_s
from markdown_table import folded, table
from nccl_costs import NcclCosts
from published_layouts import CLUSTER, beside, name_of

from shotcast.planner.calibration import Calibration

RESULTS = Path(__file__).parents[1] / "benchmarks" / "data" / "h200"
NAMES = ("measured", "predicted", "AIConfigurator")


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run: tokens/s, and milliseconds of each later token, each measured, predicted and by AIConfigurator.

    AIConfigurator's batch has all its prompts first, ours comes one prompt after the other. So what it says of later
    tokens is compared for one sequence alone.
    """

    run: EngineRun
    tokens_per_s: tuple[float, float, float]
    tpot_ms: tuple[float, float, float]

    @property
    def subject(self) -> tuple[int, str, str, int]:
        """GPUs, model, quantization and sequences, which runs of several layouts share."""
        return self.run.layout.ranks, self.run.model, self.run.quantization, self.run.sequences

    @property
    def title(self) -> str:
        """The model in words."""
        return f"{self.run.model.removeprefix('llama-3.1-')}{' FP8' if self.run.quantization else ''}"


def run_rows(calibration: Calibration) -> list[RunRow]:
    """Return the kept runs on 2 and 4 GPUs, in the order of their GPUs, models, sequences and layouts."""
    own = NcclCosts.on(CLUSTER, calibration.link)
    rows = []
    for run in runs(RESULTS):
        if run.layout.ranks == 1:
            continue
        ours = predict(run, calibration, own)
        lengths = {"sequences": run.sequences, "prompt": run.prompt, "output": run.output}
        gemm = "fp8_static" if run.quantization else "bfloat16"
        theirs = answer("engine", "batch", run.layout, model=run.model, gemm=gemm, **lengths)
        tokens_per_s = run.values["tokens_per_s"], ours["tokens_per_s"], batch_tokens_per_s(theirs)
        rows.append(RunRow(run, tokens_per_s, (run.values["tpot_ms"], ours["tpot_ms"], theirs["tpot_ms"])))
    return sorted(rows, key=lambda row: (row.subject, -row.run.layout.tensor_parallel))


def layouts_beside_tensor_parallel(rows: Sequence[RunRow]) -> Iterator[tuple[RunRow, RunRow]]:
    """Yield each run of stages with that of tensor parallel alone of the same model, GPUs and sequences."""
    for row in rows:
        for other in rows:
            if (
                row.subject == other.subject
                and row.run.layout.pipeline_parallel > 1 == other.run.layout.pipeline_parallel
            ):
                yield row, other


def _ratios(row: RunRow, other: RunRow) -> list[float]:
    return [own / theirs for own, theirs in zip(row.tokens_per_s, other.tokens_per_s, strict=True)]


def runs_tables(rows: Sequence[RunRow]) -> str:
    """Return throughput of stages over that of tensor parallel, mean errors, and all runs."""
    body, ratios = [], []
    for row, other in layouts_beside_tensor_parallel(rows):
        gpus, _, _, sequences = row.subject
        ratios.append(_ratios(row, other))
        layouts = f"{name_of(row.run.layout)} over {name_of(other.run.layout)}"
        body.append([str(gpus), row.title, str(sequences), layouts, *(f"{ratio:.2f}" for ratio in ratios[-1])])
    text = table(["GPUs", "model", "sequences", "tokens/s of", *NAMES], body)
    alone = [row for row in rows if row.run.sequences == 1]
    kinds: dict[str, Sequence[Sequence[float]]] = {
        "tokens/s, one sequence": [row.tokens_per_s for row in alone],
        "tokens/s, several": [row.tokens_per_s for row in rows if row.run.sequences > 1],
        "each later token, one sequence": [row.tpot_ms for row in alone],
        "tokens/s over those of tensor parallel": ratios,
    }
    errors = [[name, str(len(values)), *map("{:.0%}".format, mean_errors(values))] for name, values in kinds.items()]
    text += "\n" + table(["mean error", "rows", *NAMES[1:]], errors)
    by_gpus: dict[int, list[RunRow]] = defaultdict(list)
    for row in rows:
        by_gpus[row.run.layout.ranks].append(row)
    return text + "".join(
        "\n" + folded(f"All {len(found)} runs on {gpus} GPUs", _runs_table(found)) for gpus, found in by_gpus.items()
    )


def mean_errors(values: Sequence[Sequence[float]]) -> list[float]:
    """Return how far predictions, and AIConfigurator's answers, are from what was measured, without signs."""
    return [fmean(abs(row[kind] / row[0] - 1) for row in values) for kind in (1, 2)]


def _runs_table(rows: Sequence[RunRow]) -> str:
    header = ["model", "sequences", "layout", "tokens/s, measured", *NAMES[1:]]
    header += ["ms of each later token, measured", *NAMES[1:]]
    body = []
    for row in rows:
        cells = [row.title, str(row.run.sequences), name_of(row.run.layout)]
        alone = row.run.sequences == 1
        for values, digits, compared in ((row.tokens_per_s, int(alone), True), (row.tpot_ms, 2, alone)):
            measured, ours, theirs = values
            cells += [f"{measured:.{digits}f}", beside(ours, measured, digits)]
            cells.append(beside(theirs, measured, digits) if compared else "")
        body.append(cells)
    return table(header, body)
