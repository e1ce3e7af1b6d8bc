"""The results of a measurement of overlap, their file, and what was asked of them."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shotcast.bench.overlap.config import OWN, REDUCE_SCATTER_ALL_GATHER, TORCH
from shotcast.errors import ConfigError

_BALANCED = 0.15
_OF_IDEAL = {"all_gather": 1.10, "all_to_all": 1.10, "reduce_scatter": 1.20, "all_reduce": 1.20,
             REDUCE_SCATTER_ALL_GATHER: 1.20}  # fmt: skip
"""The most that our best form may take of the ideal, where products and messages take about as long."""
_IDEAL_BELOW, _BELOW = 0.20, 0.15
"""Our best form is to be so far below the library's plain overlap, if the ideal is further below it than the first."""


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


def verdicts(measured: Measured) -> list[str]:
    """Return which of the thresholds hold, in sentences; none on CPU ranks, or without the library."""
    row = measured.rows[0]
    if row.device != "cuda" or row.library_us is None or row.library_plain_us is None:
        return []
    ratio = row.message_us / row.compute_us
    found = [
        f"alone: products {row.compute_us / 1e3:.2f} ms, our messages {row.communication_us / 1e3:.2f}, "
        f"the library's {row.library_us / 1e3:.2f}; the faster takes {ratio:.2f} of the products"
    ]
    own = _fastest(measured.rows, OWN)
    if own is None or own.time_us is None:
        return found
    if abs(ratio - 1) <= _BALANCED:
        limit = _OF_IDEAL[row.op]
        found.append(_said(f"{own.way} takes {own.time_us / row.ideal_us:.2f} of the ideal, {limit:.2f} or less",
                           own.time_us <= limit * row.ideal_us))  # fmt: skip
    if row.ideal_us <= (1 - _IDEAL_BELOW) * row.library_plain_us:
        below = 1 - own.time_us / row.library_plain_us
        found.append(_said(f"{own.way} is {below:.0%} below the library's plain overlap, {_BELOW:.0%} or more",
                           below >= _BELOW))  # fmt: skip
    torch = _fastest(measured.rows, TORCH)
    if row.whole and torch is not None and torch.time_us is not None:
        found.append(_said(f"{own.way} takes {own.time_us / torch.time_us:.2f} of {torch.way}, below 1",
                           own.time_us < torch.time_us))  # fmt: skip
    return found


def _said(claim: str, holds: bool) -> str:
    return f"{claim}: {'holds' if holds else 'does not hold'}"


def _fastest(rows: Iterable[OverlapRow], by: str) -> OverlapRow | None:
    timed = [row for row in rows if row.by == by and row.time_us is not None]
    return min(timed, key=lambda row: row.time_us or math.inf, default=None)


def document(measured: Sequence[Measured], environment: dict[str, Any], command: str, kernels: dict[str, str]) -> str:
    """Return results as JSON, with where, how and by which kernels they were measured."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = {"date": now, "command": command, "environment": environment, "kernels": kernels}
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
        raise ConfigError(f"{path} is not a result of shotcast bench overlap: {error}") from error


def _read(rows: Sequence[Sequence[OverlapRow]], choices: Sequence[dict[str, Any]]) -> Iterator[Measured]:
    for each, one in zip(rows, choices, strict=True):
        yield Measured(tuple(each), one["decision"], tuple(one["clocks"]))


def _row(row: dict[str, Any]) -> OverlapRow:
    return OverlapRow(**row | {"gemm": tuple(row["gemm"]), "spans": tuple(row["spans"])})
