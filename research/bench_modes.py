"""Times of collectives as ``shotcast bench`` measures them, and in three more ways::

    python research/bench_modes.py all-reduce --between gemm -b 16K -e 1M -f 8 --json FILE
    python research/bench_modes.py all-gather --host -b 8K -e 8K
    python research/bench_modes.py all-reduce-rms-norm --hidden 8192 --tokens 1,8,64 --norm layer

``--between`` also times calls with a matrix product between them, ``--host`` the host time of a call instead of the
call's own time, and ``all-reduce-rms-norm`` an all-reduce, residual add and norm as one call: fused, as two kernels,
with NCCL or Gloo, and with FP8 output. It prints tables of :mod:`result_tables`, and exits with 1 if a result was
wrong, or a call of ours with ``out`` given allocated GPU memory.
"""

from __future__ import annotations

import enum
import shlex
import sys
from dataclasses import replace
from typing import Annotated, Any

import typer
from call_modes import harness, names
from call_modes.mode_config import ModeConfig
from call_modes.rows import CallRow, kernels_of
from result_tables import markdown_table

from shotcast import wire
from shotcast.bench import report
from shotcast.cli.bench import timing
from shotcast.cli.options import (
    JsonFile,
    MinBytes,
    WorldSize,
    device_name,
    node_shape,
    numbers_in,
    ready_to_write,
    sizes_between,
    with_groups,
    world_sizes_of,
)
from shotcast.errors import ConfigError
from shotcast.hardware.detect import detect

app = typer.Typer(pretty_exceptions_enable=False, no_args_is_help=True, help=__doc__)


class NormKind(enum.StrEnum):
    """Values of ``--norm``."""

    RMS = "rms"
    LAYER = "layer"


def modes(
    hidden: Annotated[int, typer.Option("--hidden", min=1, help="Elements of a row: the model's hidden size.")] = 8192,
    between: Annotated[
        str, typer.Option("--between", help="gemm also times calls with a product between: tokens x k by k x hidden.")
    ] = "",
    inner: Annotated[int, typer.Option("--gemm-k", min=0, help="k of the product. Default: hidden / ranks.")] = 0,
    host: Annotated[bool, typer.Option("--host", help="Measure the host time of a call.")] = False,
) -> dict[str, Any]:
    """Return the fields that :class:`ModeConfig` adds."""
    return locals()


def _command(op: str) -> None:
    @with_groups(timing, modes)
    def command(
        *,
        minbytes: MinBytes = "1K",
        maxbytes: Annotated[str, typer.Option("-e", "--maxbytes")] = "4M",
        stepfactor: Annotated[int, typer.Option("-f", "--stepfactor", min=2)] = 4,
        world_size: WorldSize = "",
        reduction: Annotated[str, typer.Option("-o", "--op", "--reduction")] = "sum",
        timing: dict[str, Any],
        modes: dict[str, Any],
        json_file: JsonFile = None,
    ) -> None:
        sizes = sizes_between(minbytes, maxbytes, stepfactor)
        facts = _on_device(timing) | modes | {"hidden": modes["hidden"] if modes["between"] else 0}
        _measure(ModeConfig(op=op, sizes=sizes, reduction=reduction, **facts), world_size, json_file)

    app.command(op.replace("_", "-"))(command)


for _op in names.OPERATIONS:
    _command(_op)


@app.command("all-reduce-rms-norm")
@with_groups(timing, modes)
def fused(
    *,
    norm: Annotated[NormKind, typer.Option("--norm", help="RMSNorm, or LayerNorm with a bias.")] = NormKind.RMS,
    tokens: Annotated[str, typer.Option("--tokens", help="Rows of the tensor.")] = "1,2,4,8,16,32,64,128,256,512",
    world_size: WorldSize = "",
    timing: dict[str, Any],
    modes: dict[str, Any],
    json_file: JsonFile = None,
) -> None:
    """Time all-reduce, residual add and norm as one call."""
    facts = _on_device(timing) | modes
    counts = numbers_in(tokens, "--tokens")
    if not counts or min(counts) < 1:
        raise ConfigError(f"--tokens takes whole numbers of at least 1 such as 1,8,64, not {tokens!r}")
    item = wire.DTYPES.get(facts["dtype"], 1)  # ModeConfig refuses an unknown dtype
    sizes = tuple(count * modes["hidden"] * item for count in sorted(counts))
    _measure(ModeConfig(op=f"all_reduce_{norm}_norm", sizes=sizes, **facts), world_size, json_file)


def _on_device(facts: dict[str, Any]) -> dict[str, Any]:
    name = device_name(facts["device"])
    return facts | {"device": name, "dtype": facts["dtype"] or ("float32" if name == "cpu" else "bfloat16")}


def _measure(config: ModeConfig, world_size: str, json_file: Any) -> None:
    ready_to_write(json_file)
    rows: list[CallRow] = []
    for number in world_sizes_of(world_size, config.device, None):
        measured = harness.run(replace(config, nodes=node_shape(number).nodes), number)
        if not measured:
            raise ConfigError(f"none of the algorithms serves {config.op} of {config.dtype} between {number} ranks")
        rows += measured
        for measure in config.measures:
            print(f"{config.op}, {number} {config.device} ranks, {measure}")
            print(markdown_table([row for row in measured if row.measure in ("call", measure)], measure=measure))
    if json_file is not None:
        command = shlex.join(["research/bench_modes.py", *sys.argv[1:]])
        made_by = kernels_of(rows)
        result = report.Result.now(rows, environment=detect().as_json(), command=command, kernels=made_by)
        report.write(json_file, result)
    if any(row.errors for row in rows):
        print("some results were wrong", file=sys.stderr)
        raise typer.Exit(1)
    if allocating := [row.algorithm for row in rows if row.allocations and names.is_own(row.algorithm)]:
        allocated = ", ".join(dict.fromkeys(allocating))
        print(f"calls with out given allocated GPU memory: {allocated}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
