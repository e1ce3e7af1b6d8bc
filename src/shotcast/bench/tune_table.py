"""Results of tuning, as a table for :mod:`shotcast.collectives.choice.table` and as a table to read."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table as View

from shotcast.bench import implementations
from shotcast.bench.tune import Point, Timed
from shotcast.collectives.algorithm import LIBRARY
from shotcast.collectives.choice import table
from shotcast.errors import ConfigError
from shotcast.units import format_size


def rows(points: Sequence[Point]) -> dict[table.Key, list[table.Row]]:
    """Return the rows of a table. Neighbouring sizes with the same choice become one row, up to the largest of them.

    Beyond the largest measured size the table says nothing, unless the vendor library was fastest there: large messages
    are what it is better at.
    """
    found: dict[table.Key, list[table.Row]] = {}
    for point in sorted(points, key=lambda point: point.nbytes):
        row = table.Row(point.nbytes, *point.choice.best.written, point.mode)
        listed = found.setdefault(point.key, [])
        if listed and (listed[-1].algorithm, listed[-1].launch) == (row.algorithm, row.launch):
            listed.pop()
        listed.append(row)
    for listed in found.values():
        if listed[-1].algorithm == LIBRARY:
            listed[-1] = dataclasses.replace(listed[-1], nbytes=float("inf"))
    return found


def document(
    part: str, world_size: int, points: Sequence[Point], *, environment: Mapping[str, Any], command: str, seconds: float
) -> str:
    """Return the text of a table, with its provenance."""
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
    return table.render(part, world_size, rows(points), provenance, [_measurement(point) for point in points])


def _measurement(point: Point) -> dict[str, Any]:
    def plain(one: Timed) -> list[Any]:
        return [one.algorithm, _launch(one), round(one.time_us, 3)]

    return {
        "mode": point.mode,
        "op": point.op,
        "dtype": point.dtype,
        "nbytes": point.nbytes,
        "chosen": plain(point.choice.best),
        "others": [
            plain(one) for number, one in enumerate(point.choice.others) if number < 3 or one.algorithm == LIBRARY
        ],
    }


def mergeable(old: str, name: str, part: str, world_size: int) -> table.Table:
    """Return the parsed table ``old``.

    Raises:
        ConfigError: it cannot be merged with a table of this hardware.
    """
    before = table.parse(old, name, implementations.algorithms())
    if (before.part, before.world_size) != (part, world_size):
        raise ConfigError(
            f"{name} is a table for {before.world_size} x {before.part}; this machine has {world_size} x {part}; "
            "write to another file"
        )
    return before


def merged(old: str, new: str, name: str) -> str:
    """Return the table ``new``, with the entries that only ``old`` has.

    Raises:
        ConfigError: the two cannot be merged.
    """
    after = table.parse(new, "just measured", implementations.algorithms())
    before = mergeable(old, name, after.part, after.world_size)
    stays = before.rows.keys() - after.rows.keys()
    names = {"/".join(key) for key in stays}
    kept, came = json.loads(old), json.loads(new)

    def still(run: Any) -> bool:
        return (
            not isinstance(run, dict)
            or not isinstance(run.get("entries"), list)
            or not names.isdisjoint(run["entries"])
        )

    provenance = {date: run for date, run in kept.get("provenance", {}).items() if still(run)}
    measurements = [
        one
        for one in kept.get("measurements", [])
        if isinstance(one, dict) and (one.get("mode"), one.get("op"), one.get("dtype")) in stays
    ]
    return table.render(
        after.part,
        after.world_size,
        {key: before.rows[key] for key in before.rows if key in stays} | after.rows,
        provenance | came["provenance"],
        measurements + came["measurements"],
    )


def view(points: Sequence[Point], world_size: int, device: str) -> View:
    """Return the choices as a table to read."""
    shown = View(title=f"{world_size} {device} ranks", title_justify="left", box=None)
    for name in ("mode", "op", "type", "size", "algorithm", "launch", "us", "next best", "us"):
        shown.add_column(name, justify="right" if name in ("size", "us") else "left", no_wrap=True)
    for point in points:
        best, others = point.choice.best, point.choice.others
        second = (
            (f"{others[0].algorithm} {_launch(others[0])}".strip(), f"{others[0].time_us:.2f}") if others else ("", "")
        )
        shown.add_row(
            point.mode, point.op, point.dtype, format_size(point.nbytes), best.algorithm, _launch(best),
            f"{best.time_us:.2f}", *second,
        )  # fmt: skip
    return shown


def _launch(one: Timed) -> str:
    if one.algorithm == LIBRARY:
        return ""
    if one.by_default:
        return "default"
    return ",".join(f"{name}={value}" for name, value in dataclasses.asdict(one.launch).items() if value)


def wrong(points: Iterable[Point]) -> list[str]:
    """Return a line for each candidate that gave wrong results."""
    return [
        f"{point.op} of {point.dtype}, {format_size(point.nbytes)}, {point.mode}: "
        f"{c.algorithm} with {c.launch} gives wrong results"
        for point in points
        for c in point.choice.wrong
    ]
