"""The fault matrix: what may go wrong with a rank, on which path, in which operation, eager or in a graph.

``cells`` lists the cells that exist on a device, ``missing`` those that do not, with the reason. A cell becomes a
``Case`` by saying how exactly: ``usual`` takes the same for all cells, ``draws`` takes all of it at random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

FAULTS = ("late", "absent", "mismatched", "stopped", "killed")
"""A rank calls after the deadline, never calls, makes another call, is stopped by SIGSTOP, is killed by SIGKILL."""
PATHS = ("own", "vendor")
OPERATIONS = {
    "all_reduce": ("one_shot", "two_shot", "ring"),
    "all_reduce_int": ("one_shot", "two_shot"),
    "all_reduce_max": ("one_shot", "two_shot"),
    "reduce_scatter": ("one_shot", "ring"),
    "all_gather": ("one_shot", "ring"),
    "all_to_all": ("one_shot",),
    "all_to_all_uneven": ("one_shot",),
    "broadcast": ("one_shot",),
    "reduce": ("one_shot", "two_shot"),
    "gather": ("one_shot",),
    "scatter": ("one_shot",),
    "send": ("auto",),
    "recv": ("auto",),
    "barrier": ("auto",),
    "all_reduce_rms_norm": ("one_shot", "two_shot"),
}
"""Operations, with the algorithms by which native kernels serve them. In ``send`` the receiver is at fault, in ``recv``
the sender."""
MODES = ("eager", "graph")
FUSED = tuple(name for name in OPERATIONS if "_rms_norm" in name)
MESSAGES = ("send", "recv")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def label(operation: str) -> str:
    """Return the name that errors and ``explain`` give to an operation."""
    return operation.removesuffix("_int").removesuffix("_max")


DIFFERENCES = {
    "all_reduce": ("dtype", "nbytes", "op"),
    "all_reduce_int": ("dtype", "nbytes", "op", "reduction"),
    "all_reduce_max": ("reduction", "dtype", "nbytes", "op"),
    "reduce_scatter": ("dtype", "nbytes", "op"),
    "all_gather": ("dtype", "nbytes", "op"),
    "all_to_all": ("dtype", "nbytes", "op"),
    "all_to_all_uneven": ("dtype", "op"),
    "broadcast": ("root", "dtype", "nbytes", "op"),
    "reduce": ("root", "dtype", "nbytes", "op", "reduction"),
    "gather": ("root", "dtype", "nbytes", "op"),
    "scatter": ("root", "dtype", "nbytes", "op"),
    "send": ("dtype", "nbytes"),
    "recv": ("nbytes", "dtype"),
    "barrier": ("op",),
} | dict.fromkeys(FUSED, ("nbytes", "dtype", "op"))
"""Fields of the header in which a mismatched call of each operation may differ."""

_ANY, _FLOATS = ("float32", "bfloat16", "int32", "int64", "uint8"), ("float32", "float16", "bfloat16")
DTYPES = (
    dict.fromkeys(OPERATIONS, _FLOATS)
    | dict.fromkeys(("all_reduce_max", "all_gather", "all_to_all", "all_to_all_uneven", *ROOTED, *MESSAGES), _ANY)
    | {"all_reduce_int": ("int32", "int64", "uint8")}
)


def served_dtypes(operation: str, algorithm: str) -> list[str]:
    """Return the dtypes in which an algorithm serves an operation on every device; rings of GPUs move floats only."""
    return [dtype for dtype in DTYPES[operation] if algorithm != "ring" or dtype in _FLOATS]


KILLED_DEADLINE_S = 600.0
"""The deadline of cases in which a rank is killed: it must be named within a second nonetheless."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the matrix. ``inside``: the rank fails after calls were compared, before the library has its part."""

    fault: str
    path: str
    operation: str
    mode: str
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A cell with all that it leaves open.

    Attributes:
        victim: the rank at fault.
        algorithm: the one that the call names.
        count: elements that each rank has in the result or the message, or rows of a fused call.
        difference: the field in which a mismatched call differs.
        at_s: when the rank is killed or stopped, after the others have begun to call (or before).
        polls: the ranks call ``check`` again and again; otherwise they wait for the GPU and check then.
        ending: ``reset``: the call must work again after a reset; ``close``: the communicator is closed as it is;
            ``leave``: it is not even closed.
    """

    cell: Cell
    world_size: int
    victim: int
    deadline_s: float
    algorithm: str
    dtype: str
    count: int
    difference: str
    at_s: float
    polls: bool
    ending: str


def unsupported_reason(cell: Cell, device: str) -> str:
    """Return why a cell cannot exist on ``device``; empty if it can."""
    if cell.mode == "graph" and device == "cpu":
        return "CPU ranks have no graphs"
    if not cell.inside:
        return ""
    if cell.path == "own":
        return "a native kernel compares calls itself, so nothing lies between the comparison and its work"
    if cell.mode == "graph":
        return "the comparison and the library's work are one graph"
    if cell.fault in ("absent", "mismatched"):
        return f"a rank that is {cell.fault} does not get past the comparison"
    if cell.operation == "send":
        return "the library takes a message before its receiver has come, so the sender has no reason to wait"
    if cell.operation in ("reduce", "gather"):
        return "the library takes what goes to a root before that has come, so other ranks have no reason to wait"
    return ""


def _product() -> list[Cell]:
    parts = itertools.product(PATHS, MODES, OPERATIONS, (False, True), FAULTS)
    return [Cell(fault, path, operation, mode, inside) for path, mode, operation, inside, fault in parts]


def cells(device: str) -> list[Cell]:
    """Return every cell that exists, those of one path, mode and operation side by side, killed ranks last."""
    found = [cell for cell in _product() if not unsupported_reason(cell, device)]
    return sorted(found, key=lambda cell: (PATHS.index(cell.path), MODES.index(cell.mode), *_place(cell)))


def _place(cell: Cell) -> tuple[int, bool, bool]:
    return list(OPERATIONS).index(cell.operation), cell.fault == "killed", cell.inside


def missing(device: str) -> dict[str, int]:
    """Return the reasons for which cells do not exist, with the number of cells of each."""
    reasons: dict[str, int] = {}
    for cell in _product():
        if why := unsupported_reason(cell, device):
            reasons[why] = reasons.get(why, 0) + 1
    return reasons


def usual(cell: Cell, world_size: int, deadline_s: float, ending: str) -> Case:
    """Return the case that stands for a cell where each is run once."""
    algorithms = OPERATIONS[cell.operation] if cell.path == "own" else ("auto",)
    return Case(
        cell,
        world_size,
        world_size - 1,
        KILLED_DEADLINE_S if cell.fault == "killed" else deadline_s,
        algorithms[0],
        DTYPES[cell.operation][0],
        3 if cell.operation in FUSED else 1000,
        DIFFERENCES[cell.operation][0],
        0.1 if cell.fault == "killed" else -0.1,
        False,
        ending if cell.fault != "killed" else "close",
    )


def jobs(device: str, world_size: int, deadline_s: float) -> list[list[Case]]:
    """Return every cell once: those of an operation in one set of ranks, which a killed rank ends."""
    found: list[list[Case]] = []
    before: Cell | None = None
    for cell in cells(device):
        same = before is not None and replace(before, fault=cell.fault, inside=cell.inside) == cell
        if before is None or not same or before.fault == "killed":
            found.append([])
        found[-1].append(usual(cell, world_size, deadline_s, "reset"))
        before = cell
    return found


def draws(
    number: int, seed: int, device: str, world_sizes: Sequence[int], deadlines_s: tuple[float, float]
) -> list[Case]:
    """Return ``number`` random cases; faults and paths are as frequent as each other, whatever cells there are."""
    rng = random.Random(seed)
    existing = cells(device)
    return [_draw(rng, existing, world_sizes, deadlines_s) for _ in range(number)]


def _draw(
    rng: random.Random, existing: Sequence[Cell], world_sizes: Sequence[int], deadlines_s: tuple[float, float]
) -> Case:
    fault, path = rng.choice(FAULTS), rng.choice(PATHS)
    cell = rng.choice([cell for cell in existing if (cell.fault, cell.path) == (fault, path)])
    world_size = rng.choice(list(world_sizes))
    endings = ("close", "leave") if fault == "killed" else ("reset", "reset", "close", "leave")
    algorithm = rng.choice(OPERATIONS[cell.operation]) if path == "own" else "auto"
    return Case(
        cell,
        world_size,
        rng.randrange(world_size),
        KILLED_DEADLINE_S if fault == "killed" else round(rng.uniform(*deadlines_s), 2),
        algorithm,
        rng.choice(served_dtypes(cell.operation, algorithm)),
        rng.randrange(1, 20) if cell.operation in FUSED else int(20_000 ** rng.random()),
        rng.choice(DIFFERENCES[cell.operation]),
        round(rng.uniform(-0.1, 0.4), 2) if fault == "killed" else -0.1,
        rng.random() < 0.5,
        rng.choice(endings),
    )
