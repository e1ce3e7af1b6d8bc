"""Training steps (forward and backward) of a few layers of Llama, with gradients or activations summed under them.

    python research/training.py --set data,sharded,tensor [--world-size 2] [--json FILE]

``data``: every rank has its own tokens, and gradients are averaged in buckets: by DistributedDataParallel (DDP) over
the vendor library, at its default and with its options, and over the backend "shotcast". ``sharded``: the same by
FSDP2, whose ranks keep parts of the layers.
``tensor``: the ranks divide the layers; sums of activations are made one after the other, as Megatron overlaps them,
and by ``shotcast.overlap.ColumnParallelLinear`` and ``RowParallelLinear``.

The exposed communication of a form is its step less the step without communication. All forms of a set take turns in
rounds: a time is the median of a rank, and then the maximum over the ranks.

Before anything is timed, gradients are compared. The reference is the sum in the order of ranks, in float32, rounded
once (docs/reference/numerics.md). All gradients of divided layers without overlap have its bits; what DDP divides
before the sum, a library sums, or is multiplied in chunks, may be rounded otherwise, and ``off`` says by how much.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_timing import write
from rich.console import Console
from rich.table import Table
from training_forms import LIBRARY, NONE, OWN, Form, data_forms, sharded_forms, tensor_forms
from training_model import shape_of

import shotcast
from shotcast.bench import kernels
from shotcast.overlap.policy import Way, agreed, measure

DATA, SHARDED, TENSOR = "data", "sharded", "tensor"
_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""The most by which all gradients together may be off, relative to their size."""


@dataclass(frozen=True)
class Setting:
    """The setting of a measurement.

    Attributes:
        model: a preset, or ``tiny``.
        tokens: of a rank, in sequences of ``length``.
    """

    sets: tuple[str, ...]
    model: str
    layers: int
    tokens: int
    length: int
    device: str
    dtype: str
    rounds: int
    repeats: int


@dataclass(frozen=True)
class Row:
    """A form's time, and how far its gradients were off; or why there is none."""

    set: str
    form: str
    by: str
    step_us: float | None = None
    exposed_us: float | None = None
    off: float | None = None
    reason: str = ""


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", dest="sets", type=lambda text: tuple(text.split(",")), default=(DATA, SHARDED, TENSOR))
    parser.add_argument("--model", default="llama-3.1-8b", help="a preset, or tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=4, help="steps of a measurement")
    parser.add_argument("--timeout", type=float, default=570.0)
    parser.add_argument("--json", type=Path, help="the file for the results")
    return parser


FORMS = {DATA: data_forms, SHARDED: sharded_forms, TENSOR: tensor_forms}


# -- measurement ------------------------------------------------------------------------------------------------------


def tried(comm: shotcast.Communicator, form: Form, allowed: float) -> tuple[Callable[[], Any] | None, float, str]:
    """Return the step of a form and how far it is off, or why there is none. Collective.

    Raises:
        ArithmeticError: gradients of ours are wrong.
    """
    step, off, reason = None, 0.0, ""
    try:
        step, compare = form.build()
        off = compare()
        step()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        comm.check()
        if not off <= allowed:
            raise ArithmeticError(f"gradients are off by {off:.2g} of their size")
    except (RuntimeError, ValueError, ArithmeticError, shotcast.ShotcastError) as error:
        if form.by == OWN:
            raise
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"[:200]
    if agreed(comm, [1.0 if reason else 0.0])[0]:
        return None, off, reason or "it failed on another rank"
    return step, off, ""


def rows(setting: Setting) -> list[Row]:
    """Measure as one rank."""
    dtype = getattr(torch, setting.dtype)
    if setting.device == "cpu":
        torch.set_num_threads(1)
    found: list[Row] = []
    with shotcast.Communicator(device=setting.device, timeout_s=60) as comm:
        for name in setting.sets:
            shape = shape_of(setting.model, setting.layers, setting.tokens, setting.length, comm.world_size)
            checked = {form: tried(comm, form, _ALLOWED[dtype]) for form in FORMS[name](comm, shape, dtype)}
            ways = [
                Way(form.name, functools.partial(repeated, step, setting.repeats))
                for form, (step, _, _) in checked.items()
                if step is not None
            ]
            times = {way: time_us / setting.repeats for way, time_us in measure(comm, ways, setting.rounds).items()}
            for form, (step, off, reason) in checked.items():
                if step is None:
                    found.append(Row(name, form.name, form.by, reason=reason))
                else:
                    exposed_us = times[form.name] - times[NONE]
                    found.append(Row(name, form.name, form.by, times[form.name], exposed_us, off))
            del checked, ways
    return found


def repeated(step: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        step()


def sentences(found: Sequence[Row]) -> list[str]:
    """Return what is to be said: what was not measured, and our best form beside the library's best."""
    said = [f"{row.set}: {row.form}: not available: {row.reason}" for row in found if row.step_us is None]
    for name in dict.fromkeys(row.set for row in found):
        timed = [row for row in found if row.set == name and row.step_us is not None]
        best = {by: min((row for row in timed if row.by == by), key=lambda row: row.step_us or 0, default=None)
                for by in (OWN, LIBRARY)}  # fmt: skip
        own, library = best[OWN], best[LIBRARY]
        if own is None or library is None or own.step_us is None or library.step_us is None:
            continue
        less = 1 - (own.exposed_us or 0) / library.exposed_us if library.exposed_us and library.exposed_us > 0 else 0.0
        said.append(
            f"{name}: {own.form} takes {own.step_us / library.step_us:.3f} of {library.form}; "
            f"{less:.0%} less exposed communication"
        )
    return said


def main() -> None:
    asked = options().parse_args()
    names = ("sets", "model", "layers", "tokens", "length", "device", "dtype", "rounds", "repeats")
    setting = Setting(**{name: getattr(asked, name) for name in names})
    found = shotcast.spawn(rows, asked.world_size, setting, timeout_s=asked.timeout)[0]
    view = Table("set", "form", "step ms", "exposed ms", "off")
    for row in found:
        us = [row.step_us, row.exposed_us]
        times = [f"{one / 1e3:.2f}" if one is not None else "-" for one in us]
        view.add_row(row.set, row.form, *times, "" if row.off is None else f"{row.off:.2g}")
    screen = Console(width=120)
    screen.print(view)
    for sentence in sentences(found):
        screen.print(sentence, highlight=False)
    if asked.json:
        behind = kernels.of_collectives(asked.device)
        write(asked.json, [asdict(row) for row in found], behind, world_size=asked.world_size)


if __name__ == "__main__":
    main()
