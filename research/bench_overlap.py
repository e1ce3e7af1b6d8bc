"""Products and messages one after the other and at once, beside other libraries, with their timelines::

    python research/bench_overlap.py --op all-gather --device cuda [--sets own,library,torch] --json FILE --plot PICTURE
    python research/bench_overlap.py --markdown --json FILE

The first form measures; the second prints results that were stored. Without ``--sets``, a chain and the library's plain
calls are measured, also on simulated hosts (as root, ``--hosts 2 --delay-us 5000``). :mod:`overlap_forms` has the sets.
"""

from __future__ import annotations

import itertools
import shlex
import sys
import time
from typing import Annotated, Any

import overlap_forms
import typer
from made_by import with_note
from overlap_bench import config as settings
from overlap_bench import measure, report, result
from simulated_hosts.facts import simulated

from shotcast.bench import kernels
from shotcast.bench.plot import check_format
from shotcast.cli.options import (
    Device,
    DeviceOption,
    Dtype,
    JsonFile,
    PlotFile,
    Seconds,
    Timeout,
    WorldSize,
    device_name,
    names_in,
    new_console,
    numbers_in,
    ready_to_write,
    with_groups,
    with_underscores,
    world_sizes_of,
)
from shotcast.errors import ConfigError
from shotcast.hardware.detect import detect
from shotcast.units import parse_size

app = typer.Typer(pretty_exceptions_enable=False)


def _sides(text: str) -> tuple[int, int, int]:
    try:
        rows, columns, depth = (int(side) for side in text.split("x"))
    except ValueError:
        raise ConfigError(f"--gemm takes three sides such as 8192x8192x8192, not {text!r}") from None
    return rows, columns, depth


def _sets(text: str) -> str:
    if others := [name for name in names_in(text) if name not in overlap_forms.SETS]:
        raise typer.BadParameter(f"sets are {', '.join(overlap_forms.SETS)}, not {', '.join(others)}")
    return text


@app.command()
@with_groups(simulated)
def bench_overlap(
    *,
    op: Annotated[
        str,
        typer.Option(
            "--op",
            callback=with_underscores,
            help="all-reduce, reduce-scatter, all-gather, all-to-all or reduce-scatter-all-gather.",
        ),
    ] = "all-reduce",
    size: Annotated[
        str,
        typer.Option("--size", help="Bytes of a message; several, such as 4K,64K. Default on CUDA: as the product."),
    ] = "",
    gemm: Annotated[
        str, typer.Option("--gemm", help="Rows, columns and depth of a product, such as 8192x8192x8192; or several.")
    ] = "",
    repeat: Annotated[
        int | None,
        typer.Option("--repeat", min=0, help="Products of a step; 0 (default on CPUs): as long as a message."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Products and messages.")] = 8,
    ratio: Annotated[
        float, typer.Option("--ratio", help="CUDA: the time of a message over that of the products, for its size.")
    ] = 1.0,
    whole: Annotated[
        bool, typer.Option("--whole", help="Communicate the product's result; of all-gather, its left operand.")
    ] = False,
    lanes: Annotated[int, typer.Option("--lanes", min=1, help="CPU: messages under way at once.")] = 1,
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU: threads of a rank.")] = 1,
    sms: Annotated[str, typer.Option("--sms", help="CUDA: numbers of SMs that messages are given.")] = "16,24,32",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measurements of each way.")] = 5,
    seconds: Seconds = 0.2,
    world_size: WorldSize = "",
    device: DeviceOption = Device.AUTO,
    dtype: Dtype = "",
    sets: Annotated[
        str, typer.Option("--sets", callback=_sets, help=f"Further forms: {', '.join(overlap_forms.SETS)}.")
    ] = "",
    simulated: Any,
    timeout: Timeout = 600.0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Measure nothing: print the results of --json.")] = False,
) -> None:
    """Measure chains of products and messages, or print their stored results."""
    if markdown:
        if json_file is None:
            raise typer.BadParameter("--markdown prints the results of --json")
        typer.echo(with_note(report.markdown(result.read(json_file)), [json_file]))
        return
    name = device_name(Device.CPU if simulated and device is Device.AUTO else device)
    products = [_sides(text) for text in names_in(gemm)] or [settings.GEMMS[name]]
    if repeat is None:
        repeat = 1 if name == "cuda" or whole else 0
    sizes = [parse_size(one) for one in names_in(size)] or [0 if name == "cuda" or whole else 64 << 10]
    numbers = [simulated.world_size] if simulated else world_sizes_of(world_size, name, None)
    if plot_file is not None:
        check_format(plot_file)
    ready_to_write(json_file, plot_file)
    screen = new_console()
    environment, command = detect().as_json(), shlex.join(["research/bench_overlap.py", *sys.argv[1:]])
    measured = []
    until = time.monotonic() + timeout
    for number, sides, nbytes in itertools.product(numbers, products, sizes):
        config = settings.OverlapConfig(
            op=op,
            device=name,
            dtype=dtype or ("float32" if name == "cpu" else "bfloat16"),
            world_size=number,
            nbytes=nbytes,
            gemm=sides,
            repeat=repeat,
            steps=steps,
            ratio=ratio,
            whole=whole,
            lanes=lanes,
            rounds=rounds,
            seconds=seconds,
            threads=threads,
            sms=tuple(numbers_in(sms, "--sms")),
            hosts=simulated,
            timeout_s=max(1.0, until - time.monotonic()),
        )
        measured.append(overlap_forms.run(config, names_in(sets)) if sets else measure.run(config))
        screen.print(report.table(measured[-1]))
        for sentence in report.sentences(measured[-1]):
            screen.print(sentence, highlight=False)
        if measured[-1].decision:
            screen.print(f"auto: {measured[-1].decision}")
        if json_file is not None:  # after each: it may take minutes, and the next may fail
            behind = kernels.of_collectives(name, simulated.hosts if simulated else 1)
            json_file.write_text(result.document(measured, environment, command, behind))
    if json_file is not None:
        screen.print(f"wrote {json_file}")
    if plot_file is not None:
        report.plot(measured, plot_file)
        screen.print(f"wrote {plot_file}")


if __name__ == "__main__":
    app()
