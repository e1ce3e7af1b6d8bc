"""The results of a measurement of overlap, and their file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shotcast.bench.report import stamped
from shotcast.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """One form.

    Attributes:
        way: its name.
        time_us: its time, of the slowest rank; None where it could not be measured.
        compute_us, communication_us, sequential_us, plain_us: the times of products alone, of our messages alone, of
            one after the other, and of our plain overlap.
        spans: when each step ran in one run on rank 0; empty where that is not known.
        whole: the message is a matrix of the product.
        library_us, library_plain_us: the times of the library's messages alone, and of its plain overlap; None where it
            does not serve.
        by: whose form it is: ``own``, ``library``, ``torch``, ``published``, or ``alone`` without overlap by anyone.
        reason: why it could not be measured.
        evidence: what was seen of how it ran.
    """

    way: str
    op: str
    device: str
    dtype: str
    world_size: int
    nbytes: int
    gemm: tuple[int, int, int]
    repeat: int
    steps: int
    lanes: int
    nodes: int
    delay_us: float
    time_us: float | None
    compute_us: float
    communication_us: float
    sequential_us: float
    plain_us: float
    spans: tuple[dict[str, Any], ...] = ()
    whole: bool = False
    library_us: float | None = None
    library_plain_us: float | None = None
    by: str = ""
    reason: str = ""
    evidence: str = ""

    @property
    def message_us(self) -> float:
        """The time of the messages alone, by whoever is faster."""
        return min(self.communication_us, self.library_us or math.inf)

    @property
    def ideal_us(self) -> float:
        """The longer of products and messages alone."""
        return max(self.compute_us, self.message_us)

    @property
    def hidden(self) -> float:
        """The part of the communication that is hidden under matmuls."""
        exposed = self.sequential_us - self.compute_us
        return (self.sequential_us - self.time_us) / exposed if exposed > 0 and self.time_us is not None else math.nan


@dataclass(frozen=True, slots=True)
class Measured:
    """The rows of one configuration, and what ``auto`` decided there."""

    rows: tuple[OverlapRow, ...]
    decision: str
    clocks: tuple[str, ...] = ()


def document(measured: Sequence[Measured], environment: dict[str, Any], command: str, kernels: dict[str, str]) -> str:
    """Return results as JSON, with where, how and by which kernels they were measured."""
    result = stamped(environment, command, kernels)
    rows = [asdict(row) | {"measurement": number} for number, one in enumerate(measured) for row in one.rows]
    choices = [{"decision": one.decision, "clocks": one.clocks} for one in measured]
    return json.dumps(result | {"measurements": choices, "rows": rows}, indent=1) + "\n"


def read(path: Path) -> tuple[Measured, ...]:
    """Return the results of a file written by :func:`document`.

    Raises:
        ConfigError: it is another file.
    """
    try:
        found = json.loads(path.read_text())
        rows: list[list[OverlapRow]] = [[] for _ in found["measurements"]]
        for row in found["rows"]:
            rows[row.pop("measurement")].append(_row(row))
        return tuple(_read(rows, found["measurements"]))
    except (OSError, UnicodeDecodeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path} is not a result of bench_overlap.py: {error}") from error


def _read(rows: Sequence[Sequence[OverlapRow]], choices: Sequence[dict[str, Any]]) -> Iterator[Measured]:
    for each, one in zip(rows, choices, strict=True):
        yield Measured(tuple(each), one["decision"], tuple(one["clocks"]))


def _row(row: dict[str, Any]) -> OverlapRow:
    return OverlapRow(**row | {"gemm": tuple(row["gemm"]), "spans": tuple(row["spans"])})
