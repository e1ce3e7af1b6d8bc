"""All-reduces on 2, 4 and 8 H200: kernels of others as published, ours and NCCL's as measured here and as predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import external_answers
from markdown_table import table
from nccl_costs import NcclCosts
from published_layouts import CLUSTER

from shotcast.planner.calibration import Calibration
from shotcast.units import format_size

RESULTS = Path(__file__).parents[1] / "benchmarks" / "data" / "h200"
SIZES = (32 << 10, 256 << 10, 64 << 20)
"""Bytes of a token, of 8, and of a prompt of 2048 tokens of 405B."""
RANKS, MEASURED_RANKS = (2, 4, 8), (2, 4)
KEYS = tuple((nbytes, ranks) for nbytes in SIZES for ranks in RANKS)
LIBRARIES = {"TensorRT-LLM": "TensorRT-LLM", "SGLang": "SGLang", "vLLM": "vLLM", "NCCL": "NCCL 2.29"}


@dataclass(frozen=True, slots=True)
class SumRow:
    """Microseconds by bytes and ranks; no entry where there is none."""

    name: str
    times_us: dict[tuple[int, int], float]


def sum_rows(calibration: Calibration) -> list[SumRow]:
    """Return all of them."""
    own = NcclCosts.on(CLUSTER, calibration.link)
    rows = []
    for library, name in LIBRARIES.items():
        times = {(nbytes, ranks): external_answers.sums(library, ranks)[nbytes] for nbytes, ranks in KEYS}
        rows.append(SumRow(f"{name}, published", times))
    rows.append(SumRow("NCCL, measured here", _measured("nccl")))
    rows.append(SumRow("NCCL, predicted", {key: own.nccl_sum(*key).time_us for key in KEYS}))
    rows.append(SumRow("ours, measured here", _measured("auto")))
    rows.append(SumRow("ours, predicted", {key: own.all_reduce(*key, 2).time_us for key in KEYS}))
    return rows


def _measured(algorithm: str) -> dict[tuple[int, int], float]:
    times: dict[tuple[int, int], float] = {}
    for ranks in MEASURED_RANKS:
        rows = json.loads((RESULTS / f"all_reduce_bf16_x{ranks}.json").read_text())["rows"]
        found = {row["nbytes"]: row["time_us"] for row in rows if row["algorithm"] == algorithm}
        times |= {(nbytes, ranks): found[nbytes] for nbytes in SIZES}
    return times


def sums_on_a_node_table(rows: Sequence[SumRow]) -> str:
    """Return them as a table."""
    header = ["us", *(f"{format_size(nbytes)} on {ranks}" for nbytes, ranks in KEYS)]
    cells = [[f"{row.times_us[key]:.1f}" if key in row.times_us else "" for key in KEYS] for row in rows]
    return table(header, [[row.name, *texts] for row, texts in zip(rows, cells, strict=True)])
