"""From problem to choice. Order: argument, environment, the user's table, the packaged table, the cost model."""

from __future__ import annotations

from collections.abc import Sequence

from shotcast import wire
from shotcast.collectives.choice.candidates import PLAIN, candidates, fitted, keeps_bits, obstacle
from shotcast.collectives.choice.problem import Candidate, Choice, CollectiveProblem
from shotcast.collectives.choice.table import Table
from shotcast.cost.collective import NVLINK4, SHARED_MEMORY, collective_us
from shotcast.errors import ConfigError
from shotcast.units import format_size
from shotcast.wire import ALGORITHMS

_LOSSY = "two_shot_fp8"
_NOT_ALLOWED = "allow_fp8 is not set"


def choose(
    problem: CollectiveProblem,
    argument: str,
    environment: str,
    tables: Sequence[tuple[str, Table]],
    mode: str = "eager",
) -> Choice:
    """Choose for ``problem``. All inputs are the same on all ranks, and so is the outcome.

    Args:
        problem: the call.
        argument: algorithm named in the call, or ``"auto"``.
        environment: algorithm named by SHOTCAST_ALGORITHM, or ``"auto"``; passed over where it is not legal.
            An algorithm that loses precision serves where the call or this names it; tables and the cost model take it
            only where the topology allows it.
        tables: (source, table), the first to be asked first.
        mode: ``"graph"`` for a call captured in a CUDA graph, else ``"eager"``; what tables are looked up by.

    Raises:
        ConfigError: the call names an algorithm that is unknown or cannot serve it.
    """
    legal = {candidate.algorithm: candidate for candidate in candidates(problem)}
    if argument != "auto":
        if argument not in ALGORITHMS:
            raise ConfigError(f"unknown algorithm {argument!r}; there are auto, {', '.join(ALGORITHMS)}")
        if argument not in legal:
            raise ConfigError(
                f"{argument} cannot serve this {problem.op.label} of {problem.dtype}, {format_size(problem.nbytes)}: "
                f"{obstacle(problem, argument)}"
            )
        return Choice(legal[argument], "argument", "named in the call")
    if environment in legal:
        return Choice(legal[environment], "environment", "SHOTCAST_ALGORITHM")
    if list(legal) == ["vendor"]:
        return Choice(legal["vendor"], "legality", _why_vendor(problem))
    passed = []
    if environment != "auto":
        passed.append(f"SHOTCAST_ALGORITHM is {environment}, but {obstacle(problem, environment)}")
    for source, table in tables:
        row = table.lookup(problem.op.label, problem.dtype, problem.nbytes, mode)
        tuned = row.launch if row else None
        if row is None and problem.op in PLAIN:
            # a table that is silent on a fused operation may know the plain one; its launch is of another kernel
            row = table.lookup(PLAIN[problem.op].label, problem.dtype, problem.nbytes, mode)
        if row is None:
            continue
        if row.algorithm not in legal:
            passed.append(f"{table.name} has {row.algorithm}, but {obstacle(problem, row.algorithm)}")
            continue
        if row.algorithm == _LOSSY and not problem.topology.allow_fp8:
            passed.append(f"{table.name} has {_LOSSY}, but {_NOT_ALLOWED}")
            continue
        candidate = legal[row.algorithm]
        if tuned is not None and row.algorithm != "vendor":
            candidate = Candidate(row.algorithm, fitted(problem, row.algorithm, tuned))
        limit = "any size" if row.nbytes == float("inf") else f"up to {format_size(int(row.nbytes))}"
        of = "" if row.mode == mode else f", by its {row.mode} rows, as it has none for {mode} calls"
        return Choice(candidate, source, "; ".join((f"{table.name}: {row.algorithm} for {limit}{of}", *passed)))
    choice = _by_model(problem, legal)
    return Choice(choice.candidate, choice.source, "; ".join((choice.reason, *passed)))


def _why_vendor(problem: CollectiveProblem) -> str:
    names = [name for name in ALGORITHMS if name != "vendor"]
    why = dict.fromkeys(obstacle(problem, name) for name in names)
    said = "; ".join(text for text in why if not text.startswith("there is no ")) or "no own algorithm"
    return f"{said}; so the sum is a call of its own, and the norm follows it" if problem.op in PLAIN else said


def _by_model(problem: CollectiveProblem, legal: dict[str, Candidate]) -> Choice:
    place = problem.topology
    link = NVLINK4 if place.device == "cuda" else SHARED_MEMORY
    own = [name for name in legal if keeps_bits(problem, name) and name != "vendor"]
    own += [_LOSSY] * (_LOSSY in legal)
    allowed = [name for name in own if name != _LOSSY or place.allow_fp8]
    if not allowed:
        return Choice(legal["vendor"], "legality", _why_vendor(problem))
    op = PLAIN.get(problem.op, problem.op)
    item = wire.DTYPES.get(problem.dtype, 1)
    times = {name: collective_us(op.label, name, problem.nbytes, place.world_size, link, item) for name in own}
    best = min(allowed, key=times.__getitem__)
    reason = "predicted us: " + ", ".join(f"{name} {times[name]:.1f}" for name in allowed)
    if min(own, key=times.__getitem__) not in allowed:
        reason += f"; {_LOSSY} might do with {times[_LOSSY]:.1f}, but {_NOT_ALLOWED}"
    return Choice(legal[best], "cost model", reason)
