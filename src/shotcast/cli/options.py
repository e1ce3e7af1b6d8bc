"""Options that several commands take, and reading their values."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shotcast.errors import ConfigError
from shotcast.units import parse_size


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
PlotKind = Annotated[str, typer.Option("--plot-kind", help="latency, speedup-over-ring or summary.")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", help="Write a table to this file (see bench table).")]
Hidden = Annotated[int, typer.Option("--hidden", min=1, help="Elements of a row: the model's hidden size.")]
Between = Annotated[
    str,
    typer.Option("--between", help="gemm: also time calls with a matrix product between, tokens x k by k x hidden."),
]
GemmK = Annotated[int, typer.Option("--gemm-k", min=0, help="k of that product. Default: hidden / ranks.")]
HostTime = Annotated[bool, typer.Option("--host", help="Measure what the host spends on a call, not the call's time.")]
Tokens = Annotated[str, typer.Option("--tokens", help="Rows of the tensor, comma-separated.")]


def names_in(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers_in(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in names_in(text)]
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers such as 2,4,8, not {text!r}") from None


def new_console() -> Console:
    console = Console()
    # columns in a file or a pipe are not for wrapping
    return console if console.is_terminal else Console(width=160)


def ready_to_write(*files: Path | None) -> None:
    """Refuse what cannot be written, before minutes are spent on what goes there."""
    for file in files:
        if file is None:
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            existed = file.exists()
            file.open("a").close()
            if not existed:
                file.unlink()
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def sizes_between(minbytes: str, maxbytes: str, stepfactor: int) -> tuple[int, ...]:
    least, most = parse_size(minbytes), parse_size(maxbytes)
    if not 0 < least <= most:
        raise ConfigError(f"sizes go from 1 byte up, the least first: --minbytes {minbytes} --maxbytes {maxbytes}")
    sizes = []
    while least <= most:
        sizes.append(least)
        least *= stepfactor
    return tuple(sizes)


def device_name(device: Device) -> str:
    if device is not Device.AUTO:
        return device.value
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def world_sizes_of(text: str, device: str, running: int | None) -> list[int]:
    asked = numbers_in(text, "--world-size")
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
