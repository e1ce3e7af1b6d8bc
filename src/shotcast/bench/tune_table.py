"""Tuning results as a table for :mod:`shotcast.collectives.choice.table` and as a table to read."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table as View

from shotcast.bench import implementations
from shotcast.bench.tune import Timed, TunePoint
from shotcast.collectives import fingerprints
from shotcast.collectives.algorithm import LIBRARY
from shotcast.collectives.choice import table
from shotcast.errors import ConfigError
from shotcast.transport.registry import usual
from shotcast.units import format_size
from shotcast.wire import NodeShape, Op


def rows(points: Sequence[TunePoint]) -> dict[table.Key, list[table.TableRow]]:
    """Return the rows of a table. Adjacent sizes with the same choice become one row, up to the largest of them.

    The table ends at the largest measured size, unless the vendor library was fastest there: it is better at large
    messages.
    """
    found: dict[table.Key, list[table.TableRow]] = {}
    for point in sorted(points, key=lambda point: point.nbytes):
        row = table.TableRow(point.nbytes, *point.choice.best.written, point.mode, point.sms)
        listed = found.setdefault(point.key, [])
        if listed and (listed[-1].algorithm, listed[-1].launch) == (row.algorithm, row.launch):
            listed.pop()
        listed.append(row)
    for listed in found.values():
        if listed[-1].algorithm == LIBRARY:
            listed[-1] = dataclasses.replace(listed[-1], nbytes=float("inf"))
    return found


def document(
    part: str,
    shape: NodeShape,
    points: Sequence[TunePoint],
    *,
    device: str,
    environment: Mapping[str, Any],
    command: str,
    seconds: float,
) -> str:
    """Format a table as text, with its provenance and the fingerprints of the measured kernels."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    provenance = {
        date: {
            "command": command,
            "entries": sorted({"/".join(point.key) for point in points}),
            "method": "checked against float64; median of a rank, maximum over ranks; graph: replays of a CUDA graph; "
            "eager: calls one by one",
            "seconds_a_size": seconds,
            **{
                name: environment[name]
                for name in ("cpu_model", "cores", "platform", "versions", "driver", "gpus", "multicast_disabled_by")
                if environment.get(name)
            },
        }
    }
    measurements = [_measurement(point) for point in points]
    return table.render(part, shape, rows(points), provenance, measurements, _kernels(points, shape, device))


def _kernels(points: Sequence[TunePoint], shape: NodeShape, device: str) -> dict[table.Key, dict[str, str]]:
    """Return the fingerprints of the kernels that each entry chooses from."""
    algorithms, found = implementations.algorithms(), {}
    transport = usual(device, shape.nodes)
    for key in dict.fromkeys(point.key for point in points):
        timed = [one for point in points if point.key == key for one in (point.choice.best, *point.choice.others)]
        names = {one.algorithm for one in timed}
        now = fingerprints.of_operation(algorithms, Op[table.operation_and_sms(key[1])[0].upper()], transport)
        found[key] = {name: digest for name, digest in now.items() if name in names}
    return found


def _measurement(point: TunePoint) -> dict[str, Any]:
    def as_json(timed: Timed) -> list[Any]:
        return [timed.algorithm, _launch(timed), round(timed.time_us, 3)]

    return {
        "mode": point.mode,
        "op": point.key[1],
        "dtype": point.dtype,
        "nbytes": point.nbytes,
        "chosen": as_json(point.choice.best),
        "others": [
            as_json(timed)
            for number, timed in enumerate(point.choice.others)
            if number < 3 or timed.algorithm == LIBRARY
        ],
    }


def mergeable(old: str, name: str, part: str, shape: NodeShape) -> table.Table:
    """Parse the table ``old``. Raises ConfigError if it cannot be merged with a table of this hardware."""
    before = table.parse(old, name, implementations.algorithms())
    if (before.part, before.shape) != (part, shape):
        here = table.ranks_of(part, shape)
        raise ConfigError(f"{name} is a table for {before.made_for}; this machine has {here}; write to another file")
    return before


def merged(old: str, new: str, name: str) -> str:
    """Return the table ``new``, completed from ``old``. Raises ConfigError if they cannot be merged."""
    after = table.parse(new, "just measured", implementations.algorithms())
    before = mergeable(old, name, after.part, after.shape)
    kept_keys = before.rows.keys() - after.rows.keys()
    names = {"/".join(key) for key in kept_keys}
    old_document, new_document = json.loads(old), json.loads(new)

    def is_current(run: Any) -> bool:
        return (
            not isinstance(run, dict)
            or not isinstance(run.get("entries"), list)
            or not names.isdisjoint(run["entries"])
        )

    provenance = {date: run for date, run in old_document.get("provenance", {}).items() if is_current(run)}
    measurements = [
        measurement
        for measurement in old_document.get("measurements", [])
        if isinstance(measurement, dict)
        and (measurement.get("mode"), measurement.get("op"), measurement.get("dtype")) in kept_keys
    ]
    return table.render(
        after.part,
        after.shape,
        {key: before.rows[key] for key in before.rows if key in kept_keys} | after.rows,
        provenance | new_document["provenance"],
        measurements + new_document["measurements"],
        {key: before.kernels[key] for key in before.kernels if key in kept_keys} | after.kernels,
        before.earlier_kernels if kept_keys else "",
    )


def view(points: Sequence[TunePoint], shape: NodeShape, device: str) -> View:
    nodes = f" on {shape.nodes} nodes" if shape.nodes > 1 else ""
    table_view = View(title=f"{shape.world_size} {device} ranks{nodes}", title_justify="left", box=None)
    for name in ("mode", "op", "type", "size", "algorithm", "launch", "us", "next best", "us"):
        table_view.add_column(name, justify="right" if name in ("size", "us") else "left", no_wrap=True)
    for point in points:
        best, others = point.choice.best, point.choice.others
        second = (
            (f"{others[0].algorithm} {_launch(others[0])}".strip(), f"{others[0].time_us:.2f}") if others else ("", "")
        )
        table_view.add_row(
            point.mode, point.key[1], point.dtype, format_size(point.nbytes), best.algorithm, _launch(best),
            f"{best.time_us:.2f}", *second,
        )  # fmt: skip
    return table_view


def _launch(timed: Timed) -> str:
    if timed.algorithm == LIBRARY:
        return ""
    if timed.by_default:
        return "default"
    return ",".join(f"{name}={value}" for name, value in dataclasses.asdict(timed.launch).items() if value)


def wrong(points: Iterable[TunePoint]) -> list[str]:
    """Return a line for each candidate that gave wrong results."""
    return [
        f"{point.key[1]} of {point.dtype}, {format_size(point.nbytes)}, {point.mode}: "
        f"{c.algorithm} with {c.launch} gives wrong results"
        for point in points
        for c in point.choice.wrong
    ]
