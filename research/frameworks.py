"""The scripts of examples/frameworks by the backend "shotcast" beside Gloo or NCCL: times, losses, tokens and bits.

    python research/frameworks.py --device cpu --world-size 2 --rounds 5 --json frameworks.json
    python research/frameworks.py --device cuda --world-size 2 --rounds 3 --json frameworks_x2.json

The scripts run unchanged in the same processes, by one backend after the other, in rounds. A time is the median of a
run (of a step of training, of a token), the largest over ranks, and the least over rounds, as others may use the cores.
Results are compared before any time is kept: with the library's, and, bit by bit, with those of the first round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from gpu_timing import write
from rich.console import Console
from rich.table import Table

import shotcast
from shotcast.bench import kernels

SCRIPTS = Path(__file__).parents[1] / "examples" / "frameworks"
OWN = "shotcast"
LOSSES, PARAMETERS, TOKENS = "losses", "parameters", "tokens"
EXACT = ("parameters", "placements", "results", "tokens", "states", "same")
"""The results that have the same bits on every run."""
_TIMES = ("step_ms", "token_ms")


@dataclass(frozen=True, slots=True)
class Case:
    """A script with its arguments."""

    name: str
    script: str
    arguments: tuple[str, ...]


_MODEL = ("--hidden", "512", "--tokens", "32")
CASES = (
    Case("DDP", "ddp", ("--steps", "100")),
    Case("DDP and ZeRO", "zero", ("--steps", "100")),
    Case("FSDP2", "fsdp2", ("--steps", "50")),
    Case("DTensor", "dtensor", ("--steps", "50")),
    Case("functional collectives, compiled", "functional_collectives", ("--steps", "50")),
    Case("Transformers", "transformers_generate", (*_MODEL, "--layers", "8")),
    Case("Transformers, compiled", "transformers_generate", (*_MODEL, "--layers", "2", "--compile", "1")),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A script by a backend, as one rank saw it.

    Attributes:
        values: what the rank has printed, by name.
        counts: how many calls each way of our backend has served, by operation; of all its groups.
    """

    values: dict[str, str]
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def numbers(self, name: str) -> list[float]:
        return [float(word) for word in self.values[name].split()]

    @property
    def time_ms(self) -> float | None:
        return next((float(self.values[name]) for name in _TIMES if name in self.values), None)

    @property
    def own_calls(self) -> int:
        return calls(self.counts)[0]

    def exact(self) -> dict[str, str]:
        return {name: self.values[name] for name in EXACT if name in self.values}


# -- in a rank --------------------------------------------------------------------------------------------------------

_numbers = itertools.count()
_stores: list[dist.Store] = []
_groups: list[dist.ProcessGroup | None] = []


def run(script: str, backend: str, *arguments: str) -> Run:
    """Run a script of examples/frameworks in this rank, as torchrun would. Collective."""
    _next_store()
    path = str(SCRIPTS / f"{script}.py")
    argv, printed = sys.argv, io.StringIO()
    sys.argv = [path, "--backend", backend, *arguments]
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))  # as Python does for a script
    try:
        with contextlib.redirect_stdout(printed), kept_groups(), counted() as counts:
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = argv
        if dist.is_initialized():
            dist.destroy_process_group()
    line = next((line for line in printed.getvalue().splitlines() if line.startswith("rank ")), "")
    pairs = (part.partition(" ") for part in line.partition(": ")[2].split(", ") if part)
    return Run({name: value for name, _, value in pairs}, counts)


def _next_store() -> None:
    """Give the next group of all ranks a store of its own, as each start of torchrun does."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ.setdefault("FIRST_STORE", os.environ["MASTER_PORT"]))
    key = f"store {next(_numbers)}"
    first = dist.TCPStore(host, port, is_master=False)
    if os.environ["RANK"] == "0":
        _stores.append(dist.TCPStore(host, 0, is_master=True, wait_for_workers=False))
        first.set(key, str(_stores[-1].port))
    os.environ["MASTER_PORT"] = first.get(key).decode()


@contextlib.contextmanager
def kept_groups() -> Iterator[None]:
    """Keep the groups of all ranks that are made inside, as long as this process lives.

    PyTorch destroys a group of Gloo with the interpreter's lock held, and waits for its threads, of which one may need
    the lock to give back the tensor of the last call.
    """
    initialise = dist.init_process_group

    def init_process_group(*args: Any, **options: Any) -> None:
        initialise(*args, **options)
        _groups.append(dist.group.WORLD)

    dist.init_process_group = init_process_group
    try:
        yield
    finally:
        dist.init_process_group = initialise


@contextlib.contextmanager
def counted() -> Iterator[dict[str, dict[str, int]]]:
    """Count the calls of the process groups that are made inside; the counts are there when it ends."""
    from shotcast.process_group.group import ShotcastProcessGroup

    made: list[ShotcastProcessGroup] = []
    initialise = ShotcastProcessGroup.__init__

    def __init__(self: ShotcastProcessGroup, *args: Any, **options: Any) -> None:  # noqa: N807
        initialise(self, *args, **options)
        made.append(self)

    counts: dict[str, dict[str, int]] = {}
    ShotcastProcessGroup.__init__ = __init__  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        ShotcastProcessGroup.__init__ = initialise  # type: ignore[method-assign]
        for group in made:
            for op, ways in group.counts().items():
                counts[op] = dict(Counter(counts.get(op, {})) + Counter(ways))


def runs(cases: list[tuple[str, str, tuple[str, ...]]]) -> list[Run]:
    """Run scripts one after the other as one rank: (script, backend, arguments) each."""
    return [run(script, backend, *arguments) for script, backend, arguments in cases]


# -- beside the library -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A script by both backends.

    Attributes:
        own_ms, library_ms: the time of each round.
        off: the largest relative difference of a loss from the library's.
        same_results: whether tokens and the like equal the library's; None where there are none.
        same_bits: whether all rounds by our backend had the same bits.
        counts: calls of rank 0 in one run, by operation and way.
    """

    name: str
    library: str
    own_ms: list[float]
    library_ms: list[float]
    off: float | None
    same_results: bool | None
    same_bits: bool
    counts: dict[str, dict[str, int]]


def off(one: Run, other: Run) -> float | None:
    """Return the largest relative difference of losses, or None where there are none."""
    if LOSSES not in one.values:
        return None
    pairs = zip(one.numbers(LOSSES), other.numbers(LOSSES), strict=True)
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)


def compared(name: str, library: str, own: list[list[Run]], others: list[list[Run]]) -> Row:
    """Return the row of a script, from its runs by round and rank.

    Raises:
        ArithmeticError: results are wrong.
    """
    bits = [[run.exact() | {LOSSES: run.values.get(LOSSES, "")} for run in ranks] for ranks in own]
    same_bits = all(one == bits[0] for one in bits)
    tokens = [[run.values.get(TOKENS) for run in ranks] for ranks in (own[0], others[0])]
    same_results = tokens[0] == tokens[1] if tokens[0][0] is not None else None
    difference = off(own[0][0], others[0][0])
    if not same_bits or same_results is False or (difference or 0.0) > 1e-3:
        raise ArithmeticError(f"{name}: same bits {same_bits}, same results {same_results}, losses off by {difference}")
    if not own[0][0].own_calls:
        raise ArithmeticError(f"{name}: no call went through native kernels: {own[0][0].counts}")
    times = [[max(run.time_ms or 0.0 for run in ranks) for ranks in by] for by in (own, others)]
    return Row(
        name,
        library,
        *times,
        difference,
        same_results,
        same_bits,
        own[0][0].counts,
    )


def measured(cases: list[Case], library: str, world_size: int, rounds: int, limit_s: float) -> list[Row]:
    """Run each case by both backends in turn, ``rounds`` times."""
    rows = []
    for case in cases:
        order = [(case.script, backend, case.arguments) for _ in range(rounds) for backend in (OWN, library)]
        by_rank = shotcast.spawn(runs, world_size, order, timeout_s=limit_s)
        by_run = [list(ranks) for ranks in zip(*by_rank, strict=True)]
        rows.append(compared(case.name, library, by_run[::2], by_run[1::2]))
    return rows


def ratios(own_ms: list[float], library_ms: list[float]) -> tuple[str, str]:
    """Return the library's least time over ours, and the smallest and the largest ratio of a round."""
    each = [b / a for a, b in zip(own_ms, library_ms, strict=True)]
    return f"{min(library_ms) / min(own_ms):.2f}x", f"{min(each):.2f} to {max(each):.2f}"


def calls(counts: Mapping[str, Mapping[str, int]]) -> tuple[int, int]:
    """Return how many calls our kernels have served, and how many the library."""
    own = sum(ways.get("own", 0) for ways in counts.values())
    return own, sum(sum(ways.values()) for ways in counts.values()) - own


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of a result."""
    lines = ["| | ratio | of rounds | losses off by | calls of ours | of the library |", "|---|---|---|---|---|---|"]
    for row in rows:
        ratio, of_rounds = ratios(row["own_ms"], row["library_ms"])
        difference = "the same tokens" if row["same_results"] else "" if row["off"] is None else f"{row['off']:.1g}"
        cells = [row["name"], ratio, of_rounds, difference, *map(str, calls(row["counts"]))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="which says Gloo or NCCL")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scripts", help="of the folder, divided by commas; all if left out")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for the runs of a script")
    parser.add_argument("--json", type=Path, help="the file for the results")
    parser.add_argument("--markdown", type=Path, help="print the table of a result file instead of measuring")
    return parser


def main() -> None:
    asked = options().parse_args()
    if asked.markdown:
        print(markdown(json.loads(asked.markdown.read_text())["rows"]))
        return
    chosen = [case for case in CASES if asked.scripts is None or case.script in asked.scripts.split(",")]
    library = "gloo" if asked.device == "cpu" else "nccl"
    if asked.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    found = measured(chosen, library, asked.world_size, asked.rounds, asked.timeout)
    names = ("ratio", "of rounds", "losses off", "same bits", "own calls", "others")
    table = Table("script", "shotcast ms", f"{library} ms", *names)
    for row in found:
        ms = [f"{min(times):.2f}" for times in (row.own_ms, row.library_ms)]
        ratio = ratios(row.own_ms, row.library_ms)
        difference = "" if row.off is None else f"{row.off:.1g}"
        table.add_row(row.name, *ms, *ratio, difference, str(row.same_bits), *map(str, calls(row.counts)))
    Console(width=140).print(table)
    if asked.json:
        behind = kernels.of_collectives(asked.device)
        write(asked.json, [asdict(row) for row in found], behind, world_size=asked.world_size)


if __name__ == "__main__":
    main()
