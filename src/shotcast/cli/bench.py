"""``shotcast bench``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from rich.console import Console

from shotcast import env, extras
from shotcast.cli.engine_options import Dtype as EngineDtype
from shotcast.cli.options import (
    Device,
    DeviceOption,
    Dtype,
    JsonFile,
    MinBytes,
    PlotFile,
    Seconds,
    Timeout,
    WorldSize,
    command_line,
    device_name,
    names_in,
    new_console,
    node_shape,
    numbers_in,
    ready_to_write,
    sizes_between,
    with_groups,
    with_underscores,
    world_sizes_of,
)
from shotcast.errors import ConfigError

if TYPE_CHECKING:
    from shotcast.bench.config import BenchConfig
    from shotcast.bench.report import Row

app = typer.Typer(
    help="Time collectives and the engine: own algorithms compared with NCCL, Gloo and PyTorch.", no_args_is_help=True
)


def timing(
    iters: Annotated[int, typer.Option("-n", "--iters", help="The largest number of timed calls at one point.")] = 1000,
    warmup_iters: Annotated[int, typer.Option("-w", "--warmup_iters", help="Warm-up calls before the timed ones.")] = 5,
    check: Annotated[
        int, typer.Option("-c", "--check", min=0, max=1, help="1 compares results with a float64 sum; 0 does not.")
    ] = 1,
    device: DeviceOption = Device.AUTO,
    dtype: Dtype = "",
    algorithms: Annotated[
        str,
        typer.Option(
            callback=with_underscores, help="Algorithms and baselines, comma-separated. Default: all legal ones."
        ),
    ] = "",
    budget_s: Seconds = 0.4,
    eager: Annotated[bool, typer.Option("--eager", help="CUDA: time single calls, not a captured graph.")] = False,
    timeout_s: Timeout = 600.0,
) -> dict[str, Any]:
    """Return the BenchConfig fields that every operation has, with the device as given."""
    return locals() | {"check": bool(check), "algorithms": names_in(algorithms), "progress": sys.stderr.isatty()}


def _collective_command(op: str) -> None:
    """Register the benchmark of an operation; all share the same options."""

    @with_groups(timing)
    def command(
        *,
        minbytes: MinBytes = "1K",
        maxbytes: Annotated[str, typer.Option("-e", "--maxbytes", help="The largest message, such as 4M.")] = "4M",
        stepfactor: Annotated[
            int, typer.Option("-f", "--stepfactor", min=2, help="The factor between neighbouring sizes.")
        ] = 4,
        world_size: WorldSize = "",
        reduction: Annotated[
            str,
            typer.Option("-o", "--op", "--reduction", help="sum, prod, min, max or avg, of operations that reduce."),
        ] = "sum",
        timing: dict[str, Any],
        json_file: JsonFile = None,
        plot_file: PlotFile = None,
    ) -> None:
        sizes = sizes_between(minbytes, maxbytes, stepfactor)
        from shotcast.bench.config import BenchConfig

        device = device_name(timing["device"])
        usual = {"device": device, "dtype": timing["dtype"] or ("float32" if device == "cpu" else "bfloat16")}
        config = BenchConfig(op=op, sizes=sizes, reduction=reduction, **timing | usual)
        _bench(config, world_size, json_file, plot_file)

    name = op.replace("_", "-")
    app.command(name, help=f"Time {name} over a range of message sizes.")(command)


for _op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter"):
    _collective_command(_op)


def _bench(config: BenchConfig, world_size: str, json_file: Path | None, plot_file: Path | None) -> None:
    from shotcast.bench import harness, kernels, report
    from shotcast.bench.machine_load import require_quiet
    from shotcast.bench.plot import check_format, plot
    from shotcast.hardware.detect import available_cores, detect

    # checked before minutes of measuring
    if plot_file is not None:
        check_format(plot_file)
    job = env.job()
    if job is None or job.rank == 0:
        ready_to_write(json_file, plot_file)
    world_sizes = world_sizes_of(world_size, config.device, job.world_size if job else None)
    console = new_console()
    rows: list[Row] = []
    for number in world_sizes:
        config = replace(config, nodes=node_shape(number).nodes)
        if job is None:
            require_quiet(min(number, available_cores()), force=True)
        measured = harness.run_under_torchrun(config) if job else harness.run(config, number)
        if not measured:
            raise ConfigError(f"none of the algorithms serves {config.op} of {config.dtype} between {number} ranks")
        rows += measured
        if job is None or job.rank == 0:
            console.print(report.table(measured))
            if means := report.mean_bandwidths(measured):
                console.print(f"mean bus bandwidth (GB/s): {means}", highlight=False)
            console.print()
    if job is not None and job.rank != 0:
        return
    if json_file is not None or plot_file is not None:
        made_by = kernels.of_rows(rows)
        result = report.Result.now(rows, environment=detect().as_json(), command=command_line(), kernels=made_by)
        if json_file is not None:
            report.write(json_file, result)
            console.print(f"wrote {json_file}")
        if plot_file is not None:
            plot(rows, plot_file, result.machine)
            console.print(f"wrote {plot_file}")
    if any(row.errors for row in rows):
        Console(stderr=True).print("shotcast: some results were wrong", style="red")
        raise typer.Exit(1)


@app.command("engine")
def _engine_command(
    model: Annotated[str, typer.Argument(help="A model, as for shotcast generate.")] = "smollm2",
    *,
    layouts: Annotated[str, typer.Option(help="Layouts TxP: tensor by pipeline parallel.")] = "1x1,2x1",
    batches: Annotated[str, typer.Option(help="Numbers of concurrent requests.")] = "1,4,16",
    algorithms: Annotated[
        str, typer.Option(callback=with_underscores, help="Algorithms of the all-reduces: auto, one_shot, nccl, ...")
    ] = "auto",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output: Annotated[int, typer.Option(help="Tokens of each output.")] = 32,
    rounds: Annotated[int, typer.Option(help="Timed rounds; one warm-up round comes first.")] = 3,
    device: DeviceOption = Device.AUTO,
    dtype: EngineDtype = "",
    quantization: Annotated[str, typer.Option(help="fp8, as for shotcast generate.")] = "",
    overlap: Annotated[str, typer.Option(help="Ways of long prompts, as for shotcast generate: auto, off.")] = "auto",
    speculative_config: Annotated[
        str, typer.Option(help="Also time speculative decoding, as for shotcast generate.")
    ] = "",
    period: Annotated[
        int, typer.Option(help="Random tokens that each prompt repeats. Default: all tokens are random.")
    ] = 0,
    json_file: JsonFile = None,
) -> None:
    """Time the engine: TTFT, TPOT and tokens/s over batches, layouts and all-reduce algorithms."""
    extras.require("engine", "shotcast bench engine")
    from shotcast.bench import engine_bench, engine_report, kernels
    from shotcast.engine.config import parse_layout
    from shotcast.hardware.detect import detect
    from shotcast.planner.step import Layout

    config = engine_bench.EngineBenchConfig(
        model,
        tuple(Layout(*parse_layout(name)) for name in names_in(layouts)),
        tuple(numbers_in(batches, "--batches")),
        names_in(algorithms),
        prompt,
        output,
        rounds,
        device.value,
        dtype,
        quantization,
        names_in(overlap),
        speculative_config,
        period,
    )
    screen = new_console()
    environment, command = detect().as_json(), command_line()
    ready_to_write(json_file)
    rows = []
    for row in engine_bench.measure(config, shown=True):
        rows.append(row)
        if json_file is not None:  # after each row: a row may take minutes, and the next may fail
            json_file.write_text(engine_report.document(rows, environment, command, kernels.of_engine(rows)))
    screen.print(engine_report.table(rows))
    if json_file is not None:
        screen.print(f"wrote {json_file}")
