"""Predict published comparisons of layouts and of all-reduces over nodes, and print them as Markdown tables.

    python research/scaling_study.py [--fill research/reports/strong_scaling.md]

``--fill`` puts the tables into the page between their markers, and writes the pictures in ``docs/images``.
No constant is fitted to what is compared: kernels and link are those of the calibration of the H200, networks are those
of ``src/shotcast/hardware/clusters``, and NCCL's constants on the link come from its measured rings.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import forecast
import nccl_model
import published_nccl
import scaling_pictures
from external_answers import version
from markdown_table import folded, table
from measured_layouts import RunRow, run_rows, runs_tables
from measured_layouts import mean_errors as measured_errors
from published_layouts import (
    BOTH,
    SUMS_OF_NCCL,
    LayoutRow,
    RatioRow,
    TokensRow,
    layout_rows,
    layouts_table,
    mean_errors,
    plan_of_405b,
    ratio_rows,
    tokens_rows,
    tokens_table,
)
from published_stages import FEW_SEQUENCES, StageRow, stage_rows, stages_table
from scaling_over_nodes import MODELS, TP, TP_NARROW, ScalingRow, most_gain, scaling_rows, scaling_tables
from scaling_over_nodes import PUBLISHED_GAIN as END_TO_END_GAIN
from scaling_pictures import Picture
from sums_on_a_node import SumRow, sum_rows, sums_on_a_node_table
from sums_over_nodes import (
    CLUSTERS,
    PUBLISHED_GAIN,
    NodeSumRow,
    node_sum_rows,
    node_sums_tables,
    range_text,
    thousand_nodes_table,
)

from shotcast.hardware import cluster
from shotcast.planner.calibration import Calibration, load
from shotcast.planner.plan import Limits, Plan

PART = "NVIDIA H200"
NETWORKS = {"h200-x4-ndr": "NDR", "a100-x4-slingshot": "Slingshot"}
IMAGES = Path("..", "..", "docs", "images")
"""The folder of the pictures, from that of the page."""


@dataclass(frozen=True, slots=True)
class Study:
    """The rows of which tables and pictures are made."""

    calibration: Calibration
    plan_405b: Plan
    layouts: list[LayoutRow]
    ratios: list[RatioRow]
    tokens: list[TokensRow]
    stages: list[StageRow]
    measured: list[RunRow]
    sums: list[SumRow]
    node_sums: list[NodeSumRow]
    scaling: list[ScalingRow]


def study() -> Study:
    """Return all rows."""
    calibration = load(PART)
    planned = plan_of_405b(calibration, Limits())
    layouts = layout_rows(planned)
    return Study(
        calibration,
        planned,
        layouts,
        ratio_rows(layouts, calibration),
        tokens_rows(calibration),
        stage_rows(calibration),
        run_rows(calibration),
        sum_rows(calibration),
        node_sum_rows(calibration),
        scaling_rows(calibration),
    )


def constants_table(calibration: Calibration) -> str:
    """Return every constant but those of NCCL's own model, and its source."""
    own, link, ratio = calibration.link, nccl_model.NVLINK_RINGS, "by the ratio of the data sheets"
    body = [
        [
            "NVLink of the H200",
            f"{own.fixed_us:.2f} us a call, {own.step_us:.2f} us a step, {own.bw_gbps:.0f} GB/s",
            f"the packaged calibration: our own sums on 2 and 4 H200, {calibration.link_residual:.0%} residual",
        ],
        [
            "NCCL on it",
            f"{link.fixed_us:.1f} us a call, {link.step_us:.2f} us a step, {link.bw_gbps:.0f} GB/s",
            f"fitted to its rings, measured here on 2 and 4 H200, {nccl_model.RING_RESIDUAL:.0%} residual",
        ],
        [
            "NCCL between nodes",
            "those that it chooses by; on Slingshot 3 us more a step, the difference of the networks below",
            "[NCCL 2.30.7, tuning.cc](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc)",
        ],
    ]
    for name in CLUSTERS:
        network = cluster.load(name).network
        if network is None:
            raise ValueError(f"{name} has no network")
        what = f"{network.latency_us:g} us a step, {network.bw_gbps:g} GB/s a GPU"
        body.append([f"network of {name}", what, network.source])
    body.append(["kernels and link of the A100", f"those of the H200 {ratio}; FP8 left out", "NVIDIA's data sheets"])
    kinds = []
    for name, fit in sorted(calibration.kinds.items()):
        cost = fit.cost
        rates = f"{cost.first_rate:.4g}", f"{cost.second_rate:.4g}" if cost.second_rate != 1 else ""
        kinds.append([f"`{name}`", f"{cost.fixed_us:.2f}", *rates, f"{fit.residual:.0%}"])
    for name, norm in calibration.fused_norms.items():
        d = f"d {norm.cost.beyond_us:.2f} us"
        kinds.append([f"`{name}`", f"{norm.cost.fixed_us:.2f}", f"{norm.cost.rate:.4g}", d, f"{norm.residual:.0%}"])
    header = ["kernel", "f, us", "x, GB/s or Gflop/s", "y, Gflop/s or thousands of keys/s", "residual"]
    return (
        table(["constant", "value", "source"], body)
        + "\n"
        + folded(
            "Kernels of the H200: constants of `cost/inference.py`, fitted to our measurements of each alone",
            table(header, kinds),
        )
    )


def summary_table(found: Study) -> str:
    """Return each published finding, what is predicted for it, AIConfigurator's answer, and what explains the rest."""
    ratios, stages, several = {row.name: row for row in found.ratios}, found.stages[-1], "not of several nodes"
    errors, measured = mean_errors(found.tokens), measured_errors([row.tokens_per_s for row in found.measured])
    published, predicted, external = ratios["published"], ratios["predicted"], ratios["AIConfigurator"]
    ends = [(name, [row for row in found.node_sums if row.cluster == name]) for name in CLUSTERS]
    gains = [(name, [most_gain(found.scaling, name, MODELS[0], form) for form in (TP, TP_NARROW)]) for name in CLUSTERS]

    def by_cluster(texts: Iterable[tuple[str, str]]) -> str:
        return ", ".join(f"{text} on {NETWORKS[name]}" for name, text in texts)

    body = [
        [
            "405B on 8 H200, one sequence: TP8 over PP8",
            f"{published.one:g}",
            f"{predicted.one:.1f}",
            f"{external.one:.1f}",
            f"sums: with NCCL's measured ones in place of ours {ratios[SUMS_OF_NCCL].one:.1f}",
        ],
        [
            "the same, most tokens/s: PP8 over TP8",
            f"{published.many:g}",
            f"{predicted.many:.2f}",
            f"{external.many:.2f}",
            f"TensorRT-LLM's sums, and its keys and values in FP8: {ratios[BOTH].many:.2f}",
        ],
        [
            f"tokens/s of three models, {len(found.tokens)} rows",
            "TensorRT-LLM",
            f"{errors[0]:.0%} off",
            f"{errors[2]:.0%} off",
            f"keys and values in FP8: {errors[1]:.0%} off, AIConfigurator {errors[3]:.0%}",
        ],
        [
            "70B, 8 stages over one",
            f"{stages.published:.2f}",
            f"{stages.served:.2f}, closed form {stages.predicted:.2f}",
            f"{stages.external[0]:.2f}",
            f"in part uneven steps: {stages.few_served:.2f} with {FEW_SEQUENCES} sequences a stage",
        ],
        [
            f"tokens/s of our engine on 2 and 4 H200, {len(found.measured)} runs",
            "our measurements",
            f"{measured[0]:.0%} off",
            f"{measured[1]:.0%} off",
            "[how far off the planner is](planner_accuracy.md)",
        ],
        [
            "NVRAR over NCCL, 128 KiB to 2 MiB",
            "{} to {}".format(*PUBLISHED_GAIN),
            by_cluster((name, range_text([row.gain for row in rows])) for name, rows in ends),
            several,
            "sums in 16 bits between nodes: "
            + by_cluster((name, range_text([row.narrow_gain for row in rows])) for name, rows in ends),
        ],
        [
            "the same end to end, 405B, decode-heavy",
            f"up to {END_TO_END_GAIN}",
            by_cluster((name, f"{gain:.2f}") for name, (gain, _) in gains),
            several,
            "the same: " + by_cluster((name, f"{narrow:.2f}") for name, (_, narrow) in gains),
        ],
    ]
    return table(["", "published", "predicted", f"AIConfigurator {version()}", "what explains the difference"], body)


def tables(found: Study) -> dict[str, str]:
    """Return every table by the name of its marker."""
    return {
        "summary": summary_table(found),
        "constants": constants_table(found.calibration),
        "layouts": layouts_table(found.layouts, found.ratios, found.calibration),
        "tokens": tokens_table(found.tokens),
        "stages": stages_table(found.stages),
        "measured": runs_tables(found.measured),
        "external": sums_on_a_node_table(found.sums),
        "nccl": folded("Published all-reduces, and NCCL's model", published_nccl.table()),
        "sums": node_sums_tables(found.node_sums),
        "scaling": scaling_tables(found.scaling),
        "thousand": thousand_nodes_table(found.calibration),
    }


def pictures(found: Study) -> dict[str, Picture]:
    """Return every picture by its name."""
    every = [
        scaling_pictures.layouts_picture(found.layouts),
        scaling_pictures.pareto_picture(found.plan_405b),
        scaling_pictures.stages_picture(found.stages),
        scaling_pictures.gains_picture(found.node_sums),
        *(scaling_pictures.scaling_picture(found.scaling, name) for name in CLUSTERS),
    ]
    return {picture.name: picture for picture in every}


def filled(page: str, made: dict[str, str]) -> str:
    """Return a page with each table between its markers. Raises ConfigError if it lacks one."""
    for name, text in made.items():
        page = forecast.filled(page, text, f"<!-- research/scaling_study.py {name} -->", f"<!-- end of {name} -->")
    return page


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fill", type=Path, default=None)
    options = parser.parse_args(None if arguments is None else list(arguments))
    found = study()
    made = tables(found)
    if options.fill is None:
        print("\n".join(f"{name}\n\n{text}" for name, text in made.items()), end="")
    else:
        options.fill.write_text(filled(options.fill.read_text(), made))
        scaling_pictures.write(pictures(found), options.fill.parent / IMAGES)


if __name__ == "__main__":
    main()
