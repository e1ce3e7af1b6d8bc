"""Predict models with experts beside published figures and AIConfigurator's, and print them as Markdown tables.

    python research/expert_study.py [--fill research/reports/mixture_of_experts.md]

All that is compared with is external, and no constant is fitted to it; ``research/aiconfigurator_experts.py`` writes
the file of it, ``benchmarks/data/external/experts.json``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import forecast
from experts.model import EXPERT_PRESETS
from experts.plan import ExpertLayout, ExpertStepModel, plan

from shotcast.hardware import cluster
from shotcast.hardware.cluster import Cluster
from shotcast.models.presets import preset
from shotcast.planner.calibration import Calibration, load
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.plan import Limits, Query
from shotcast.planner.step import StepModel, StepWork

EXTERNAL = Path(__file__).parents[1] / "benchmarks" / "data" / "external" / "experts.json"
CLUSTER = cluster.load("dgx-h200")
PUBLISHED = {(128, 128): 30429, (128, 2048): 42821, (1000, 1000): 23789, (2048, 128): 3331, (2048, 2048): 16672}
"""Qwen3-235B-A22B FP8 on 8 H200 by TensorRT-LLM, tokens in and out: tokens/s."""
DEEPSEEK, DEEPSEEK_STEP = 11489, 1151
"""DeepSeek-R1 FP8 on 8 H200 by TensorRT-LLM, DP attention and EP8: tokens/s, and tokens of a step at most."""
LATENCIES = {
    "H200": ("dgx-h200", "9515", {"llama-3.1-8b": 833.4, "llama-3.1-70b": 2077.5, "mixtral-8x7b": 1917.4}),
    "A100": ("a100-x4-slingshot", "9523", {"llama-3.1-8b": 1579.3, "llama-3.1-70b": 3990.6, "mixtral-8x7b": 3643.8}),
}
"""Builds of vLLM's own benchmark: milliseconds of 8 sequences together, prompts of 32 tokens, outputs of 128."""
LATENCY_RANKS = {"llama-3.1-8b": 1, "llama-3.1-70b": 4, "mixtral-8x7b": 2}
LATENT = ("qkv", "rotation", "attention", "output")
SHOWN_TOKENS = (1, 8, 64, 512, 4096)
LARGEST_STEP = 8192
"""Tokens of a step at most, TensorRT-LLM's default."""


def external() -> dict[str, list[dict[str, Any]]]:
    """Return AIConfigurator's answers, and rows of its tables."""
    found: dict[str, list[dict[str, Any]]] = json.loads(EXTERNAL.read_text())
    return found


def step_model(
    name: str, layout: ExpertLayout, quantization: str, calibration: Calibration, where: Cluster = CLUSTER
) -> StepModel:
    constants = calibration.scaled_to(where.gpu)
    costs = CollectiveCosts.on(where, constants.link)
    if name in EXPERT_PRESETS:
        return ExpertStepModel(EXPERT_PRESETS[name], layout, constants, costs, quantization)
    return StepModel(preset(name), layout.dense, constants, costs, quantization)


def grouped_us(row: dict[str, Any], tokens: int, calibration: Calibration) -> float:
    """Return the microseconds that are predicted for a row of the tables of grouped products, of one layer."""
    sharing, groups = row["sharing"], row["groups"]
    quantization = "" if row["dtype"] == "bfloat16" else "fp8"
    model = step_model(row["model"], ExpertLayout(sharing * groups, 1, groups), quantization, calibration)
    (stage,) = model.stages(StepWork(tokens, 1.0, (), 0))
    return stage.parts["experts"] / model.model.layers


def grouped_table(calibration: Calibration) -> str:
    """Return how far predictions lie from the tables, and some of their rows."""
    errors: dict[tuple[str, str, bool, str], list[float]] = {}
    for row in external()["grouped"]:
        key = row["framework"], row["dtype"], row["groups"] > 1, row["distribution"]
        ratios = [grouped_us(row, int(tokens), calibration) / us - 1 for tokens, us in row["us"].items()]
        errors.setdefault(key, []).extend(ratios)
    lines = [
        "| published table | routing | EP | rows | root mean square | mean |",
        "|---|---|---|---|---|---|",
    ]
    for (framework, dtype, has_groups, distribution), each in sorted(errors.items()):
        rms, mean = math.sqrt(sum(error**2 for error in each) / len(each)), sum(each) / len(each)
        spread = "balanced" if distribution == "balanced" else "power law"
        cells = [
            f"{framework} {dtype}",
            spread,
            "8" if has_groups else "1",
            str(len(each)),
            f"{rms:.0%}",
            f"{mean:+.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"| us of a layer, bfloat16 | {' | '.join(f'tokens {tokens}' for tokens in SHOWN_TOKENS)} |"]
    lines.append("|---" * (1 + len(SHOWN_TOKENS)) + "|")
    for row in external()["grouped"]:
        if row["framework"].startswith("vLLM") and row["dtype"] == "bfloat16" and row["distribution"] == "balanced":
            cells = [
                f"{row['model']}, TP{row['sharing']}" if row["groups"] == 1 else f"{row['model']}, EP{row['groups']}"
            ]
            for tokens in SHOWN_TOKENS:
                ours, theirs = grouped_us(row, tokens, calibration), row["us"].get(str(tokens), math.nan)
                cells.append(f"{theirs:.0f}: {ours:.0f} ({ours / theirs - 1:+.0%})")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def latent_us(row: dict[str, Any], calibration: Calibration) -> float:
    """Return the microseconds that are predicted for a row of the tables of latent attention, of one layer."""
    model = step_model("deepseek-v3", ExpertLayout(128 // row["heads"], 1), "", calibration)
    sequences, tokens = row["sequences"], row["tokens"]
    work = StepWork(sequences, row["context"], (), 0)
    if not row["context"]:
        work = StepWork(0, 0.0, ((tokens, 0),) * sequences, 0)
    (stage,) = model.stages(work)
    return sum(stage.parts[name] for name in LATENT) / model.model.layers


def latent_table(calibration: Calibration) -> str:
    """Return attention of a layer of DeepSeek-V3, by tables and by us."""
    rows = external()["latent"]
    cases = {(row["sequences"], row["tokens"], row["context"]) for row in rows}
    heads = sorted({row["heads"] for row in rows}, reverse=True)
    lines = [f"| us | {' | '.join(f'{each} heads' for each in heads)} |", "|---" * (1 + len(heads)) + "|"]
    errors = []
    for sequences, tokens, context in sorted(cases, key=lambda case: (case[2] == 0, *case)):
        name = f"{sequences} x 1 after {context}" if context else f"prompt of {tokens}"
        cells = [name]
        for each in heads:
            case = (sequences, tokens, context, each)
            row = next(row for row in rows if (row["sequences"], row["tokens"], row["context"], row["heads"]) == case)
            errors.append(latent_us(row, calibration) / row["us"] - 1)
            cells.append(f"{row['us']:.0f}: {latent_us(row, calibration):.0f} ({errors[-1]:+.0%})")
        lines.append(f"| {' | '.join(cells)} |")
    rms = math.sqrt(sum(error**2 for error in errors) / len(errors))
    lines += ["", f"Root mean square of {len(errors)} rows: {rms:.0%}."]
    return "\n".join(lines) + "\n"


def deepseek_table(calibration: Calibration) -> str:
    """Return DeepSeek-R1 on 8 H200 with data-parallel attention: published, AIConfigurator's and ours."""
    (row,) = [row for row in external()["rows"] if row["table"] == "deepseek"]
    name, prompt, output, each = "deepseek-v3", row["prompt"], row["output"], row["sequences"] // 8
    theirs = row["sequences"] * output / (row["ttft_ms"] + (output - 1) * row["tpot_ms"]) * 1e3
    query = Query(
        EXPERT_PRESETS[name], name, "fp8", CLUSTER, 8, prompt, output, limits=Limits(each, DEEPSEEK_STEP, 0.95)
    )
    points = plan(query, calibration, [(ExpertLayout(8, 1, 8, True), 1)]).points
    point = max(points, key=lambda point: point.sequences)
    lines = ["| | sequences | tokens/s | a step that decodes, ms |", "|---|---|---|---|"]
    lines.append(f"| TensorRT-LLM, published | {row['sequences']} | {DEEPSEEK} | |")
    lines.append(f"| AIConfigurator, static | {row['sequences']} | {theirs:.0f} | {row['tpot_ms']:.1f} |")
    ours, step_ms = point.tokens_per_s, sum(point.parts.values()) / 1e3
    cells = ["predicted", str(8 * point.sequences), f"{ours:.0f} ({ours / DEEPSEEK - 1:+.0%})", f"{step_ms:.1f}"]
    lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def latency_table(calibration: Calibration) -> str:
    """Return the time of 8 sequences, measured by vLLM and predicted, of Mixtral and of dense models."""
    lines = [
        "| | ranks | vLLM, published | predicted | beside 8B, published | predicted |",
        "|---|---|---|---|---|---|",
    ]
    for gpu, (where, build, times) in LATENCIES.items():
        spec, found = cluster.load(where), {}
        for name, ranks in LATENCY_RANKS.items():
            model = step_model(name, ExpertLayout(ranks, 1), "", calibration, spec)
            works = [StepWork(0, 0.0, ((32, 0),) * 8, 8), *(StepWork(8, 32.0 + tokens, (), 8) for tokens in range(127))]
            found[name] = sum(model.stages(work)[0].time_us for work in works) / 1e3
            theirs, base = times[name], "llama-3.1-8b"
            cells = [f"{name} on {gpu}, [{build}](https://buildkite.com/vllm/performance-benchmark/builds/{build})"]
            cells += [str(ranks), f"{theirs:.0f} ms", f"{found[name]:.0f} ms ({found[name] / theirs - 1:+.0%})"]
            cells += [f"{theirs / times[base]:.2f}", f"{found[name] / found[base]:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def steps_table(calibration: Calibration) -> str:
    """Return a token of each sequence and the first token of one, by AIConfigurator and by us."""
    rows = [row for row in external()["rows"] if row["table"] == "steps"]
    lines = ["| model | ranks | sequences | each later token, ms | predicted | first token of one, ms | predicted |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        dp = row["dp"] > 1
        model = step_model(row["model"], ExpertLayout(row["tensor"], 1, row["groups"], dp), "", calibration)
        each = row["sequences"] // row["dp"]
        context = row["prompt"] + row["output"] / 2
        (stage,) = model.stages(StepWork(each, context, (), each))
        first = ["", ""]
        if row["sequences"] == 1:
            (prompt,) = model.stages(StepWork(0, 0.0, ((row["prompt"], 0),), 1))
            first = [
                f"{row['ttft_ms']:.1f}",
                f"{prompt.time_us / 1e3:.1f} ({prompt.time_us / 1e3 / row['ttft_ms'] - 1:+.0%})",
            ]
        ours, theirs = stage.time_us / 1e3, row["tpot_ms"]
        name = f"{row['tensor']}" + f", EP{row['groups']}" * (row["groups"] > 1) + ", DP attention" * dp
        cells = [row["model"], name, str(row["sequences"]), f"{theirs:.2f}", f"{ours:.2f} ({ours / theirs - 1:+.0%})"]
        lines.append(f"| {' | '.join([*cells, *first])} |")
    return "\n".join(lines) + "\n"


def tokens_table(calibration: Calibration) -> str:
    """Return the most tokens/s of 235B on 8 H200: published, AIConfigurator's and ours, by layout."""
    name, layouts = "qwen3-235b-a22b", {1: ExpertLayout(8, 1, 8), 8: ExpertLayout(8, 1, 8, True)}
    answers = {(row["prompt"], row["output"], row["dp"]): row for row in external()["rows"] if row["table"] == "tokens"}
    lines = [
        "| in, out | TensorRT-LLM, published | AIConfigurator, TP attention | DP attention "
        "| predicted, TP attention | DP attention |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for (prompt, output), published in PUBLISHED.items():
        limits = Limits(batch_tokens=LARGEST_STEP, kv_item=1)
        query = Query(EXPERT_PRESETS[name], name, "fp8", CLUSTER, 8, prompt, output, limits=limits)
        points = plan(query, calibration, [(layout, 1) for layout in layouts.values()]).points
        cells = [f"{prompt}, {output}", f"{published}"]
        cells += [f"{answers[prompt, output, dp]['tokens_per_s']:.0f}" for dp in layouts]
        for layout in layouts.values():
            most = max(point.tokens_per_s for point in points if point.layout == layout)
            cells.append(f"{most:.0f} ({most / published - 1:+.0%})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tables() -> dict[str, str]:
    """Return every table by the name of its marker."""
    calibration = load("NVIDIA H200")
    made = {
        "grouped": grouped_table,
        "latent": latent_table,
        "latency": latency_table,
        "steps": steps_table,
        "tokens": tokens_table,
        "deepseek": deepseek_table,
    }
    return {name: make(calibration) for name, make in made.items()}


def filled(page: str, made: dict[str, str]) -> str:
    """Return a page with each table between its markers. Raises ConfigError if it lacks one."""
    for name, table in made.items():
        page = forecast.filled(page, table, f"<!-- research/expert_study.py {name} -->", f"<!-- end of {name} -->")
    return page


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fill", type=Path, default=None)
    options = parser.parse_args(None if arguments is None else list(arguments))
    made = tables()
    if options.fill is None:
        print("\n".join(f"{name}\n\n{table}" for name, table in made.items()), end="")
    else:
        options.fill.write_text(filled(options.fill.read_text(), made))


if __name__ == "__main__":
    main()
