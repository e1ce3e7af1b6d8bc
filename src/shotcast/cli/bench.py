"""``shotcast bench``."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from rich.console import Console

from shotcast import env, extras
from shotcast.cli.engine_options import Dtype as EngineDtype
from shotcast.cli.engine_options import say
from shotcast.cli.options import (
    Device,
    DeviceOption,
    Dtype,
    Hidden,
    JsonFile,
    MinBytes,
    NormKind,
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
    between: Annotated[
        str, typer.Option(help="gemm also times calls with a matrix product between them: tokens x k by k x hidden.")
    ] = "",
    inner: Annotated[
        int, typer.Option("--gemm-k", min=0, help="k of the matrix product. Default: hidden / ranks.")
    ] = 0,
    host: Annotated[
        bool, typer.Option("--host", help="Measure the host time of a call, not the call's own time.")
    ] = False,
    timeout_s: Timeout = 600.0,
) -> dict[str, Any]:
    """Return the BenchConfig fields that every operation has, with the device as given."""
    return locals() | {"check": bool(check), "algorithms": names_in(algorithms), "progress": sys.stderr.isatty()}


@dataclass(frozen=True, slots=True)
class _Outputs:
    json_file: Path | None
    plot_file: Path | None


def outputs(json_file: JsonFile = None, plot_file: PlotFile = None) -> _Outputs:
    return _Outputs(json_file, plot_file)


def _plain_command(op: str) -> None:
    """Register the benchmark of an operation with sizes in bytes; all share the same options."""

    @with_groups(timing, outputs)
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
        hidden: Hidden = 8192,
        timing: dict[str, Any],
        outputs: _Outputs,
    ) -> None:
        sizes = sizes_between(minbytes, maxbytes, stepfactor)
        from shotcast.bench.config import BenchConfig

        facts = _on_device(timing)
        hidden = hidden if facts["between"] else 0
        config = BenchConfig(op=op, sizes=sizes, hidden=hidden, reduction=reduction, **facts)
        _bench(config, world_size, outputs)

    name = op.replace("_", "-")
    app.command(name, help=f"Time {name} over a range of message sizes.")(command)


for _op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter"):
    _plain_command(_op)


@app.command("all-reduce-rms-norm")
@with_groups(timing, outputs)
def _fused_command(
    *,
    norm: Annotated[NormKind, typer.Option(help="RMSNorm, or LayerNorm with a bias.")] = NormKind.RMS,
    hidden: Hidden = 8192,
    tokens: Annotated[
        str, typer.Option(help="Numbers of rows of the tensor, comma-separated.")
    ] = "1,2,4,8,16,32,64,128,256,512",
    world_size: WorldSize = "",
    timing: dict[str, Any],
    outputs: _Outputs,
) -> None:
    """Time all-reduce, residual add and norm as one call: fused, as two kernels, with NCCL, and with FP8 output."""
    facts = _on_device(timing)
    counts = numbers_in(tokens, "--tokens")
    if not counts or min(counts) < 1:
        raise ConfigError(f"--tokens takes whole numbers of at least 1 such as 1,8,64, not {tokens!r}")
    from shotcast import wire
    from shotcast.bench.config import BenchConfig

    item = wire.DTYPES.get(facts["dtype"], 1)  # BenchConfig refuses an unknown dtype
    sizes = tuple(count * hidden * item for count in sorted(counts))
    _bench(BenchConfig(op=f"all_reduce_{norm}_norm", sizes=sizes, hidden=hidden, **facts), world_size, outputs)


def _on_device(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with the name of the device and its usual dtype."""
    name = device_name(facts["device"])
    return facts | {"device": name, "dtype": facts["dtype"] or ("float32" if name == "cpu" else "bfloat16")}


def _bench(config: BenchConfig, world_size: str, outputs: _Outputs) -> None:
    from shotcast.bench import harness, implementations, kernels, report
    from shotcast.bench.machine_load import quiet
    from shotcast.bench.plot import plot
    from shotcast.hardware.detect import available_cores
    from shotcast.planner.picture import check_format

    # checked before minutes of measuring
    if outputs.plot_file is not None:
        check_format(outputs.plot_file)
    job = env.job()
    if job is None or job.rank == 0:
        ready_to_write(outputs.json_file, outputs.plot_file)
    world_sizes = world_sizes_of(world_size, config.device, job.world_size if job else None)
    console = new_console()
    rows: list[Row] = []
    for number in world_sizes:
        config = replace(config, nodes=node_shape(number).nodes)
        with quiet(min(number, available_cores()), force=True) if job is None else contextlib.nullcontext():
            measured = harness.run_under_torchrun(config) if job else harness.run(config, number)
        if not measured:
            raise ConfigError(f"none of the algorithms serves {config.op} of {config.dtype} between {number} ranks")
        rows += measured
        if job is None or job.rank == 0:
            for measure in config.measures:
                of_measure = [row for row in measured if row.measure == measure]
                console.print(report.table(of_measure))
                if (columns := report.columns(of_measure)) is not None:
                    console.print()
                    console.print(columns)
                if means := report.mean_bandwidths(of_measure):
                    console.print(f"mean bus bandwidth (GB/s): {means}", highlight=False)
            console.print()
    if job is not None and job.rank != 0:
        return
    result = None
    if outputs.json_file is not None or outputs.plot_file is not None:
        from shotcast.hardware.detect import detect

        command = command_line()
        made_by = kernels.of_rows(rows)
        result = report.Result.now(rows, environment=detect().as_json(), command=command, kernels=made_by)
    if outputs.json_file is not None and result is not None:
        report.write(outputs.json_file, result)
        console.print(f"wrote {outputs.json_file}")
    if outputs.plot_file is not None and result is not None:
        plot(rows, outputs.plot_file, result.machine)
        console.print(f"wrote {outputs.plot_file}")
    if any(row.errors for row in rows):
        Console(stderr=True).print("shotcast: some results were wrong", style="red")
        raise typer.Exit(1)
    if allocating := [row.algorithm for row in rows if row.allocations and implementations.is_own(row.algorithm)]:
        names = ", ".join(dict.fromkeys(allocating))
        Console(stderr=True).print(f"shotcast: calls with out given allocated GPU memory: {names}", style="red")
        raise typer.Exit(1)


@app.command("engine")
def _engine_command(
    model: Annotated[str, typer.Argument(help="A model, as for shotcast generate.")] = "smollm2",
    *,
    layouts: Annotated[
        str, typer.Option(help="Layouts TxP: tensor by pipeline parallel; or auto, as for shotcast serve.")
    ] = "1x1,2x1",
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
    plot_file: PlotFile = None,
) -> None:
    """Time the engine: TTFT, TPOT and tokens/s over batches, layouts and all-reduce algorithms."""
    extras.require("engine", "shotcast bench engine")
    from shotcast.bench import engine_bench, engine_report, kernels
    from shotcast.hardware.detect import detect
    from shotcast.planner.picture import check_format

    config = engine_bench.EngineBenchConfig(
        model,
        (),
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
    config = engine_bench.with_layouts(config, names_in(layouts), say)
    screen = new_console()
    environment, command = detect().as_json(), command_line()
    if plot_file is not None:
        check_format(plot_file)
    ready_to_write(json_file, plot_file)
    rows = []
    for row in engine_bench.measure(config, shown=True):
        rows.append(row)
        if json_file is not None:  # after each row: a row may take minutes, and the next may fail
            json_file.write_text(engine_report.document(rows, environment, command, kernels.of_engine(rows)))
    screen.print(engine_report.table(rows))
    if json_file is not None:
        screen.print(f"wrote {json_file}")
    if plot_file is not None:
        engine_report.plot(rows, plot_file)
        screen.print(f"wrote {plot_file}")


@app.command("plot")
def _plot_command(
    picture: Annotated[Path, typer.Argument(help="The file to write (png, svg, pdf).")],
    json_files: Annotated[
        list[Path], typer.Option("--json", help="A file of stored results; repeat it for several files.")
    ],
    kind: Annotated[str, typer.Option(help="latency or engine.")] = "latency",
    world_size: Annotated[str, typer.Option(help="Only rows of these world sizes.")] = "",
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
    """Return the rows of the files with the requested world sizes, and the machines that measured them."""
    from shotcast.bench import report

    results = [report.read(path) for path in json_files]
    wanted = numbers_in(world_size, "--world-size")
    rows = [row for result in results for row in result.rows if not wanted or row.world_size in wanted]
    return rows, "; ".join(dict.fromkeys(result.machine for result in results))
