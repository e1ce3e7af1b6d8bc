"""Markdown tables of stored results: documents show tables made from the raw files, and a test compares the two::

    python research/result_tables.py --kind summary --sizes 8K,1M --json FILE [--json FILE]

Each of the kinds but ``operations`` and ``engine`` is made from rows of one operation and dtype, with message sizes
down the side:

``times``
    Microseconds of every implementation, and the time of the best NCCL (or Gloo) divided by that of the fastest
        algorithm with the bits of the numerics contract.
``summary``
    The best of each family, world sizes side by side.
``ratios``
    The time of the best library over the fastest own algorithm, and of our ring over two-shot; world sizes side by
        side.
``fused``
    For each number of tokens: microseconds of every implementation, and what the fused forms take above the plain
        all-reduce.
``hosts``
    For each network between hosts: milliseconds of Gloo and of ``auto``, their ratio, and the fastest algorithm with
        the bits of the contract.
``model``
    For each network between hosts: the time by the cost model over the measured time, of each own algorithm.
``operations``
    For each number of ranks, operation, reduction and dtype: the time of the best library over that of ``auto``, with
        message sizes in the head.
``between``
    The time saved over the best NCCL (or Gloo) with calls back to back, and with work between the calls.
``engine``
    The rows of ``shotcast bench engine``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import engine_results
from call_modes import names as modes
from call_modes.rows import CallRow, above_plain_us, read
from made_by import with_note

from shotcast.bench import engine_report, implementations
from shotcast.bench.engine_report import EngineRow
from shotcast.bench.operations import OPERATIONS
from shotcast.bench.report import require_same
from shotcast.errors import ConfigError
from shotcast.units import parse_size
from shotcast.wire import Op

_Cells = list[list[str]]
_LABELS = {
    "nccl": "NCCL (default)",
    "nccl_ring": "NCCL ring",
    "nccl_tree": "NCCL tree",
    "nccl_ll": "NCCL LL",
    "nccl_ll128": "NCCL LL128",
    "nccl_simple": "NCCL Simple",
    "nccl_symmetric": "NCCL symmetric",
    "torch_one_shot": "torch one-shot",
    "torch_two_shot": "torch two-shot",
    "gloo": "Gloo",
    "plain_one_shot": "plain one-shot",
    "plain_two_shot": "plain two-shot",
    "fp8_static": "FP8 static",
    "fp8_dynamic": "FP8 dynamic",
}


def markdown_table(
    rows: Sequence[CallRow], kind: str = "", sizes: Sequence[int] = (), columns: Sequence[str] = (), measure: str = ""
) -> str:
    """Return the table as lines of Markdown.

    Args:
        rows: of one operation, dtype and device; of one device for ``operations``.
        kind: one of :data:`KINDS`; by default the one that suits the rows.
        sizes: message sizes in bytes to show; by default all.
        columns: implementations to show in ``times`` and ``fused``; by default all. Ratios consider all that were
            measured.
        measure: which rows ``times`` shows; by default ``call`` if there are such rows.

    Raises:
        ConfigError: the rows do not fit one table, or no row matches the request.
    """
    if not rows:
        raise ConfigError("there are no rows to show")
    require_same(rows, *(["device"] if kind == "operations" else ["op", "dtype", "device", "reduction"]))
    measures = {row.measure for row in rows}
    if not kind:
        fused = rows[0].op in modes.FUSED_OPS
        networked = any(row.nodes > 1 for row in rows)
        kind = "between" if "between" in measures else "fused" if fused else "hosts" if networked else "times"
    if kind not in KINDS:
        raise ConfigError(f"there is no table {kind!r}; choose from {', '.join(KINDS)}")
    if absent := sorted(set(columns) - {row.algorithm for row in rows}):
        raise ConfigError(f"these were not measured: {', '.join(absent)}")
    if absent_sizes := sorted(set(sizes) - {row.nbytes for row in rows}):
        raise ConfigError(f"these sizes were not measured: {', '.join(size_name(size) for size in absent_sizes)}")
    rows = [row for row in rows if not sizes or row.nbytes in sizes]
    if kind == "between":
        return _lines(*_between(rows))
    measure = measure or ("call" if "call" in measures else rows[0].measure)
    rows = [row for row in rows if row.measure == measure]
    if not rows:
        raise ConfigError(f"there are no rows of {measure!r}; there are {', '.join(sorted(measures))}")
    if kind in ("times", "fused"):
        return _lines(*KINDS[kind](rows, columns or _in_order(rows)))
    return _lines(*KINDS[kind](rows))


def size_name(nbytes: int) -> str:
    """Return ``65536`` as ``64 KB``: binary multiples, as nccl-tests writes them."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"


def fastest(rows: Sequence[CallRow], nbytes: int, belongs: Callable[[CallRow], bool]) -> CallRow | None:
    """Return the fastest row of a size among those that ``belongs`` selects; None if none was timed."""
    timed = [row for row in rows if row.nbytes == nbytes and row.time_us is not None and belongs(row)]
    return min(timed, key=lambda row: row.time_us or 0.0, default=None)


def own_bits(row: CallRow) -> bool:
    """Return whether the all-reduce of a row's algorithm gives the bits of the numerics contract at every size."""
    algorithm = implementations.algorithms().get(row.algorithm)
    return algorithm is not None and algorithm.keeps_bits(Op.ALL_REDUCE, row.shape)


def label(name: str) -> str:
    """Return the name as tables show it."""
    algorithm = implementations.algorithms().get(name)
    return _LABELS.get(name, name) if algorithm is None else algorithm.label


def library(row: CallRow) -> bool:
    return modes.is_library(row.algorithm)


FAMILIES: dict[str, Callable[[CallRow], bool]] = {
    "shotcast": own_bits,
    "NCCL": lambda row: modes.is_nccl(row.algorithm),
    "Gloo": lambda row: row.algorithm == "gloo",
    "PyTorch": lambda row: implementations.is_torch(row.algorithm),
    "our ring": lambda row: row.algorithm == "ring",
}
"""Implementations that a summary shows as one: the fastest of each family at each size."""


def measured_families(rows: Sequence[CallRow]) -> dict[str, Callable[[CallRow], bool]]:
    """Return the families that have at least one of these rows."""
    return {name: belongs for name, belongs in FAMILIES.items() if any(belongs(row) for row in rows)}


# --- kinds ------------------------------------------------------------------------------------------------------------


def _times(rows: Sequence[CallRow], columns: Sequence[str]) -> tuple[list[str], _Cells]:
    require_same(rows, "world_size", "hidden", "nodes", "delay_us")
    name = "Gloo" if rows[0].device == "cpu" else "best NCCL"
    compared = any(own_bits(row) for row in rows) and any(library(row) for row in rows)
    head = ["", *(label(column) for column in columns)] + ([f"{name} / own bits"] if compared else [])
    cells = []
    for nbytes in _sizes(rows):
        by_name = {row.algorithm: row for row in rows if row.nbytes == nbytes}
        line = [size_name(nbytes), *(_us(by_name.get(column)) for column in columns)]
        ratio = _ratio(fastest(rows, nbytes, library), fastest(rows, nbytes, own_bits))
        cells.append(line + ([ratio] if compared else []))
    return head, cells


def _summary(rows: Sequence[CallRow]) -> tuple[list[str], _Cells]:
    families = measured_families(rows)
    head, cells = [""], [[size_name(nbytes)] for nbytes in _sizes(rows)]
    for world_size in _world_sizes(rows):
        group = [row for row in rows if row.world_size == world_size]
        first, *others = families
        head += [f"{_ranks(group[0])}: {first}", *others]
        for line, nbytes in zip(cells, _sizes(rows), strict=True):
            best = {name: fastest(group, nbytes, belongs) for name, belongs in families.items()}
            least = min((row.time_us for row in best.values() if row and row.time_us is not None), default=0.0)
            line += [f"**{_us(row)}**" if row and row.time_us == least else _us(row) for row in best.values()]
    return head, cells


def _ratios(rows: Sequence[CallRow]) -> tuple[list[str], _Cells]:
    head, cells = [""], [[size_name(nbytes)] for nbytes in _sizes(rows)]
    name = "Gloo" if rows[0].device == "cpu" else "best NCCL"
    for world_size in _world_sizes(rows):
        group = [row for row in rows if row.world_size == world_size]
        head += [f"{_ranks(group[0])}: {name} / shotcast", "ring / two-shot"]
        for line, nbytes in zip(cells, _sizes(rows), strict=True):
            ring = fastest(group, nbytes, lambda row: row.algorithm == "ring")
            two_shot = fastest(group, nbytes, lambda row: row.algorithm == "two_shot")
            line += [_ratio(fastest(group, nbytes, library), fastest(group, nbytes, own_bits)), _ratio(ring, two_shot)]
    return head, cells


def _networks(rows: Sequence[CallRow]) -> dict[str, list[CallRow]]:
    """Return the rows of each network between hosts, by its name, in the order in which the files were given."""
    networks: dict[str, list[CallRow]] = {}
    for row in rows:
        if row.nodes == 1:
            raise ConfigError("these rows are of one host; a table of hosts needs rows of several")
        each = f" x {row.shape.ranks_per_node} ranks" if row.shape.ranks_per_node > 1 else ""
        networks.setdefault(f"{row.nodes} hosts{each}, {row.delay_us / 1e3:g} ms", []).append(row)
    return networks


def _hosts(rows: Sequence[CallRow]) -> tuple[list[str], _Cells]:
    head, cells = [""], [[size_name(nbytes)] for nbytes in _sizes(rows)]
    for name, group in _networks(rows).items():
        head += [f"{name}: Gloo", "auto", "Gloo / auto", "fastest"]
        for line, nbytes in zip(cells, _sizes(rows), strict=True):
            gloo = fastest(group, nbytes, lambda row: row.algorithm == "gloo")
            auto = fastest(group, nbytes, lambda row: row.algorithm == implementations.AUTO)
            own = fastest(group, nbytes, own_bits)
            best = "" if own is None else f"{_ms(own)} ({label(own.algorithm)})"
            line += [_ms(gloo), _ms(auto), _ratio(gloo, auto), best]
    return head, cells


def _model(rows: Sequence[CallRow]) -> tuple[list[str], _Cells]:
    head, cells = [""], [[size_name(nbytes)] for nbytes in _sizes(rows)]
    for name, group in _networks(rows).items():
        names = [one for one in _in_order(group) if any(row.predicted_us and row.algorithm == one for row in group)]
        head += [f"{name}: {label(one)}" for one in names]
        for line, nbytes in zip(cells, _sizes(rows), strict=True):
            for one in names:
                row = next((row for row in group if row.nbytes == nbytes and row.algorithm == one), None)
                known = row is not None and row.predicted_us is not None and row.time_us is not None
                line.append(f"{row.predicted_us / row.time_us:.2f}" if known else "")  # type: ignore[union-attr, operator]
    return head, cells


def _operations(rows: Sequence[CallRow]) -> tuple[list[str], _Cells]:
    require_same(rows, "nodes")
    head = ["", "operation", "reduction", "dtype", *(size_name(nbytes) for nbytes in _sizes(rows))]
    groups: dict[tuple[str, str, str, str], list[CallRow]] = {}
    for row in rows:
        reduction = row.reduction if OPERATIONS[row.op].reduces else ""
        groups.setdefault((_ranks(row), row.op.replace("_", "-"), reduction, row.dtype), []).append(row)
    cells = []
    for names, group in groups.items():
        auto = [fastest(group, nbytes, lambda row: row.algorithm == implementations.AUTO) for nbytes in _sizes(rows)]
        libraries = [fastest(group, nbytes, library) for nbytes in _sizes(rows)]
        cells.append([*names, *(_ratio(slow, fast) for slow, fast in zip(libraries, auto, strict=True))])
    return head, cells


def _fused(rows: Sequence[CallRow], columns: Sequence[str]) -> tuple[list[str], _Cells]:
    require_same(rows, "world_size", "hidden")
    above = {"fused": implementations.own_algorithms(rows[0].op)}
    above |= {name: (name,) for name in (*modes.FP8, "unfused")}
    above = {name: group for name, group in above.items() if any(row.algorithm in group for row in rows)}
    if not any(row.algorithm in modes.PLAIN for row in rows):
        above = {}
    head = ["tokens", "size", *(label(column) for column in columns)]
    head += [f"above plain: {label(name)}" for name in above]
    cells = []
    for nbytes in _sizes(rows):
        by_name = {row.algorithm: row for row in rows if row.nbytes == nbytes}
        line = [
            str(next(iter(by_name.values())).tokens),
            size_name(nbytes),
            *(_us(by_name.get(name)) for name in columns),
        ]
        for group in above.values():
            best = fastest(rows, nbytes, lambda row, group=group: row.algorithm in group)  # type: ignore[misc]
            more = None if best is None else above_plain_us(best, by_name.values())
            line.append("" if more is None else f"{more:+.1f}")
        cells.append(line)
    return head, cells


def _between(rows: Sequence[CallRow]) -> tuple[list[str], _Cells]:
    require_same(rows, "world_size", "hidden")
    worked = [row for row in rows if row.measure == "between"]
    if not worked:
        raise ConfigError("there are no rows with work between calls")
    require_same(worked, "work")
    name = "Gloo" if rows[0].device == "cpu" else "NCCL"
    head = ["", "tokens", f"{worked[0].work} alone", "back to back: shotcast", name, "saved"]
    head += ["with work between: shotcast", name, "saved", "kept"]
    cells = []
    for nbytes in _sizes(rows):
        line, savings = [], []
        for measure in ("call", "between"):
            measured = [row for row in rows if row.measure == measure]
            own, other = fastest(measured, nbytes, own_bits), fastest(measured, nbytes, library)
            saved = None
            if own is not None and other is not None:
                saved = other.time_us - own.time_us  # type: ignore[operator]
            savings.append(saved)
            line += [_us(own), _us(other), "" if saved is None else f"{saved:.1f}"]
        back, between = savings
        kept_share = f"{between / back:.0%}" if back is not None and between is not None and back > 0 else ""
        work_rows = [row for row in worked if row.nbytes == nbytes and row.work_us is not None]
        alone = _microseconds(work_rows[0].work_us) if work_rows else ""
        cells.append([size_name(nbytes), str(work_rows[0].tokens) if work_rows else "", alone, *line, kept_share])
    return head, cells


KINDS: dict[str, Callable[..., tuple[list[str], _Cells]]] = {
    "times": _times,
    "summary": _summary,
    "ratios": _ratios,
    "fused": _fused,
    "hosts": _hosts,
    "model": _model,
    "operations": _operations,
    "between": _between,
}


# --- cells ------------------------------------------------------------------------------------------------------------


def _lines(head: list[str], cells: _Cells) -> str:
    lines = [head, ["---"] * len(head), *cells]
    texts = ["| " + " | ".join(line) + " |" for line in lines]
    texts[1] = texts[1].replace(" ", "")
    return "\n".join(texts).replace("|  |", "| |").replace("|  |", "| |")


def _sizes(rows: Sequence[CallRow]) -> list[int]:
    return sorted({row.nbytes for row in rows})


def _world_sizes(rows: Sequence[CallRow]) -> list[int]:
    """Return the world sizes in the order in which the files were given."""
    return list(dict.fromkeys(row.world_size for row in rows))


def _in_order(rows: Sequence[CallRow]) -> list[str]:
    """Return the measured implementations in the order of reports, unknown names last."""
    measured = list(dict.fromkeys(row.algorithm for row in rows))
    order = modes.known(rows[0].op, rows[0].device)
    return [name for name in order if name in measured] + [name for name in measured if name not in order]


def _ranks(row: CallRow) -> str:
    return f"{row.world_size} {'GPUs' if row.device == 'cuda' else 'ranks'}"


def _us(row: CallRow | None) -> str:
    return "" if row is None or row.time_us is None else _microseconds(row.time_us)


def _ms(row: CallRow | None) -> str:
    return "" if row is None or row.time_us is None else f"{row.time_us / 1e3:.1f}"


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _ratio(slow: CallRow | None, fast: CallRow | None) -> str:
    if slow is None or fast is None or not slow.time_us or not fast.time_us:
        return ""
    ratio = slow.time_us / fast.time_us
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


# --- command ----------------------------------------------------------------------------------------------------------


def engine_table(rows: Sequence[EngineRow]) -> str:
    """Return rows of the engine's benchmark as a Markdown table."""
    columns = engine_report.columns(rows)
    lines = [[name for name, _ in columns], ["---"] * len(columns), *engine_results.cells(rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, action="append", required=True, help="a result; repeat it for several")
    parser.add_argument("--kind", default="", choices=("", *KINDS, "engine"), help="by default what suits the rows")
    parser.add_argument("--measure", default="", help="call, between or host")
    for name, what in (("world-size", "rows of these world sizes"), ("sizes", "rows of these sizes, such as 8K,1M")):
        parser.add_argument(f"--{name}", type=_names, default=[], help=f"only {what}")
    parser.add_argument("--columns", type=_names, default=[], help="only these implementations")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options().parse_args(arguments)
    if asked.kind == "engine":
        text = engine_table([row for path in asked.json for row in engine_results.read(path)])
    else:
        world_sizes = [int(number) for number in asked.world_size]
        rows = [row for path in asked.json for row in read(path).rows]
        rows = [row for row in rows if not world_sizes or row.world_size in world_sizes]
        sizes = [parse_size(size) for size in asked.sizes]
        text = markdown_table(rows, asked.kind, sizes, asked.columns, asked.measure)
    print(with_note(text, asked.json))


if __name__ == "__main__":
    main()
