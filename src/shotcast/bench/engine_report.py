"""What measurements of the engine say: as a table, as JSON, as a picture."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from shotcast.bench.plot import check_format
from shotcast.errors import ConfigError

TRANSFORMERS = "transformers"
"""The algorithm of rows that ``generate`` of Hugging Face Transformers was measured for."""
_COLUMNS = ("layout", "algorithm", "batch", "TTFT ms", "TPOT ms", "ITL ms", "tokens/s", "communication", "of roofline")


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One measured point; medians over rounds of what all requests of a round have in the mean.

    Attributes:
        prompt, output: tokens of each request.
        ttft_ms, tpot_ms: of a request; TPOT has in it what prompts of others delay its tokens by.
        itl_ms: the median time between neighbouring tokens of all requests: that of a step in which all decode.
        tokens_per_s: output tokens of all requests over the time of the round.
        communication: share of the steps' time that rank 0 spent in collectives, waiting for others included; on CUDA
            of steps that decode, in a round that is not timed otherwise.
        roofline_ms: least time of a decoding step by memory bandwidth, at the middle of the output.
        roofline: ``roofline_ms`` over ``itl_ms``.
        bandwidth_gbps: measured, of a rank.
        quantization: of the layers' matrices.
    """

    model: str
    device: str
    dtype: str
    layout: str
    algorithm: str
    batch: int
    prompt: int
    output: int
    ttft_ms: float
    tpot_ms: float
    itl_ms: float
    tokens_per_s: float
    communication: float
    roofline_ms: float
    roofline: float
    bandwidth_gbps: float
    quantization: str = ""


def reduces(row: EngineRow) -> bool:
    """Whether there are all-reduces in the layout."""
    return not row.layout.startswith("1x")


def _cells(rows: Sequence[EngineRow]) -> list[tuple[str, ...]]:
    """Of each row, what :data:`_COLUMNS` names."""
    return [
        (
            row.layout,
            row.algorithm if reduces(row) or row.algorithm == TRANSFORMERS else "-",
            str(row.batch),
            f"{row.ttft_ms:.1f}",
            f"{row.tpot_ms:.2f}",
            f"{row.itl_ms:.2f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.communication:.1%}",
            f"{row.roofline:.0%}",
        )
        for row in rows
    ]


def table(rows: Sequence[EngineRow]) -> Table:
    """For a terminal."""
    view = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        view.add_column(name, justify="left" if name in ("layout", "algorithm") else "right")
    for cells in _cells(rows):
        view.add_row(*cells)
    return view


def markdown(rows: Sequence[EngineRow]) -> str:
    """For a document."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *_cells(rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def document(rows: Sequence[EngineRow], environment: dict[str, Any], command: str) -> str:
    """Rows as JSON, with where and how they were measured."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    said = {"date": now, "command": command, "environment": environment, "rows": [asdict(row) for row in rows]}
    return json.dumps(said, indent=1) + "\n"


def read(path: Path) -> tuple[EngineRow, ...]:
    """Rows of a file that :func:`document` made. ConfigError if it is another."""
    try:
        return tuple(EngineRow(**row) for row in json.loads(path.read_text())["rows"])
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no results of shotcast bench engine: {error}") from error


def _what(row: EngineRow) -> str:
    """What all rows of a picture have in common."""
    kind = row.quantization or row.dtype
    return f"{row.model}, {kind}, {row.device}: prompt {row.prompt}, output {row.output}"


def plot(rows: Sequence[EngineRow], path: Path) -> None:
    """Time of an output token against throughput: a curve for each layout and algorithm, a point for each batch.

    Raises:
        ConfigError: the rows are of several models, devices or lengths, or a suffix that matplotlib does not write.
    """
    import matplotlib.figure

    if len(measured := sorted({_what(row) for row in rows})) != 1:
        raise ConfigError(f"a picture is of one measurement, not of {'; '.join(measured) or 'none'}")

    check_format(path)
    figure = matplotlib.figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for key in dict.fromkeys((row.layout, row.algorithm) for row in rows):
        curve = sorted((row for row in rows if (row.layout, row.algorithm) == key), key=lambda row: row.batch)
        xs, ys = [row.tokens_per_s for row in curve], [row.tpot_ms for row in curve]
        layout = f"TP{key[0].replace('x', ' x PP')}"
        label = key[1] if key[1] == TRANSFORMERS else f"{layout}, {key[1]}" if reduces(curve[0]) else layout
        axes.plot(xs, ys, marker="o", label=label)
        for row, x, y in zip(curve, xs, ys, strict=True):
            axes.annotate(str(row.batch), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set(xlabel="output tokens/s, all requests", ylabel="ms an output token (TPOT)", title=measured[0])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
