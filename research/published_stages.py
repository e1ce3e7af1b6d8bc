"""70B on 1, 2, 4 and 8 stages: a published series, AIConfigurator's nearly ideal one, and ours.

The series is of RTX 6000 Pro with FP4 weights, of which we have no measurements; ours is of H200 in FP8. So throughput
is compared as a multiple of that of one stage. All have as many sequences a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from external_answers import answer
from markdown_table import paragraph, table
from published_layouts import CLUSTER

from shotcast.engine.scheduler import SchedulerConfig
from shotcast.models.presets import preset
from shotcast.planner.calibration import Calibration
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.plan import Limits, Query, plan
from shotcast.planner.step import Layout, StepModel
from shotcast.simulator.serving import Arrival, serve
from shotcast.simulator.traffic import PricedSteps

PUBLISHED = {1: 393, 2: 813, 4: 1511, 8: 2495}
"""Tokens/s of 70B with 2048 tokens in and 128 out; research/reports/strong_scaling.md links the publication."""
REQUESTS, STEP_TOKENS = 3000, 8192
"""The requests of that benchmark, all sent at once, and the tokens of a step at most, TensorRT-LLM's default."""
SYSTEMS = ("rtx_pro_6000_server", "h200_sxm")
FEW_SEQUENCES = 32
PCIE_GBPS = 64.0
"""A link of 16 lanes of PCIe 5, in each direction."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """Throughput over that of one stage.

    Attributes:
        sequences: of a stage, as many as AIConfigurator finds room for on the GPUs of the series.
        published: of RTX 6000 Pro.
        external: AIConfigurator's of RTX 6000 Pro, and of H200.
        predicted: by the closed form of plans.
        served: the engine's own scheduler serves the published number of requests, simulated.
        few_served: the same with :data:`FEW_SEQUENCES` a stage.
    """

    stages: int
    sequences: int
    published: float
    external: tuple[float, float]
    predicted: float
    served: float
    few_served: float


def stage_rows(calibration: Calibration) -> list[StageRow]:
    """Return the series. Ours keep keys and values in FP8, with which as many sequences fit an H200 too."""
    each = int(answer("stages", "search", Layout(1, 1), system=SYSTEMS[0])["sequences"])
    found = []
    for stages, published in PUBLISHED.items():
        layout, limits = Layout(1, stages), Limits(each * stages, STEP_TOKENS, kv_item=1)
        query = Query(preset("llama-3.1-70b"), "llama-3.1-70b", "fp8", CLUSTER, stages, 2048, 128, limits=limits)
        point = plan(query, calibration, [(layout, 1)]).points[-1]
        if point.sequences != limits.sequences:
            raise ValueError(f"{limits.sequences} sequences do not fit {stages} stages, only {point.sequences}")
        values = [published, *(answer("stages", "search", layout, system=system)["tokens_per_s"] for system in SYSTEMS)]
        served = [_served(query, layout, calibration, stages * sequences) for sequences in (each, FEW_SEQUENCES)]
        found.append([*values, point.tokens_per_s, *served])
    ratios = [[value / first for value, first in zip(values, found[0], strict=True)] for values in found]
    return [
        StageRow(stages, each, published, (there, here), *ours)
        for stages, (published, there, here, *ours) in zip(PUBLISHED, ratios, strict=True)
    ]


def _served(query: Query, layout: Layout, calibration: Calibration, sequences: int) -> float:
    """Return tokens/s from the first of all requests to the last token, simulated."""
    own = CollectiveCosts.on(query.cluster, calibration.link)
    model = StepModel(query.model, layout, calibration, own, query.quantization, kv_item=query.limits.kv_item)
    tokens = query.prompt + query.output
    config = SchedulerConfig(
        max_num_seqs=sequences,
        max_num_batched_tokens=query.limits.batch_tokens,
        block_size=16,
        num_blocks=sequences * tokens,  # never short
        max_model_len=tokens,
        prefix_caching=False,
        lookahead=1,
        pipeline=layout.pipeline_parallel,
    )
    return serve([Arrival(0.0, query.prompt, query.output)] * REQUESTS, config, PricedSteps(model)).tokens_per_s


def curves(rows: Sequence[StageRow]) -> dict[str, list[float]]:
    """Return each series by its name."""
    return {
        "published, RTX 6000 Pro": [row.published for row in rows],
        "ideal": [float(row.stages) for row in rows],
        "AIConfigurator, RTX 6000 Pro": [row.external[0] for row in rows],
        "AIConfigurator, H200": [row.external[1] for row in rows],
        "predicted, closed form": [row.predicted for row in rows],
        f"simulated, {rows[0].sequences} sequences a stage": [row.served for row in rows],
        f"simulated, {FEW_SEQUENCES} a stage": [row.few_served for row in rows],
    }


def stages_table(rows: Sequence[StageRow]) -> str:
    """Return all series, what they lose, and what does not explain the published loss."""
    series, last = curves(rows), rows[-1].stages
    body = [[str(row.stages), *(f"{each[number]:.2f}" for each in series.values())] for number, row in enumerate(rows)]
    body.append([f"lost at {last}", *(f"{1 - each[-1] / last:.0%}" for each in series.values())])
    more_ms = 128e3 / PUBLISHED[last] - 128e3 / PUBLISHED[1] / last
    moved_ms = 2048 * preset("llama-3.1-70b").hidden * 2 / PCIE_GBPS / 1e6
    apart = ", ".join(f"{1 / row.published - 1 / row.stages:+.1%} with {row.stages}" for row in rows[1:])
    text = paragraph(
        f"On {last} published stages a request takes {more_ms:.0f} ms more than an {last}th of its time on one. "
        f"Sending its rows over PCIe 5 at {PCIE_GBPS:g} GB/s would explain {moved_ms:.1f} ms of them. A fixed time of "
        f"each step would add the same part of one stage's time with any number of stages; the series has {apart}."
    )
    return table(["stages", *series], body) + "\n" + text
