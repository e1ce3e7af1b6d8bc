"""``shotcast bench table``, ``kernels`` and ``plot``: show stored results, and measure nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shotcast.cli.options import names_in, numbers_in
from shotcast.errors import ConfigError
from shotcast.units import parse_size

if TYPE_CHECKING:
    from shotcast.bench.report import Row

app = typer.Typer()

Raw = Annotated[list[Path], typer.Option("--json", help="A file of stored results; repeat it for several files.")]
OnlyWorldSize = Annotated[str, typer.Option("--world-size", help="Only rows of these world sizes.")]
OnlySizes = Annotated[str, typer.Option("--sizes", help="Only rows of these sizes, such as 8K,64K,1M.")]


@app.command("table")
def _table_command(
    json_files: Raw,
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            help="times, summary, ratios, fused, hosts, model, operations, between or engine.",
        ),
    ] = "",
    measure: Annotated[str, typer.Option("--measure", help="call, between or host.")] = "",
    world_size: OnlyWorldSize = "",
    sizes: OnlySizes = "",
    columns: Annotated[str, typer.Option("--columns", help="Only these implementations.")] = "",
) -> None:
    """Print stored results as a Markdown table; measures nothing."""
    from shotcast.bench import engine_report, kernels, markdown

    if kind == "engine":
        if measure or world_size or sizes or columns:
            raise ConfigError("a table of the engine takes no --measure, --world-size, --sizes or --columns")
        engine_rows = [row for path in json_files for row in engine_report.read(path)]
        typer.echo(kernels.with_note(engine_report.markdown(engine_rows), json_files))
        return
    rows = _stored_rows(json_files, world_size)[0]
    wanted = [parse_size(size) for size in names_in(sizes)]
    typer.echo(kernels.with_note(markdown.markdown_table(rows, kind, wanted, names_in(columns), measure), json_files))


@app.command("kernels")
def _kernels_command(json_files: Raw) -> None:
    """Say which of these stored results were made by earlier kernels; print nothing if none was."""
    from shotcast.bench import kernels

    typer.echo(kernels.note(json_files))


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
