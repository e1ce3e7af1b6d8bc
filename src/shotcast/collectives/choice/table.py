"""Tuned tables: thresholds as data with provenance, written by ``shotcast tune`` (format: docs/guides/tuning.md).

Provenance and measurements are for people. ``kernels`` has the fingerprints (:mod:`shotcast.device.fingerprint`) of the
kernels that were measured for each entry. A table stays valid when kernels change, and explanations mention the change.
A packaged table must declare it in ``earlier_kernels``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from shotcast import wire
from shotcast.collectives.algorithm import FUSED, Algorithms
from shotcast.collectives.choice.candidates import launch_unsupported_reason
from shotcast.errors import ConfigError
from shotcast.transport.transport import Transport
from shotcast.wire import LaunchShape, NodeShape

FORMAT = 3

MODES = ("graph", "eager")
"""The modes of a call: captured in a CUDA graph, or not. On CPU ranks every call is ``eager``."""

ANY_CPU = "cpu"
"""The part of a table that serves CPU ranks on any processor."""

Key = tuple[str, str, str]
"""Mode, operation and dtype."""

_AGAIN = "run `shotcast tune` again"
_OPTIONAL_KEYS = {"nodes", "provenance", "measurements", "kernels", "earlier_kernels"}
_KEYS = {"format", "part", "world_size", "entries", *_OPTIONAL_KEYS}
_OPS = tuple(op.label for op in wire.Op)
_LAUNCH_FIELDS = tuple(field.name for field in dataclasses.fields(LaunchShape))


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row: messages up to ``nbytes`` (infinity for any) use ``algorithm`` with ``launch`` or its default.

    ``mode`` is the mode of its entry; ``sms`` is the SM limit of the calls it serves, 0 for none.
    """

    nbytes: float
    algorithm: str
    launch: LaunchShape | None
    mode: str
    sms: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """A parsed table."""

    name: str  # of its file
    part: str  # the GPU or processor that it is for
    shape: NodeShape  # the nodes and ranks that it is for
    rows: dict[Key, tuple[TableRow, ...]]
    kernels: dict[Key, dict[str, str]]  # by entry, the fingerprints of the kernels that were measured, by algorithm
    earlier_kernels: str  # why the table is kept although earlier kernels made it; empty if it does not say
    text: str  # the content, which ranks compare

    @property
    def made_for(self) -> str:
        """The ranks that the table is for, in words."""
        return ranks_of(self.part, self.shape)

    def lookup(self, op: str, dtype: str, nbytes: int, mode: str = "eager", sms: int = 0) -> TableRow | None:
        """Return the row that serves a call limited to ``sms`` SMs (0 for no limit); None if the table has none."""
        rows: tuple[TableRow, ...] = ()
        for asked in (mode, *MODES):
            listed = [key[1] for key in self.rows if key[::2] == (asked, dtype)]
            numbers = [number for name, number in map(operation_and_sms, listed) if name == op and number >= sms]
            enough = min(numbers, default=0) if sms else 0
            if enough >= sms and (rows := self.rows.get((asked, with_sms(op, enough), dtype), ())):
                break
        index = bisect_left([row.nbytes for row in rows], nbytes)
        return rows[index] if index < len(rows) else None


def with_sms(op: str, sms: int) -> str:
    """Return a table's notation for an operation limited to ``sms`` SMs, 0 for no limit."""
    return f"{op}@{sms}" if sms else op


def operation_and_sms(written: str) -> tuple[str, int]:
    """Invert :func:`with_sms`; any other text is taken as the name of an operation."""
    op, _, sms = written.partition("@")
    return (op, int(sms)) if re.fullmatch("[1-9][0-9]{0,2}", sms) else (written, 0)


def parse(text: str, name: str, algorithms: Algorithms) -> Table:
    """Parse a table. Raises ConfigError saying what is wrong and where, or that the table is out of date."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"table {name} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"table {name} is a JSON {type(data).__name__}; a table is an object (docs/guides/tuning.md)")
    found = data.get("format")
    if not _whole(found) or found != FORMAT:
        raise ConfigError(f"table {name} has format {found!r}; this version reads format {FORMAT}: {_AGAIN}")
    if unknown := data.keys() - _KEYS:
        raise ConfigError(f"table {name} has unknown keys: {', '.join(sorted(unknown))}")
    if absent := _KEYS - _OPTIONAL_KEYS - data.keys():
        raise ConfigError(f"table {name} lacks {', '.join(sorted(absent))}")
    if not isinstance(data["part"], str) or not data["part"]:
        raise ConfigError(f"table {name}: part is the name of a GPU or processor, not {data['part']!r}")
    if not _whole(data["world_size"]) or data["world_size"] < 1:
        raise ConfigError(f"table {name}: world_size is a whole number from 1 up, not {data['world_size']!r}")
    nodes = data.get("nodes", 1)
    if not _whole(nodes) or nodes < 1 or data["world_size"] % nodes:
        raise ConfigError(
            f"table {name}: nodes is a whole number that divides {data['world_size']} ranks, not {nodes!r}"
        )
    _items(data.get("provenance", {}), f"table {name}, provenance")
    if not isinstance(data.get("measurements", []), list):
        raise ConfigError(f"table {name}, measurements: a list is meant, not {data['measurements']!r}")
    rows: dict[Key, tuple[TableRow, ...]] = {}
    for mode, by_op in _items(data["entries"], f"table {name}, entries"):
        if mode not in MODES:
            raise ConfigError(f"table {name} has entries for {mode!r}; calls are {' or '.join(MODES)}")
        if mode == "graph" and data["part"] == ANY_CPU:
            raise ConfigError(f"table {name} has entries for graph, and CPU ranks have eager calls only")
        for written, by_dtype in _items(by_op, f"table {name}, {mode}"):
            op, sms = operation_and_sms(written)
            for dtype, listed in _items(by_dtype, f"table {name}, {mode}/{written}"):
                where = f"table {name}, {mode}/{written}/{dtype}"
                if op not in _OPS or dtype not in wire.DTYPES or sms > wire.MAX_SMS:
                    raise ConfigError(f"table {name} speaks of {written}/{dtype}, which is no operation and dtype")
                if not isinstance(listed, list):
                    raise ConfigError(f"{where}: a list of rows is meant, not {listed!r}")
                rows[mode, written, dtype] = parsed = tuple(_row(row, mode, sms, where, algorithms) for row in listed)
                if wire.Op[op.upper()] in FUSED and any(row.launch is not None for row in parsed):
                    raise ConfigError(f"{where}: the launch of fused calls follows from their rows; null is meant")
                limits = [row.nbytes for row in parsed]
                if limits != sorted(set(limits)):
                    raise ConfigError(f"{where}: sizes must ascend")
    words = data.get("earlier_kernels", "")
    if not isinstance(words, str):
        raise ConfigError(f"table {name}, earlier_kernels: words are meant, not {words!r}")
    shape = NodeShape(nodes, data["world_size"] // nodes)
    return Table(name, data["part"], shape, rows, _fingerprints(data.get("kernels", {}), name), words, text)


def _fingerprints(value: Any, name: str) -> dict[Key, dict[str, str]]:
    found: dict[Key, dict[str, str]] = {}
    for entry, kernels in _items(value, f"table {name}, kernels"):
        listed = dict(_items(kernels, f"table {name}, kernels of {entry}"))
        if entry.count("/") != 2 or not all(isinstance(digest, str) for digest in listed.values()):
            raise ConfigError(
                f"table {name}, kernels: mode/operation/dtype has a fingerprint by algorithm, not {value!r}"
            )
        mode, op, dtype = entry.split("/")
        found[mode, op, dtype] = listed
    return found


def _items(value: Any, where: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: an object is meant, not {value!r}")
    return value.items()


def _row(row: Any, mode: str, sms: int, where: str, algorithms: Algorithms) -> TableRow:
    if not isinstance(row, list) or len(row) != 3:
        raise ConfigError(f"{where}: a row is [bytes or null, algorithm, launch or null], not {row!r}")
    nbytes, algorithm, launch = row
    if nbytes is not None and not (_whole(nbytes) and nbytes >= 0):
        raise ConfigError(f"{where}: a row serves up to a whole number of bytes, or null for any, not {nbytes!r}")
    if not isinstance(algorithm, str) or algorithm not in algorithms:
        raise ConfigError(f"{where}: unknown algorithm {algorithm!r}; there are {', '.join(algorithms)}")
    if launch is not None:
        if not isinstance(launch, dict) or launch.keys() - _LAUNCH_FIELDS:
            raise ConfigError(f"{where}: a launch has {', '.join(_LAUNCH_FIELDS)}, or is null; not {launch!r}")
        if wrong := [name for name, value in launch.items() if not (_whole(value) and value >= 0)]:
            raise ConfigError(f"{where}: {wrong[0]} is a whole number from 0 up, not {launch[wrong[0]]!r}")
    # beyond what any message counts is any size
    limit = float("inf") if nbytes is None or nbytes > 1 << 60 else nbytes
    return TableRow(limit, algorithm, None if launch is None else LaunchShape(**launch), mode, sms)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def fit_for(table: Table, transport: Transport, algorithms: Algorithms) -> Table:
    """Return ``table`` if a transport's kernels support its launches. Raises ConfigError otherwise."""
    for (mode, op, dtype), rows in table.rows.items():
        for row in rows:
            if row.launch is not None and (
                trouble := launch_unsupported_reason(transport, algorithms[row.algorithm], row.launch)
            ):
                raise ConfigError(f"table {table.name}, {mode}/{op}/{dtype}, {row.algorithm}: {trouble}")
    return table


def ranks_of(part: str, shape: NodeShape) -> str:
    """Describe the ranks that a table is for, in words."""
    nodes = f" on {shape.nodes} nodes" if shape.nodes > 1 else ""
    return f"{shape.world_size} x {part}{nodes}"


def file_name(part: str, shape: NodeShape) -> str:
    """Return the file name of a packaged table, such as ``nvidia_h200_x4.json``; on two nodes, ``..._2x2.json``."""
    ranks = f"x{shape.world_size}" if shape.nodes == 1 else str(shape)
    return f"{re.sub('[^a-z0-9]+', '_', part.lower()).strip('_')}_{ranks}.json"


def packaged(part: str, shape: NodeShape, algorithms: Algorithms) -> Table | None:
    """Return the packaged table for this part and these ranks, or None."""
    name = file_name(part, shape)
    file = resources.files("shotcast.collectives.choice") / "tables" / name
    return parse(file.read_text(), name, algorithms) if file.is_file() else None


def all_packaged(algorithms: Algorithms) -> list[Table]:
    folder = resources.files("shotcast.collectives.choice") / "tables"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return [parse(file.read_text(), file.name, algorithms) for file in files]


def load(path: str, part: str, shape: NodeShape, algorithms: Algorithms, device: str = "cuda") -> Table | str:
    """Load a user's table; return why it is not used if it is for other hardware or numbers of ranks and nodes.

    Raises ConfigError if it cannot be read, is malformed or is out of date, even if it was made for other hardware.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"SHOTCAST_TABLE: cannot read {path}: {error}") from error
    table = parse(text, path, algorithms)
    parts = (part, ANY_CPU) if device == "cpu" else (part,)
    if table.part not in parts or table.shape != shape:
        return f"{path} is for {table.made_for}, and this is {ranks_of(part, shape)}"
    if device == "cpu" and any(mode == "graph" for mode, _, _ in table.rows):
        raise ConfigError(f"SHOTCAST_TABLE: {path} has entries for graph, and CPU ranks have eager calls only")
    return table


def render(
    part: str,
    shape: NodeShape,
    rows: Mapping[Key, Sequence[TableRow]],
    provenance: Mapping[str, Any],
    measurements: Sequence[Mapping[str, Any]],
    kernels: Mapping[Key, Mapping[str, str]] | None = None,
    earlier_kernels: str = "",
) -> str:
    """Format a table as text, one row per line; :func:`parse` reads it back."""
    entries: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for (mode, op, dtype), listed in rows.items():
        entries.setdefault(mode, {}).setdefault(op, {})[dtype] = [
            [
                None if row.nbytes == float("inf") else int(row.nbytes),
                row.algorithm,
                None if row.launch is None else dataclasses.asdict(row.launch),
            ]
            for row in listed
        ]
    document = {
        "format": FORMAT,
        "part": part,
        "world_size": shape.world_size,
        **({"nodes": shape.nodes} if shape.nodes > 1 else {}),
        **({"earlier_kernels": earlier_kernels} if earlier_kernels else {}),
        "provenance": provenance,
        "measurements": measurements,
        "kernels": {"/".join(key): dict(digests) for key, digests in (kernels or {}).items()},
        "entries": entries,
    }
    return _pretty(document, "") + "\n"


def _pretty(value: Any, indent: str) -> str:
    """Format JSON with one line for each object of numbers and strings only, and for each element of a list."""
    deeper = indent + " "
    if isinstance(value, Mapping) and any(isinstance(item, list | tuple | Mapping) for item in value.values()):
        inside = (f"{deeper}{json.dumps(str(key))}: {_pretty(item, deeper)}" for key, item in value.items())
        return "{\n" + ",\n".join(inside) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(item, list | tuple | Mapping) for item in value):
        return "[\n" + ",\n".join(deeper + json.dumps(item) for item in value) + f"\n{indent}]"
    return json.dumps(value)
