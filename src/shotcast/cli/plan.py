"""``shotcast plan`` and ``shotcast calibrate``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shotcast.cli.options import Force, new_console, ready_to_write, with_underscores
from shotcast.errors import ConfigError
from shotcast.hardware import cluster as clusters
from shotcast.units import about, counted

if TYPE_CHECKING:
    from rich.table import Table

    from shotcast.planner.plan import Plan
    from shotcast.simulator.traffic import Traffic


def plan(
    model: Annotated[
        str, typer.Argument(help="A preset such as llama-3.1-70b, a folder with config.json, or a Hub's org/name.")
    ],
    gpus: Annotated[int, typer.Option("-g", "--gpus", help="GPUs of the cluster that may be used.")] = 8,
    cluster: Annotated[
        str, typer.Option(help=f"{', '.join(clusters.PACKAGED)}, a YAML file, or here for the GPUs of this machine.")
    ] = "h200x8",
    quantization: Annotated[str, typer.Option(help="fp8, or none by default.")] = "",
    prompt: Annotated[int, typer.Option("--input", help="Tokens of a prompt.")] = 2048,
    output: Annotated[int, typer.Option(help="Tokens of an output.")] = 128,
    target: Annotated[
        str, typer.Option(help="latency, throughput, or bounds in ms such as ttft=500,tpot=20.")
    ] = "throughput",
    algorithm: Annotated[
        str, typer.Option(callback=with_underscores, help="The sums: auto, or one of our algorithms.")
    ] = "auto",
    engines: Annotated[
        int | None, typer.Option(min=1, help="Equal engines; 1 as --layout auto. Default: any number.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="The most sequences of an engine. Default: what memory allows.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="A file of shotcast calibrate. Default: SHOTCAST_CALIBRATION, or the packaged one."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Simulate requests that arrive at so many a second on average.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="How many requests --rate simulates. Default: 200.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Simulate requests of a file: JSON lines of time_s, prompt, output.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all points, with InferenceX's keys.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw tokens/s a GPU over tokens/s a user.")] = None,
) -> None:
    """Predict how fast each layout of a model serves on a cluster, and say which one to take."""
    from shotcast.bench.plot import check_format
    from shotcast.planner import machine, picture, report
    from shotcast.planner.model_name import named_model
    from shotcast.planner.plan import MOST_SEQUENCES, Limits, Query, Target, layouts
    from shotcast.planner.plan import plan as planned
    from shotcast.simulator import traffic

    found = machine.this_machine() if cluster == "here" else clusters.load(cluster)
    config, name = named_model(model)
    if rate is not None and trace is not None:
        raise ConfigError("--rate and --trace both say which requests arrive; give one of them")
    if requests is not None and rate is None:
        raise ConfigError("--requests says how many --rate simulates; give --rate")
    arrivals: list[traffic.Arrival] = []
    if rate is not None:
        arrivals = traffic.poisson(rate, 200 if requests is None else requests, prompt, output)
    elif trace is not None:
        arrivals = traffic.read_trace(trace)
    limits = Limits(max_num_seqs or MOST_SEQUENCES, algorithm=algorithm)
    query = Query(config, name, quantization, found, gpus, prompt, output, Target.parse(target), limits)
    asked = [each for each in layouts(query) if engines in (None, each[1])]
    if not asked:
        raise ConfigError(f"{gpus} GPUs are no {engines} equal engines; accepted: a divisor")
    longest = traffic.longest(query, arrivals) if arrivals else 0
    read = [Path(model), Path(model, "config.json"), Path(cluster), calibration, trace]
    if plot is not None:
        check_format(plot)
    _require_apart([json_file, plot], read)
    ready_to_write(json_file, plot)
    constants = machine.calibration_of(found.gpu, calibration)
    result = planned(query, constants, asked)
    # files come first: what is printed may end in a closed pipe, and a simulation in an error
    value = report.as_json(result, longest)
    if json_file is not None:
        _write_json(json_file, value)
    if plot is not None:
        with _writing(plot):
            picture.draw(result, plot)
    screen = new_console()
    tell = functools.partial(screen.print, soft_wrap=True, markup=False)
    if result.points:
        screen.print(_table(result))
    tell(report.reason(result))
    if not result.calibrated:
        tell(
            f"The {found.gpu.name} has no calibration: rates are those of the {constants.gpu.name} by the ratio of the "
            "data sheets, and the error bars do not know how far off that is."
        )
    for line in report.refusals(result, _ROWS):
        tell(line)
    if why := report.unsupported_reason(result):
        tell(why)
    elif result.best:
        one = "an engine of it" if result.best.engines > 1 else "it"
        folder = report.folder(query.name)
        files = f", with the model's files in {folder}" if folder != query.name else ""
        tell(f"To start {one}{files}: {report.command(result, longest)}", highlight=False)
    if arrivals and result.best:
        met = traffic.simulate(query, result.best, constants, arrivals)
        if json_file is not None:
            _write_json(json_file, value | {"simulated": met.as_json()})
        tell(_met(met, len(arrivals)), highlight=False)
    elif arrivals:
        tell("No request was simulated, since there is no point to serve them at.")
    if result.best is None:
        raise typer.Exit(1)


def _met(traffic: Traffic, requests: int) -> str:
    median_ms, most_ms = traffic.tpot_ms(50), traffic.tpot_ms(99)
    later = "no later tokens"
    if median_ms is not None and most_ms is not None:
        later = f"each later token {about(median_ms)} ms (99%: {about(most_ms)})"
    return (
        f"Simulated, {counted(requests, 'request')}: first token {about(traffic.ttft_ms(50))} ms (99%: "
        f"{about(traffic.ttft_ms(99))}), {later}, {about(traffic.tokens_per_s)} tokens/s, {traffic.preemptions} "
        "preempted."
    )


def _require_apart(written: list[Path | None], read: list[Path | None]) -> None:
    """Raise ConfigError if an output file is also another output or an input."""
    seen = {os.path.realpath(os.path.expanduser(file)) for file in read if file is not None}
    for file in (file for file in written if file is not None):
        if os.path.realpath(file) in seen:
            raise ConfigError(f"{file} is read, or written by another option; give each output a file of its own")
        seen.add(os.path.realpath(file))


def _write_json(file: Path, value: Mapping[str, object]) -> None:
    with _writing(file):
        file.write_text(json.dumps(value, indent=1) + "\n")


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Convert a failure to write a file to ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def calibrate(
    world_size: Annotated[
        int, typer.Option("-g", "--world-size", help="The number of ranks that share this machine.")
    ] = 1,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("calibration.json"),
    cluster: Annotated[
        Path, typer.Option("--cluster", help="The file to write with the description of this machine.")
    ] = Path("cluster.yaml"),
    force: Force = False,
) -> None:
    """Measure kernels, host and messages of CPU ranks on this machine, and write them for ``shotcast plan``."""
    from shotcast.bench.cpu_calibration import calibrate as measured
    from shotcast.bench.machine_load import require_quiet
    from shotcast.hardware.detect import available_cores

    ready_to_write(output, cluster)
    require_quiet(max(world_size, available_cores() // world_size * world_size), force)
    machine = measured(world_size, shown=True)
    output.write_text(machine.calibration.as_json() + "\n")
    cluster.write_text(machine.cluster)
    new_console().print(
        f"wrote {output} and {cluster}; to use them: shotcast plan MODEL --cluster {cluster} --calibration {output} "
        f"--gpus {world_size}",
        soft_wrap=True,
        highlight=False,
    )


def _table(result: Plan) -> Table:
    from rich.table import Table
    from rich.text import Text

    from shotcast.planner.report import memory_text

    query = result.query
    title = f"{query.name} {result.precision} on {query.gpus} x {query.cluster.gpu.name}, "
    title += f"{query.prompt} tokens in, {query.output} out, for {query.target}"
    points = result.best_of_each_layout()
    more = f"{len(points) - _ROWS} more layouts are in the file of --json" if len(points) > _ROWS else None
    table = Table(title=Text(title), title_justify="left", caption=more, caption_justify="left")
    for name in ("TP x PP", "engines", "sequences", "first token", "each later", "tokens/s", "a GPU", "sums", "memory"):
        table.add_column(name, justify="left" if name in ("TP x PP", "sums", "memory") else "right")
    for point in points[:_ROWS]:
        table.add_row(
            str(point.layout),
            str(point.engines),
            str(point.sequences),
            f"{about(point.ttft_ms)} ms ±{point.ttft_error:.0%}",
            f"{about(point.tpot_ms)} ms ±{point.tpot_error:.0%}",
            about(point.tokens_per_s),
            about(point.tokens_per_s_per_gpu),
            point.algorithm or "none",
            memory_text(point),
        )
    return table


_ROWS = 12
"""The maximum number of layouts in the table; the JSON file has all."""
