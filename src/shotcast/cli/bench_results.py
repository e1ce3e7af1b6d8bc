"""``shotcast bench plot``: draw stored results, and measure nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shotcast.cli.options import numbers_in
from shotcast.errors import ConfigError

if TYPE_CHECKING:
    from shotcast.bench.report import Row

app = typer.Typer()

Raw = Annotated[list[Path], typer.Option("--json", help="A file of stored results; repeat it for several files.")]
OnlyWorldSize = Annotated[str, typer.Option("--world-size", help="Only rows of these world sizes.")]


@app.command("plot")
def _plot_command(
    picture: Annotated[Path, typer.Argument(help="The file to write (png, svg, pdf).")],
    json_files: Raw,
    kind: Annotated[str, typer.Option("--kind", help="latency or engine.")] = "latency",
    world_size: OnlyWorldSize = "",
) -> None:
    """Draw a picture of stored results; measures nothing."""
    from shotcast.bench import engine_report
    from shotcast.bench.plot import plot

    if kind not in ("latency", "engine"):
        raise ConfigError(f"there is no picture {kind!r}; choose from latency, engine")
    if kind == "engine" and world_size:
        raise ConfigError("a picture of the engine takes no --world-size")
    if kind == "engine":
        engine_report.plot([row for path in json_files for row in engine_report.read(path)], picture)
    else:
        rows, machine = _stored_rows(json_files, world_size)
        plot(rows, picture, machine)
    typer.echo(f"wrote {picture}")


def _stored_rows(json_files: list[Path], world_size: str) -> tuple[list[Row], str]:
    """Return the rows of the files that have the requested world sizes, and the machines they were measured on."""
    from shotcast.bench import report

    results = [report.read(path) for path in json_files]
    wanted = numbers_in(world_size, "--world-size")
    rows = [row for result in results for row in result.rows if not wanted or row.world_size in wanted]
    return rows, "; ".join(dict.fromkeys(result.machine for result in results))
