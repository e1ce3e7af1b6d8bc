"""Stored results of ``shotcast bench engine``: their rows, and a picture of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shotcast.bench.engine_report import TRANSFORMERS, EngineRow, columns, reduces
from shotcast.bench.plot import check_format
from shotcast.errors import ConfigError


def read(path: Path) -> tuple[EngineRow, ...]:
    """Read the rows of a file written by :func:`document`. Raises ConfigError for any other file."""
    try:
        return tuple(EngineRow(**row) for row in json.loads(path.read_text())["rows"])
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a result of shotcast bench engine: {error}") from error


def cells(rows: Sequence[EngineRow]) -> list[list[str]]:
    """Return the cells of each row, in the order of the table's columns."""
    return [[text(row) for _, text in columns(rows)] for row in rows]


def _subject(row: EngineRow) -> str:
    """Return the facts that all rows of a plot must share."""
    kind = row.quantization or row.dtype
    hosts = f", {row.hosts} hosts at {row.delay_us:g} us" if row.hosts > 1 else ""
    return f"{row.model}, {kind}, {row.device}: prompt {row.prompt}, output {row.output}{hosts}"


def plot(rows: Sequence[EngineRow], path: Path) -> None:
    """Plot the time per output token against throughput: a curve per layout and mode, a point per batch.

    Raises ConfigError if the rows mix models, devices or lengths, or if the file suffix is not supported.
    """
    import matplotlib.figure

    if len(measured := sorted({_subject(row) for row in rows})) != 1:
        raise ConfigError(f"a picture shows one measurement, not {'; '.join(measured) or 'none'}")

    check_format(path)
    figure = matplotlib.figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for key in dict.fromkeys((row.layout, row.algorithm, row.overlap, row.speculates) for row in rows):
        of_curve = [row for row in rows if (row.layout, row.algorithm, row.overlap, row.speculates) == key]
        curve = sorted(of_curve, key=lambda row: row.batch)
        xs, ys = [row.tokens_per_s for row in curve], [row.tpot_ms for row in curve]
        layout = f"TP{key[0].replace('x', ' x PP')}"
        label = key[1] if key[1] == TRANSFORMERS else f"{layout}, {key[1]}" if reduces(curve[0]) else layout
        if reduces(curve[0]) and any(row.overlap != "auto" for row in rows):
            label += f", overlap {key[2]}"
        if curve[0].speculation:
            label += f", {key[3]}"
        axes.plot(xs, ys, marker="o", label=label)
        for row, x, y in zip(curve, xs, ys, strict=True):
            axes.annotate(str(row.batch), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set(xlabel="output tokens/s, all requests", ylabel="ms an output token (TPOT)", title=measured[0])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
