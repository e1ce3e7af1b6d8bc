"""405B by layout, and tensor parallel of three models, on H200: published, predicted, and AIConfigurator's answers.

No constant is fitted to what is compared. Rows come first; tables and pictures are made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import external_answers
from external_answers import TabledSums, answer
from markdown_table import paragraph, table

from shotcast.hardware import cluster
from shotcast.models.presets import preset
from shotcast.planner.calibration import Calibration
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.plan import MOST_SEQUENCES, Limits, Plan, Point, Query, plan
from shotcast.planner.step import Layout, StepModel, StepWork

CLUSTER = cluster.load("dgx-h200")
FOUR_LAYOUTS = (Layout(8, 1), Layout(4, 2), Layout(2, 4), Layout(1, 8))
PUBLISHED_LAYOUTS = {Layout(8, 1): (56, 506), Layout(1, 8): (10, 764)}
"""405B by TensorRT-LLM, tokens/s of one sequence and of many; the report of strong scaling links all publications."""
PUBLISHED_RATIOS = (5.6, 1.5)
"""TP8 over PP8 of one sequence, and PP8 over TP8 of many."""
SUMS_OF_TENSORRT = "predicted, with TensorRT-LLM's measured sums"
SUMS_OF_NCCL = "predicted, with NCCL's measured sums"
KV_IN_FP8 = "predicted, with keys and values in FP8"
BOTH = "predicted, with TensorRT-LLM's sums, and keys and values in FP8"
LENGTHS = ((128, 128), (128, 2048), (1000, 1000), (2048, 128), (2048, 2048))
PUBLISHED_TOKENS = {
    ("llama-3.1-405b", 8): (3814, 5348, 3330, 456, 2948),
    ("llama-3.1-70b", 1): (3803, 4336, 2909, 442, 2003),
    ("llama-3.1-8b", 1): (27911, 26221, 17744, 3538, 12194),
}
"""Llama FP8 on so many H200 with TensorRT-LLM, tensor parallel: tokens/s by tokens in and out.

The published 70B is Llama 3.3, whose dimensions are those of 3.1.
"""


def name_of(layout: Layout) -> str:
    """Return TP4, PP8 or TP2 x PP4."""
    tensor, stages = layout.tensor_parallel, layout.pipeline_parallel
    parts = [f"TP{tensor}"] * (tensor > 1) + [f"PP{stages}"] * (stages > 1)
    return " x ".join(parts)


def beside(value: float, published: float, digits: int = 0) -> str:
    """Return a value and how far it is from the published one."""
    return f"{value:.{digits}f} ({value / published - 1:+.0%})"


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """A layout of 405B on 8 GPUs, 2048 tokens in and 128 out.

    Attributes:
        alone, most: tokens/s of one sequence, and the point with most tokens/s, predicted.
        external: AIConfigurator's tokens/s of one sequence and at most.
        published: the same of TensorRT-LLM; None where nothing is.
    """

    layout: Layout
    alone: float
    most: Point
    external: tuple[float, float]
    published: tuple[float, float] | None


def plan_of_405b(calibration: Calibration, limits: Limits, collectives: CollectiveCosts | None = None) -> Plan:
    """Return the plan of 405B in FP8 on 8 H200, every layout."""
    query = Query(preset("llama-3.1-405b"), "llama-3.1-405b", "fp8", CLUSTER, 8, 2048, 128, limits=limits)
    return plan(query, calibration, collectives=collectives)


def layout_rows(planned: Plan) -> list[LayoutRow]:
    """Return the four layouts of one engine."""
    query, rows = planned.query, []
    for layout in FOUR_LAYOUTS:
        points = [point for point in planned.points if (point.layout, point.engines) == (layout, 1)]
        alone = 1e3 * query.output / points[0].latency_ms(query.output)
        most = max(points, key=lambda point: point.tokens_per_s)
        one = external_answers.batch_tokens_per_s(answer("layouts", "batch", layout))
        many = float(answer("layouts", "search", layout)["tokens_per_s"])
        rows.append(LayoutRow(layout, alone, most, (one, many), PUBLISHED_LAYOUTS.get(layout)))
    return rows


@dataclass(frozen=True, slots=True)
class RatioRow:
    """Speed of TP8 over that of PP8 for one sequence, and of PP8 over that of TP8 for many."""

    name: str
    one: float
    many: float


def ratio_rows(rows: Sequence[LayoutRow], calibration: Calibration) -> list[RatioRow]:
    """Return both ratios: published, predicted, with what is priced otherwise, and AIConfigurator's."""
    own = CollectiveCosts.on(CLUSTER, calibration.link)
    found = [RatioRow("published", *PUBLISHED_RATIOS), RatioRow("predicted", *_ratios(rows))]
    for title, library, kv_item in (
        (SUMS_OF_TENSORRT, "TensorRT-LLM", None),
        (SUMS_OF_NCCL, "NCCL", None),
        (KV_IN_FP8, "", 1),
        (BOTH, "TensorRT-LLM", 1),
    ):
        sums = TabledSums(own.link, own.network, own.gpus_per_node, library) if library else own
        planned = plan_of_405b(calibration, Limits(kv_item=kv_item), sums)
        found.append(RatioRow(title, *_ratios(layout_rows(planned))))
    first, last = rows[0].external, rows[-1].external
    return [*found, RatioRow("AIConfigurator", first[0] / last[0], last[1] / first[1])]


def _ratios(rows: Sequence[LayoutRow]) -> tuple[float, float]:
    first, last = rows[0], rows[-1]
    return first.alone / last.alone, last.most.tokens_per_s / first.most.tokens_per_s


def layouts_table(rows: Sequence[LayoutRow], ratios: Sequence[RatioRow], calibration: Calibration) -> str:
    """Return 405B on 8 H200 by layout, both ratios, and what PP8 makes of the GPUs' arithmetic."""
    body = []
    for row in rows:
        cells = [name_of(row.layout)]
        for number, (ours, theirs) in enumerate(zip((row.alone, row.most.tokens_per_s), row.external, strict=True)):
            digits = 1 - number
            if row.published is None:
                cells += ["", f"{ours:.{digits}f}", f"{theirs:.{digits}f}"]
            else:
                published = row.published[number]
                cells += [f"{published:g}", beside(ours, published, digits), beside(theirs, published, digits)]
        body.append([*cells, _capped(row.most)])
    header = ["layout", "tokens/s of one sequence, published", "predicted", "AIConfigurator"]
    header += ["most tokens/s, published", "predicted", "AIConfigurator", "sequences, predicted"]
    second = [[ratio.name, f"{ratio.one:.1f}", f"{ratio.many:.2f}"] for ratio in ratios]
    text = table(header, body) + "\n"
    text += table(["", "TP8 over PP8, one sequence", "PP8 over TP8, most tokens/s"], second) + "\n"
    last = rows[-1]
    published, predicted = PUBLISHED_LAYOUTS[last.layout][1], last.most.tokens_per_s
    rate = _products_of_peak(calibration)
    return text + paragraph(
        f"PP8's published {published} tokens/s are {_of_peak(published):.0%} of the FP8 operations on the data sheet "
        f"of 8 GPUs, the predicted ones {_of_peak(predicted):.0%}. Products of 2048 rows are priced at {rate:.0%}."
    )


def _of_peak(tokens_per_s: float) -> float:
    """Return the part of the FP8 operations of 8 GPUs that 405B takes, two a weight and token, 17 in for each out."""
    flops = tokens_per_s * (2048 + 128) / 128 * 2 * preset("llama-3.1-405b").parameters
    return flops / (8e12 * (CLUSTER.gpu.fp8_tflops or 1))


def _products_of_peak(calibration: Calibration) -> float:
    """Return the same part in which the products of a layer of 405B with 2048 rows are priced."""
    model = preset("llama-3.1-405b")
    own = CollectiveCosts.on(CLUSTER, calibration.link)
    (stage,) = StepModel(model, Layout(1, 1), calibration, own, "fp8").stages(StepWork(0, 0.0, ((2048, 0),), 0))
    time_us = sum(stage.parts[name] for name in ("qkv", "output", "gate_up", "down"))
    heads = (model.heads + model.kv_heads) * model.head_dim
    flops = 2 * 2048 * model.layers * model.hidden * (2 * heads + 3 * model.intermediate)
    return flops / time_us / (1e6 * (CLUSTER.gpu.fp8_tflops or 1))


@dataclass(frozen=True, slots=True)
class TokensRow:
    """A published throughput of tensor parallel, tokens/s.

    Attributes:
        ours: predicted, with keys and values in bfloat16, as our engine has them, and in FP8.
        external: AIConfigurator's, with the same two.
    """

    model: str
    gpus: int
    lengths: tuple[int, int]
    published: int
    ours: tuple[Point, Point]
    external: tuple[float, float]

    def errors(self) -> list[float]:
        """Return how far both of ours and both of AIConfigurator's are from what is published."""
        values = *(point.tokens_per_s for point in self.ours), *self.external
        return [value / self.published - 1 for value in values]


def tokens_rows(calibration: Calibration) -> list[TokensRow]:
    """Return the published throughputs."""
    rows = []
    for (model, gpus), published in PUBLISHED_TOKENS.items():
        layout = Layout(gpus, 1)
        for (prompt, output), tokens_per_s in zip(LENGTHS, published, strict=True):
            most, external = [], []
            for kv_item, name in ((2, "bfloat16"), (1, "fp8")):
                limits = Limits(kv_item=kv_item)
                query = Query(preset(model), model, "fp8", CLUSTER, gpus, prompt, output, limits=limits)
                most.append(max(plan(query, calibration, [(layout, 1)]).points, key=lambda point: point.tokens_per_s))
                lengths = {"prompt": prompt, "output": output}
                found = answer("tokens", "search", layout, model=model, kv=name, **lengths)
                external.append(float(found["tokens_per_s"]))
            pairs = (most[0], most[1]), (external[0], external[1])
            rows.append(TokensRow(model, gpus, (prompt, output), tokens_per_s, *pairs))
    return rows


def tokens_table(rows: Sequence[TokensRow]) -> str:
    """Return published throughputs of tensor parallel beside predicted ones, and the mean errors."""
    body = []
    for row in rows:
        values = *(point.tokens_per_s for point in row.ours), *row.external
        cells = [row.model, str(row.gpus), "{}, {}".format(*row.lengths), str(row.published)]
        cells += [beside(value, row.published) for value in values]
        body.append([*cells, " and ".join(map(_capped, row.ours))])
    names = ["predicted, bfloat16", "predicted, FP8", "AIConfigurator, bfloat16", "AIConfigurator, FP8"]
    header = ["model", "GPUs", "in, out", "published", *names, "sequences, predicted"]
    errors = [[model, *map("{:.0%}".format, mean_errors(rows, model))] for model, _ in PUBLISHED_TOKENS]
    return table(header, body) + "\n" + table(["mean error", *names], errors)


def mean_errors(rows: Sequence[TokensRow], model: str = "") -> list[float]:
    """Return the means of :meth:`TokensRow.errors` without their signs, of one model or of all."""
    every = zip(*(row.errors() for row in rows if model in ("", row.model)), strict=True)
    return [fmean(map(abs, each)) for each in every]


def _capped(point: Point) -> str:
    """Return the sequences of a point, marked where more might fit than plans consider."""
    return f"{point.sequences}{' (cap)' * (point.sequences == MOST_SEQUENCES)}"
