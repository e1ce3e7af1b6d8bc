"""Options that several commands share, and functions that parse their values."""

from __future__ import annotations

import enum
import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shotcast import env
from shotcast.errors import ConfigError
from shotcast.units import parse_size
from shotcast.wire import NodeShape


class Device(enum.StrEnum):
    """Values of ``--device``."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


# What nccl-tests and the flags of inference engines call the dtypes.
_DTYPES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
    "float": "float32", "fp32": "float32", "f32": "float32", "double": "float64", "fp64": "float64", "int": "int32",
}  # fmt: skip


def dtypes_named(text: str) -> str:
    """Parse comma-separated dtypes by their PyTorch names or aliases such as ``bf16``, ``half`` and ``float``."""
    return ",".join(_DTYPES.get(name.lower(), name) for name in names_in(text))


def with_underscores(text: str) -> str:
    """Parse comma-separated names of operations or algorithms; hyphens are accepted, as in ``two-shot``."""
    return ",".join(name.replace("-", "_") for name in names_in(text))


Force = Annotated[bool, typer.Option("--force", help="Measure although other processes use the cores, too.")]
MinBytes = Annotated[str, typer.Option("-b", "--minbytes", help="The smallest message, such as 8 or 1K.")]
WorldSize = Annotated[
    str,
    typer.Option(
        "-g", "--world-size", help="Numbers of ranks, such as 2,4,8. Default: every GPU, or one rank for each core."
    ),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="auto takes cuda if there is a GPU.")]
Dtype = Annotated[
    str,
    typer.Option("-d", "--dtype", callback=dtypes_named, help="float32, bfloat16, int32, ...; also float, half, bf16."),
]
Seconds = Annotated[float, typer.Option("--seconds", min=0.0, help="Seconds for the timed calls at one point.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds for one world size; then the ranks are ended.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the rows and the environment to this file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Write a picture to this file (png, svg, pdf).")]


def with_groups(*groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of functions that several commands share, in place of arguments with their names.

    Each such argument receives the function's result.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = {group.__name__: inspect.signature(group, eval_str=True).parameters for group in groups}
        signature = inspect.signature(command, eval_str=True)

        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = {
                group.__name__: group(**{name: given.pop(name) for name in shared[group.__name__]}) for group in groups
            }
            command(**given, **made)

        placed = [
            one for own in signature.parameters.values() for one in shared.get(own.name, {own.name: own}).values()
        ]
        options = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in placed]
        run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
        return run

    return decorate


def names_in(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers_in(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in names_in(text)]
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers such as 2,4,8, not {text!r}") from None


def new_console() -> Console:
    """Create a console that never truncates tables: a narrow terminal wraps lines; files and pipes keep them whole."""
    return Console(width=max(Console().width, 160))


def ready_to_write(*files: Path | None) -> None:
    """Raise ConfigError if a file cannot be written, before minutes go into measuring its contents."""
    for file in files:
        if file is None:
            continue
        if not os.path.isdir(file.parent):
            raise ConfigError(f"cannot write {file}: there is no folder {file.parent}; make it first")
        try:
            existed = file.exists()
            file.open("a").close()
            if not existed:
                file.unlink()
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def sizes_between(minbytes: str, maxbytes: str, stepfactor: int) -> tuple[int, ...]:
    smallest, largest = parse_size(minbytes), parse_size(maxbytes)
    if not 0 < smallest <= largest:
        raise ConfigError(
            f"sizes must be at least 1 byte, the smallest first: --minbytes {minbytes} --maxbytes {maxbytes}"
        )
    sizes = []
    nbytes = smallest
    while nbytes <= largest:
        sizes.append(nbytes)
        nbytes *= stepfactor
    return tuple(sizes)


def device_name(device: Device) -> str:
    if device is not Device.AUTO:
        return device.value
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def world_sizes_of(text: str, device: str, running: int | None) -> list[int]:
    world_sizes = numbers_in(text, "--world-size")
    if any(number < 2 for number in world_sizes):
        raise ConfigError("a collective takes at least 2 ranks")
    if running is not None:
        if world_sizes not in ([], [running]):
            raise ConfigError(f"this job already has {running} ranks; leave out --world-size under torchrun")
        return [running]
    if device == "cpu":
        from shotcast.hardware.detect import available_cores

        return world_sizes or [min(8, max(2, available_cores()))]
    import torch

    count = torch.cuda.device_count()
    if count < max(world_sizes, default=2):
        raise ConfigError(f"{max(world_sizes, default=2)} CUDA ranks need as many GPUs; {count} are visible")
    return world_sizes or [count]


def node_shape(world_size: int) -> NodeShape:
    """Return the nodes and ranks that the job will have, as far as the environment says."""
    of_host = env.local_world_size() if env.job() else world_size
    of_node = env.ranks_per_node() or of_host
    return NodeShape(1, world_size) if world_size % of_node else NodeShape(world_size // of_node, of_node)


def command_line() -> str:
    """Return the command as results record it, with file names only because folders are machine-specific."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return shlex.join(["shotcast", *words])
