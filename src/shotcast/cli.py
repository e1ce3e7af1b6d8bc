"""The command line: ``shotcast bench``, ``shotcast tune``, ``shotcast doctor``."""

from __future__ import annotations

import contextlib
import enum
import io
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
import typer.main
from rich.console import Console
from rich.table import Table

from shotcast import __version__, env
from shotcast.errors import ConfigError, RankFailed, ShotcastError
from shotcast.units import parse_size

if TYPE_CHECKING:
    from shotcast.bench.harness import BenchPlan
    from shotcast.bench.report import Row


class _Group(typer.core.TyperGroup):
    """Our own errors become one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ShotcastError as error:
            if ctx.params.get("show_traceback"):
                raise
            Console(stderr=True, soft_wrap=True).print(f"shotcast: {_one_line(error)}", style="red", markup=False)
            raise typer.Exit(2) from error


def _one_line(error: ShotcastError) -> str:
    if isinstance(error, RankFailed):
        if isinstance(error.__cause__, ShotcastError):
            return _one_line(error.__cause__)
        lines = [line for line in error.detail.splitlines() if line.strip() and not line.startswith("(ranks that")]
        # A traceback ends with what was raised; anything else begins with what happened.
        what = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        return f"rank {error.rank} failed: {what} (--traceback shows all of it)"
    return " ".join(str(error).split())


app = typer.Typer(
    cls=_Group,
    help="Fast, deterministic collectives for the GPUs of a node and for CPU processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Time a collective: own algorithms beside NCCL, Gloo and PyTorch's.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def main() -> None:
    app()


def _show_version(shown: bool) -> None:
    if shown:
        typer.echo(f"shotcast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show errors in full.")] = False,
) -> None:
    pass


# --- bench ------------------------------------------------------------------------------------------------------------


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


MinBytes = Annotated[str, typer.Option("-b", "--minbytes", help="Smallest message, such as 8 or 1K.")]
MaxBytes = Annotated[str, typer.Option("-e", "--maxbytes", help="Largest message, such as 4M.")]
StepFactor = Annotated[int, typer.Option("-f", "--stepfactor", min=2, help="Each size is the last one times this.")]
Iters = Annotated[int, typer.Option("-n", "--iters", help="Timed calls a point, at most.")]
Warmup = Annotated[int, typer.Option("-w", "--warmup_iters", help="Calls before that.")]
Check = Annotated[int, typer.Option("-c", "--check", min=0, max=1, help="1: compare results with a float64 sum.")]
WorldSize = Annotated[
    str, typer.Option("--world-size", help="Ranks to start, such as 2,4,8. Default: every GPU, or one rank a core.")
]
DeviceOption = Annotated[Device, typer.Option("--device", help="auto: cuda where there is a GPU.")]
Dtype = Annotated[str, typer.Option("-d", "--dtype", help="float32, float16 or bfloat16.")]
Algorithms = Annotated[
    str, typer.Option("--algorithms", help="Comma-separated, baselines too. Default: all that are legal.")
]
Seconds = Annotated[float, typer.Option("--seconds", min=0.0, help="Time for the timed calls of a point.")]
Eager = Annotated[bool, typer.Option("--eager", help="CUDA: time single calls rather than a captured graph.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds for a world size; then the ranks are ended.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write rows and environment to this file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Write a picture to this file (png, svg, pdf).")]
PlotKind = Annotated[str, typer.Option("--plot-kind", help="latency, or speedup-over-ring.")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", help="Write a table to this file (see bench table).")]
Hidden = Annotated[int, typer.Option("--hidden", min=1, help="Elements of a row: the model's hidden size.")]
Between = Annotated[
    str,
    typer.Option("--between", help="gemm: also time calls with a matrix product between, tokens x k by k x hidden."),
]
GemmK = Annotated[int, typer.Option("--gemm-k", min=0, help="k of that product. Default: hidden / ranks.")]
HostTime = Annotated[bool, typer.Option("--host", help="Measure what the host spends on a call, not the call's time.")]
Tokens = Annotated[str, typer.Option("--tokens", help="Rows of the tensor, comma-separated.")]


def _plain_command(op: str) -> None:
    """Register the benchmark of an operation whose messages are counted in bytes; all take the same options."""

    def command(
        minbytes: MinBytes = "1K",
        maxbytes: MaxBytes = "4M",
        stepfactor: StepFactor = 4,
        iters: Iters = 1000,
        warmup_iters: Warmup = 5,
        check: Check = 1,
        world_size: WorldSize = "",
        device: DeviceOption = Device.AUTO,
        dtype: Dtype = "",
        algorithms: Algorithms = "",
        seconds: Seconds = 0.4,
        eager: Eager = False,
        between: Between = "",
        hidden: Hidden = 8192,
        gemm_k: GemmK = 0,
        host: HostTime = False,
        timeout: Timeout = 600.0,
        json_file: JsonFile = None,
        plot_file: PlotFile = None,
        plot_kind: PlotKind = "latency",
        markdown_file: MarkdownFile = None,
    ) -> None:
        sizes = _sizes(minbytes, maxbytes, stepfactor)
        from shotcast.bench.harness import BenchPlan

        plan = BenchPlan(
            op=op,
            sizes=sizes,
            iters=iters,
            warmup_iters=warmup_iters,
            check=bool(check),
            eager=eager,
            budget_s=seconds,
            timeout_s=timeout,
            between=between,
            hidden=hidden if between else 0,
            inner=gemm_k,
            host=host,
            **_where(device, dtype, algorithms),
        )
        _bench(plan, world_size, _Outputs(json_file, plot_file, plot_kind, markdown_file))

    name = op.replace("_", "-")
    bench.command(name, help=f"Time {name} over a range of message sizes.")(command)


for _op in ("all_reduce", "reduce_scatter", "all_gather"):
    _plain_command(_op)


@bench.command("all-reduce-rms-norm")
def _fused_command(
    hidden: Hidden = 8192,
    tokens: Tokens = "1,2,4,8,16,32,64,128,256,512",
    iters: Iters = 1000,
    warmup_iters: Warmup = 5,
    check: Check = 1,
    world_size: WorldSize = "",
    device: DeviceOption = Device.AUTO,
    dtype: Dtype = "",
    algorithms: Algorithms = "",
    seconds: Seconds = 0.4,
    eager: Eager = False,
    between: Between = "",
    gemm_k: GemmK = 0,
    host: HostTime = False,
    timeout: Timeout = 600.0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    plot_kind: PlotKind = "latency",
    markdown_file: MarkdownFile = None,
) -> None:
    """Time all-reduce, residual and RMSNorm as one call: fused, as two kernels, by NCCL, and to FP8."""
    where = _where(device, dtype, algorithms)
    counts = _numbers(tokens, "--tokens")
    if not counts or min(counts) < 1:
        raise ConfigError(f"--tokens takes whole numbers from 1 up such as 1,8,64, not {tokens!r}")
    from shotcast import wire
    from shotcast.bench.harness import BenchPlan

    item = wire.DTYPES.get(where["dtype"], 1)  # an unknown dtype is the plan's to refuse
    plan = BenchPlan(
        op="all_reduce_rms_norm",
        sizes=tuple(count * hidden * item for count in sorted(counts)),
        iters=iters,
        warmup_iters=warmup_iters,
        check=bool(check),
        eager=eager,
        budget_s=seconds,
        timeout_s=timeout,
        between=between,
        hidden=hidden,
        inner=gemm_k,
        host=host,
        **where,
    )
    _bench(plan, world_size, _Outputs(json_file, plot_file, plot_kind, markdown_file))


def _where(device: Device, dtype: str, algorithms: str) -> dict[str, Any]:
    name = _device(device)
    return {
        "device": name,
        "dtype": dtype or ("float32" if name == "cpu" else "bfloat16"),
        "algorithms": _names(algorithms),
        "progress": sys.stderr.isatty(),
    }


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Files to write after a benchmark."""

    json_file: Path | None
    plot_file: Path | None
    plot_kind: str
    markdown_file: Path | None


def _bench(plan: BenchPlan, world_size: str, outputs: _Outputs) -> None:
    from shotcast.bench import contenders, harness, report, tables
    from shotcast.bench.plot import KINDS, plot

    if outputs.plot_kind not in KINDS:  # before minutes of measuring
        raise ConfigError(f"there is no picture {outputs.plot_kind!r}; there are {', '.join(KINDS)}")
    job = env.job()
    world_sizes = _world_sizes(world_size, plan.device, job.world_size if job else None)
    console = _console()
    rows: list[Row] = []
    for number in world_sizes:
        measured = harness.run_under_torchrun(plan) if job else harness.run(plan, number)
        if not measured:
            raise ConfigError(f"none of the algorithms serves {plan.op} of {plan.dtype} between {number} ranks")
        rows += measured
        if job is None or job.rank == 0:
            for measure in plan.measures:
                console.print(report.table([row for row in measured if row.measure == measure]))
            if sentences := report.headline(measured):
                console.print(sentences)
            console.print()
    if job is not None and job.rank != 0:
        return
    result = None
    if outputs.json_file is not None or outputs.plot_file is not None:
        from shotcast.hardware.detect import detect

        command = shlex.join(["shotcast", *sys.argv[1:]])
        result = report.Result.now(rows, environment=detect().as_json(), command=command)
    if outputs.json_file is not None and result is not None:
        report.write(outputs.json_file, result)
        console.print(f"wrote {outputs.json_file}")
    if outputs.markdown_file is not None:
        texts = [tables.markdown([row for row in rows if row.world_size == number]) for number in world_sizes]
        outputs.markdown_file.parent.mkdir(parents=True, exist_ok=True)
        outputs.markdown_file.write_text("\n\n".join(texts) + "\n")
        console.print(f"wrote {outputs.markdown_file}")
    if outputs.plot_file is not None and result is not None:
        plot(rows, outputs.plot_file, outputs.plot_kind, result.machine)
        console.print(f"wrote {outputs.plot_file}")
    if any(row.errors for row in rows):
        Console(stderr=True).print("shotcast: some results were wrong", style="red")
        raise typer.Exit(1)
    if allocating := [row.algorithm for row in rows if row.allocations and contenders.is_own(row.algorithm)]:
        names = ", ".join(dict.fromkeys(allocating))
        Console(stderr=True).print(f"shotcast: calls with out given allocated GPU memory: {names}", style="red")
        raise typer.Exit(1)


Raw = Annotated[list[Path], typer.Option("--json", help="Kept results; give it once a file.")]
OnlyWorldSize = Annotated[str, typer.Option("--world-size", help="Of the rows, those of these world sizes.")]
OnlySizes = Annotated[str, typer.Option("--sizes", help="Of the rows, those of these sizes, such as 8K,64K,1M.")]


@bench.command("table")
def _table_command(
    json_files: Raw,
    kind: Annotated[str, typer.Option("--kind", help="times, summary, ratios, fused or between.")] = "",
    measure: Annotated[str, typer.Option("--measure", help="call, between or host.")] = "",
    world_size: OnlyWorldSize = "",
    sizes: OnlySizes = "",
    columns: Annotated[str, typer.Option("--columns", help="Of the contenders, these.")] = "",
) -> None:
    """Print kept results as a Markdown table; runs nothing."""
    from shotcast.bench import tables

    rows = _kept(json_files, world_size)[0]
    wanted = [parse_size(size) for size in _names(sizes)]
    typer.echo(tables.markdown(rows, kind, wanted, _names(columns), measure))


@bench.command("plot")
def _plot_command(
    picture: Annotated[Path, typer.Argument(help="The file to write (png, svg, pdf).")],
    json_files: Raw,
    kind: Annotated[str, typer.Option("--kind", help="latency, or speedup-over-ring.")] = "latency",
    world_size: OnlyWorldSize = "",
) -> None:
    """Draw kept results; runs nothing."""
    from shotcast.bench.plot import plot

    rows, machine = _kept(json_files, world_size)
    plot(rows, picture, kind, machine)
    typer.echo(f"wrote {picture}")


@bench.command("fill")
def _fill_command(
    documents: Annotated[list[Path], typer.Argument(help="Markdown files.")],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail where a table is out of date.")] = False,
) -> None:
    """Make the tables of documents anew, each by the command in the comment before it.

    A table stands between <!-- shotcast bench table ... --> and <!-- end of table -->. Run it where the paths in the
    commands begin.
    """
    from shotcast.bench.documents import fill

    stale = []
    for document in documents:
        try:
            text = document.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{document} cannot be read: {error}") from error
        new = fill(text, _printed)
        if new != text:
            stale.append(str(document))
            if not check:
                document.write_text(new)
                typer.echo(f"wrote {document}")
    if check and stale:
        raise ConfigError(f"tables are out of date in {', '.join(stale)}; run shotcast bench fill {' '.join(stale)}")


def _printed(arguments: list[str]) -> str:
    """What ``shotcast bench table`` prints with these arguments."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        _command_of(bench, "table").main(arguments, "shotcast bench table", standalone_mode=False)
    return text.getvalue()


def _command_of(group: typer.Typer, name: str) -> Any:
    return typer.main.get_group(group).commands[name]


def _kept(json_files: list[Path], world_size: str) -> tuple[list[Row], str]:
    """Rows of the files, those of the world sizes asked for; and the machines they were measured on."""
    from shotcast.bench import report

    results = [report.read(path) for path in json_files]
    asked = _numbers(world_size, "--world-size")
    rows = [row for result in results for row in result.rows if not asked or row.world_size in asked]
    return rows, "; ".join(dict.fromkeys(result.machine for result in results))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in _names(text)]
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers such as 2,4,8, not {text!r}") from None


def _console() -> Console:
    console = Console()
    # columns in a file or a pipe are not for wrapping
    return console if console.is_terminal else Console(width=160)


def _sizes(minbytes: str, maxbytes: str, stepfactor: int) -> tuple[int, ...]:
    least, most = parse_size(minbytes), parse_size(maxbytes)
    if not 0 < least <= most:
        raise ConfigError(f"sizes go from 1 byte up, the least first: --minbytes {minbytes} --maxbytes {maxbytes}")
    sizes = []
    while least <= most:
        sizes.append(least)
        least *= stepfactor
    return tuple(sizes)


def _device(device: Device) -> str:
    if device is not Device.AUTO:
        return device.value
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _world_sizes(text: str, device: str, running: int | None) -> list[int]:
    asked = _numbers(text, "--world-size")
    if any(number < 2 for number in asked):
        raise ConfigError("a collective takes at least 2 ranks")
    if running is not None:
        if asked not in ([], [running]):
            raise ConfigError(f"this job has {running} ranks already; leave --world-size out under torchrun")
        return [running]
    if device == "cpu":
        from shotcast.hardware.detect import available_cores

        return asked or [min(8, max(2, available_cores()))]
    import torch

    count = torch.cuda.device_count()
    if count < max(asked, default=2):
        raise ConfigError(f"{max(asked, default=2)} CUDA ranks need as many GPUs, and {count} are visible")
    return asked or [count]


# --- tune -------------------------------------------------------------------------------------------------------------


@app.command()
def tune(
    op: Annotated[str, typer.Option("--op", help="Comma-separated.")] = "all_reduce,reduce_scatter,all_gather",
    dtype: Annotated[str, typer.Option("-d", "--dtype", help="Comma-separated.")] = "bfloat16,float16,float32",
    mode: Annotated[
        str, typer.Option("--mode", help="graph, eager or both. Default: both on CUDA; CPU ranks have eager.")
    ] = "",
    minbytes: MinBytes = "1K",
    maxbytes: Annotated[
        str, typer.Option("-e", "--maxbytes", help="Largest message. Default: 256M on CUDA, 16M on the CPU.")
    ] = "",
    stepfactor: Annotated[
        int,
        typer.Option(
            "-f",
            "--stepfactor",
            min=2,
            help="Each size is the last one times this; sizes between are added where the choice changes.",
        ),
    ] = 4,
    device: DeviceOption = Device.AUTO,
    world_size: Annotated[str, typer.Option("--world-size", help="Ranks. Default: every GPU, or one a core.")] = "",
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="Time for the timed calls of a size, all candidates together.")
    ] = 1.0,
    any_bits: Annotated[
        bool, typer.Option("--any-bits", help="Let algorithms win whose sums are rounded in another order (ring, ...).")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Default: the packaged table's name, such as nvidia_h200_x4.json."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Keep what the file has for other operations, dtypes and modes.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds for everything; then the ranks are ended.")
    ] = 1800.0,
) -> None:
    """Measure what is fastest here, and write it as a table for SHOTCAST_TABLE."""
    where = _device(device)
    job = env.job()
    world_sizes = _world_sizes(world_size, where, job.world_size if job else None)
    if len(world_sizes) > 1:
        raise ConfigError("a table is for one number of ranks; tune each by itself")
    from shotcast.bench import tune as tuning
    from shotcast.collectives import table
    from shotcast.hardware.detect import detect, nvidia_driver

    plan = tuning.TunePlan(
        ops=_listed(op),
        device=where,
        dtypes=_listed(dtype),
        sizes=_sizes(minbytes, maxbytes or ("256M" if where == "cuda" else "16M"), stepfactor),
        modes=_listed(mode) or (("graph", "eager") if where == "cuda" else ("eager",)),
        seconds=seconds,
        any_bits=any_bits,
        timeout_s=timeout,
        progress=sys.stderr.isatty(),
    )
    facts = detect()
    part = facts.gpus[0].name if where == "cuda" else facts.cpu_model
    file = output or Path(table.file_name(part, world_sizes[0]))
    merging = merge and file.exists()
    if merging:
        tuning.mergeable(file.read_text(), str(file), part, world_sizes[0])  # before time is spent
    measured, points = tuning.run_under_torchrun(plan) if job else tuning.run(plan, world_sizes[0])
    if job is not None and job.rank != 0:
        return
    command = shlex.join(["shotcast", *sys.argv[1:]])
    facts_of_run = facts.as_json() | {"driver": nvidia_driver()}
    text = tuning.document(measured, world_sizes[0], points, environment=facts_of_run, command=command, seconds=seconds)
    if merging:
        text = tuning.merged(file.read_text(), text, str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(tuning.view(points, world_sizes[0], where))
    console.print(f"wrote {file}; to use it: export SHOTCAST_TABLE={shlex.quote(str(file.resolve()))}", soft_wrap=True)
    if wrong := tuning.wrong(points):
        errors = Console(stderr=True, soft_wrap=True)
        for line in wrong:
            errors.print(f"shotcast: {line}", style="red", markup=False)
        raise typer.Exit(1)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


# --- doctor -----------------------------------------------------------------------------------------------------------


@app.command()
def doctor() -> None:
    """Show what this machine has, and what that means for ranks on it."""
    from shotcast.hardware.advice import Level, findings
    from shotcast.hardware.detect import detect

    facts = detect()
    console = Console()
    view = Table(box=None, show_header=False, pad_edge=False)
    view.add_column(style="bold", no_wrap=True)
    view.add_column()
    for name, value in _doctor_rows(facts):
        view.add_row(name, value)
    console.print(view)
    console.print()
    marks = {Level.GOOD: "[green]ok[/]", Level.NOTE: "[yellow]note[/]", Level.PROBLEM: "[red]problem[/]"}
    advice = Table(box=None, show_header=False, pad_edge=False)
    advice.add_column(no_wrap=True)
    advice.add_column()
    for finding in findings(facts):
        advice.add_row(marks[finding.level], finding.text)
    console.print(advice)


def _doctor_rows(facts: Any) -> list[tuple[str, str]]:
    gib = 1 << 30
    rows = [
        ("processor", f"{facts.cpu_model}, {facts.cores} of {facts.cores_installed} cores usable"),
        ("memory", f"{facts.memory_available_bytes / gib:.1f} of {facts.memory_bytes / gib:.1f} GiB available"),
        (facts.shm_dir, f"{facts.shm_free_bytes / gib:.1f} of {facts.shm_bytes / gib:.1f} GiB free"),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
    ]
    if facts.cuda_driver or facts.cuda_runtime:
        driver, runtime = facts.cuda_driver or "none", facts.cuda_runtime or "none"
        rows.append(("CUDA", f"driver {driver}, PyTorch built for {runtime}"))
    for gpu in facts.gpus:
        major, minor = gpu.compute_capability
        peers = [str(j) for j, reached in enumerate(facts.peer_access[gpu.index]) if reached and j != gpu.index]
        rows.append(
            (
                f"GPU {gpu.index}",
                f"{gpu.name}, sm_{major}{minor}, {gpu.sm_count} SMs, {gpu.memory_bytes / gib:.0f} GiB, "
                f"reaches {', '.join(peers) or 'no other'}, "
                f"multicast {'unknown' if gpu.multicast is None else 'yes' if gpu.multicast else 'no'}",
            )
        )
    return rows
