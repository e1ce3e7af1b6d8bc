"""Pictures of stored results of ``shotcast bench``; measures nothing::

    python research/plot_results.py PICTURE --json FILE [--json FILE] [--kind engine] [--world-size 2,4]

The kind ``latency`` has the time and the speed-up of collectives over their message size, as ``shotcast bench --plot``
draws them, and ``engine`` the time per token over the throughput.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import engine_results
from call_modes.rows import CallRow, read

from shotcast.bench.plot import plot
from shotcast.cli.options import numbers_in


def rows_of(files: Sequence[Path], world_sizes: Sequence[int]) -> tuple[list[CallRow], str]:
    """Return the timed calls back to back of these world sizes (of all, if there are none), and the machines."""
    results = [read(path) for path in files]
    rows = [row for result in results for row in result.rows if not world_sizes or row.world_size in world_sizes]
    machines = dict.fromkeys(result.machine for result in results)
    return [row for row in rows if row.measure == "call"], "; ".join(machines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the file to write (png, svg, pdf)")
    parser.add_argument("--json", type=Path, action="append", required=True, help="a result; repeat it for several")
    parser.add_argument("--kind", choices=("latency", "engine"), default="latency")
    parser.add_argument("--world-size", default="", help="only rows of these world sizes; not for engine")
    asked = parser.parse_args(arguments)
    if asked.kind == "engine":
        if asked.world_size:
            parser.error("a picture of the engine takes no --world-size")
        engine_results.plot([row for path in asked.json for row in engine_results.read(path)], asked.picture)
    else:
        rows, machines = rows_of(asked.json, numbers_in(asked.world_size, "--world-size"))
        plot(rows, asked.picture, machines)


if __name__ == "__main__":
    main()
