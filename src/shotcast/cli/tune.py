"""``shotcast tune``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shotcast import env
from shotcast.cli.options import (
    Device,
    DeviceOption,
    Force,
    MinBytes,
    command_line,
    device_name,
    dtypes_named,
    names_in,
    new_console,
    node_shape,
    numbers_in,
    ready_to_write,
    sizes_between,
    with_underscores,
    world_sizes_of,
)
from shotcast.errors import ConfigError


def tune(
    op: Annotated[
        str, typer.Option(callback=with_underscores, help="Operations, comma-separated.")
    ] = "all_reduce,reduce_scatter,all_gather",
    dtype: Annotated[
        str, typer.Option("-d", "--dtype", callback=dtypes_named, help="Dtypes, comma-separated.")
    ] = "bfloat16,float16,float32",
    mode: Annotated[
        str, typer.Option(help="graph, eager or both. Default: both on CUDA; CPU ranks only have eager.")
    ] = "",
    minbytes: MinBytes = "1K",
    maxbytes: Annotated[
        str, typer.Option("-e", "--maxbytes", help="The largest message. Default: 256M on CUDA, 16M on the CPU.")
    ] = "",
    stepfactor: Annotated[
        int,
        typer.Option(
            "-f",
            "--stepfactor",
            min=2,
            help="The factor between neighbouring sizes; sizes between them are added where the choice changes.",
        ),
    ] = 4,
    device: DeviceOption = Device.AUTO,
    world_size: Annotated[
        str,
        typer.Option("-g", "--world-size", help="The number of ranks. Default: every GPU, or one rank for each core."),
    ] = "",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds for the timed calls of all candidates at one size.")
    ] = 1.0,
    sms: Annotated[
        str,
        typer.Option(
            help="CUDA: tune calls that are given so many SMs (sms=), comma-separated. Default: none are given."
        ),
    ] = "",
    any_bits: Annotated[
        bool, typer.Option("--any-bits", help="Allow algorithms whose sums are rounded in another order (ring, ...).")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="The file to write. Default: the packaged table's name, such as nvidia_h200_x4.json."
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Keep the file's entries for other operations, dtypes and modes.")
    ] = False,
    force: Force = False,
    timeout: Annotated[float, typer.Option(help="Seconds for everything; then the ranks are ended.")] = 1800.0,
) -> None:
    """Measure which algorithms are fastest on this machine, and write them as a table for SHOTCAST_TABLE."""
    where = device_name(device)
    job = env.job()
    world_sizes = world_sizes_of(world_size, where, job.world_size if job else None)
    if len(world_sizes) > 1:
        raise ConfigError("a table is for one number of ranks; tune each number separately")
    from shotcast.bench import harness, tune_table
    from shotcast.bench import tune as tuning
    from shotcast.bench.machine_load import require_quiet
    from shotcast.collectives.choice import table
    from shotcast.hardware.detect import detect, nvidia_driver

    config = tuning.TuneConfig(
        ops=tuple(dict.fromkeys(names_in(op))),
        device=where,
        dtypes=tuple(dict.fromkeys(names_in(dtype))),
        sizes=sizes_between(minbytes, maxbytes or ("256M" if where == "cuda" else "16M"), stepfactor),
        modes=tuple(dict.fromkeys(names_in(mode))) or (("graph", "eager") if where == "cuda" else ("eager",)),
        seconds=seconds,
        any_bits=any_bits,
        timeout_s=timeout,
        progress=True,
        sms=tuple(dict.fromkeys(numbers_in(sms, "--sms"))) or (0,),
    )
    facts = detect()
    part = facts.gpus[0].name if where == "cuda" else facts.cpu_model
    shape = node_shape(world_sizes[0])
    file = output or Path(table.file_name(part, shape))
    writes = job is None or job.rank == 0
    merging = writes and merge and file.exists()
    # before time is spent on measuring
    if writes:
        ready_to_write(file)
    if merging:
        tune_table.mergeable(file.read_text(), str(file), part, shape)
    if job is None:
        require_quiet(world_sizes[0], force)
        measured, shape, points = tuning.run(config, world_sizes[0])
    else:
        with harness.ending_after(config.timeout_s):
            measured, shape, points = tuning.measure(config)
    if not writes:
        return
    command = command_line()
    facts_of_run = facts.as_json() | {"driver": nvidia_driver()}
    text = tune_table.document(
        measured, shape, points, device=where, environment=facts_of_run, command=command, seconds=seconds
    )
    if merging:
        text = tune_table.merged(file.read_text(), text, str(file))
    file.write_text(text)
    screen = new_console()
    screen.print(tune_table.view(points, shape, where))
    screen.print(f"wrote {file}; to use it: export SHOTCAST_TABLE={shlex.quote(str(file.resolve()))}", soft_wrap=True)
    if wrong := tune_table.wrong(points):
        errors = Console(stderr=True, soft_wrap=True)
        for line in wrong:
            errors.print(f"shotcast: {line}", style="red", markup=False)
        raise typer.Exit(1)
