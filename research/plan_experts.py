"""Plan a model with a Mixture of Experts, and print the best point of each layout as a Markdown table.

    python research/plan_experts.py --model qwen3-235b-a22b --quantization fp8 --gpus 8 --target throughput

The options are those of ``shotcast plan``. The engine runs no such model, so no command starts what is planned.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from experts.model import EXPERT_PRESETS, read_planned_config
from experts.plan import plan
from markdown_table import table

from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.models.checkpoint import read_json
from shotcast.models.config import ModelConfig
from shotcast.planner import machine
from shotcast.planner.plan import Query, Target

COLUMNS = ("TP x PP", "engines", "sequences", "first token, ms", "each later, ms", "tokens/s", "sums")


def named_model(model: str) -> ModelConfig:
    """Return the configuration of a preset, of a folder that has ``config.json``, or of such a file.

    Raises:
        ConfigError: there is no such model, or its configuration makes no sense.
        UnsupportedError: it is of a kind that plans do not price.
    """
    if model in EXPERT_PRESETS:
        return EXPERT_PRESETS[model]
    file = Path(model, "config.json") if os.path.isdir(model) else Path(model)
    if file.name != "config.json" or not os.path.isfile(file):
        raise ConfigError(
            f"there is no model {model!r}; accepted: a preset ({', '.join(EXPERT_PRESETS)}), a folder with "
            "config.json, or that file"
        )
    return read_planned_config(read_json(file))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a preset, or a folder with config.json")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--cluster", default="dgx-h200")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--input", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an output")
    parser.add_argument(
        "--target", default="throughput", help="latency, throughput, or bounds such as ttft=500,tpot=20"
    )
    return parser


def main(arguments: Iterable[str] | None = None) -> None:
    asked = options().parse_args(None if arguments is None else list(arguments))
    where, target = cluster.load(asked.cluster), Target.parse(asked.target)
    model = named_model(asked.model)
    query = Query(model, asked.model, asked.quantization, where, asked.gpus, asked.input, asked.output, target)
    found = plan(query, machine.calibration_of(where.gpu, None))
    rows = [
        [
            str(point.layout),
            str(point.engines),
            str(point.sequences),
            f"{point.ttft_ms:.4g} ± {point.ttft_error:.0%}",
            f"{point.tpot_ms:.4g} ± {point.tpot_error:.0%}",
            f"{point.tokens_per_s:.4g}",
            point.algorithm or "none",
        ]
        for point in found.best_of_each_layout()
    ]
    print(table(COLUMNS, rows), end="")
    for name, why in found.refused.items():
        print(f"{name}: {why}")


if __name__ == "__main__":
    main()
