"""Tuned tables: thresholds as data, with where they come from.

A table is JSON::

    {"format": 1, "part": "NVIDIA H200", "world_size": 4, "provenance": {...},
     "entries": {"all_reduce": {"bfloat16": [[65536, "one_shot", {"programs": 64, ...}], [null, "vendor", null]]}}}

Each row serves messages up to its first number of bytes (null: any size); rows ascend.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from shotcast import wire
from shotcast.errors import ConfigError
from shotcast.wire import LaunchShape

FORMAT = 1
_OPS = tuple(op.label for op in wire.Op)


@dataclass(frozen=True, slots=True)
class Row:
    """Up to ``nbytes`` (infinity for any): ``algorithm``, launched as ``launch`` or by default."""

    nbytes: float
    algorithm: str
    launch: LaunchShape | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table as read; ``name`` is its file's name, ``text`` what ranks compare."""

    name: str
    part: str
    world_size: int
    rows: dict[tuple[str, str], tuple[Row, ...]]
    text: str

    def lookup(self, op: str, dtype: str, nbytes: int) -> Row | None:
        """The row that serves a call; None if the table says nothing of it."""
        rows = self.rows.get((op, dtype), ())
        place = bisect_left([row.nbytes for row in rows], nbytes)
        return rows[place] if place < len(rows) else None


def parse(text: str, name: str) -> Table:
    """Read a table. Raises ConfigError saying what is wrong with it, and where."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"table {name} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ConfigError(f"table {name} has format {found!r}; this version reads format {FORMAT}")
    if unknown := set(data) - {"format", "part", "world_size", "provenance", "entries"}:
        raise ConfigError(f"table {name} has unknown keys: {', '.join(sorted(unknown))}")
    try:
        rows = {
            (op, dtype): tuple(_row(row) for row in listed)
            for op, by_dtype in data["entries"].items()
            for dtype, listed in by_dtype.items()
        }
        table = Table(name, str(data["part"]), int(data["world_size"]), rows, text)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"table {name} is not as described in shotcast.collectives.table: {error!r}") from error
    for key, listed in rows.items():
        if key[0] not in _OPS or key[1] not in wire.DTYPES:
            raise ConfigError(f"table {name} speaks of {'/'.join(key)}, which is no operation and dtype")
        bounds = [row.nbytes for row in listed]
        if bounds != sorted(set(bounds)):
            raise ConfigError(f"table {name}, {'/'.join(key)}: sizes must ascend")
    return table


def _row(row: Any) -> Row:
    nbytes, algorithm, launch = row
    if algorithm not in wire.ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}")
    return Row(float("inf") if nbytes is None else int(nbytes), algorithm, LaunchShape(**launch) if launch else None)


def packaged(part: str, world_size: int) -> Table | None:
    """The table that comes with the package for this part and world size, if there is one."""
    name = f"{part.lower().replace(' ', '_')}_x{world_size}.json"
    file = resources.files("shotcast.collectives") / "tables" / name
    return parse(file.read_text(), name) if file.is_file() else None


def load(path: str, part: str, world_size: int) -> Table:
    """The user's table. Raises ConfigError if it cannot be read, or was made for other hardware."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"SHOTCAST_TABLE: cannot read {path}: {error}") from error
    table = parse(text, path)
    if (table.part, table.world_size) != (part, world_size):
        raise ConfigError(
            f"SHOTCAST_TABLE: {path} was made for {table.world_size} x {table.part}; this is {world_size} x {part}"
        )
    return table
