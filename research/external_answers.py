"""Kept answers of AIConfigurator to the questions of the strong-scaling study, and rows of its tables.

``research/aiconfigurator_answers.py`` writes them. Its "batch" answers are of so many sequences a stage whose prompts
come together; those of "search" are of the batch with the most tokens/s.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shotcast.planner.collectives import CollectiveCosts, CollectiveTime
from shotcast.planner.step import Layout

DATA = Path(__file__).parents[1] / "benchmarks" / "data" / "external" / "aiconfigurator.json"
ITEMSIZE = 2
"""Its tables of sums count elements of 16 bits."""


@cache
def _kept() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(DATA.read_text())
    return kept


def version() -> str:
    """Return the version that was asked."""
    return str(_kept()["versions"]["aiconfigurator"])


def answer(table: str, mode: str, layout: Layout, **question: Any) -> dict[str, Any]:
    """Return the one answer to a question. Raises KeyError if there is none."""
    wanted = {"table": table, "mode": mode, "layout": str(layout), **question}
    for row in _kept()["rows"]:
        if all(row[name] == value for name, value in wanted.items()):
            found: dict[str, Any] = row
            return found
    raise KeyError(f"AIConfigurator was not asked {wanted}")


def batch_tokens_per_s(row: dict[str, Any]) -> float:
    """Return tokens/s of all sequences of a batch, from its first prompt to its last token."""
    return 1e3 * row["sequences"] * row["output"] / float(row["request_ms"])


def sums(library: str, gpus: int) -> dict[int, float]:
    """Return the microseconds of a library's all-reduces of 16-bit elements on H200, by bytes."""
    rows = [row for row in _kept()["all_reduce"] if (row["library"], row["gpus"]) == (library, gpus)]
    return {ITEMSIZE * row["elements"]: row["time_us"] for row in sorted(rows, key=lambda row: row["elements"])}


@dataclass(frozen=True, slots=True)
class TabledSums(CollectiveCosts):
    """Sums on one node take the times of a table in place of our own: a what-if.

    Attributes:
        library: the table's.
    """

    library: str = "NCCL"

    def all_reduce(self, nbytes: int, ranks: int, itemsize: int, algorithm: str = "auto") -> CollectiveTime:
        """Return the time between those of the two nearest sizes, in proportion to the bytes."""
        table = sums(self.library, ranks)
        sizes = list(table)
        after = min(max(bisect_right(sizes, nbytes), 1), len(sizes) - 1)
        low, high = sizes[after - 1], sizes[after]
        part = max(0.0, (nbytes - low) / (high - low))
        return CollectiveTime(table[low] + part * (table[high] - table[low]), "vendor")
