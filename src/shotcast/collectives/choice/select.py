"""Choose an algorithm: by argument, environment, the sharing of the GPU, the user's or packaged table, or the model."""

from __future__ import annotations

from collections.abc import Sequence

from shotcast import wire
from shotcast.collectives.algorithm import FUSED, REDUCING, CollectiveProblem, Topology
from shotcast.collectives.choice.candidates import by_cells, candidates, fitted, keeps_bits, unsupported_reason
from shotcast.collectives.choice.choice import Candidate, Choice
from shotcast.collectives.choice.table import Table, with_sms
from shotcast.cost.collective import NVLINK4, SHARED_MEMORY, time_us
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.units import format_size
from shotcast.wire import Op

LOSSLESS = "lossless"
"""The name for ``auto`` without lossy algorithms, even if the communicator allows them."""
_BY_NAME = "it serves only calls that name it"
_MOST_IN_CELLS = 4 << 20
"""The longest message, in bytes, that ``auto`` reduces on GPUs as flag cells, which double its bytes.

According to benchmarks/data/h200, two-shot with twice the bytes takes 0.89 of NCCL's time at 4 MiB and 1.10 at 8 MiB on
2 H200, and 1.04 and 1.33 on 4.
"""


def choose(
    problem: CollectiveProblem,
    argument: str,
    environment: str,
    tables: Sequence[tuple[str, Table]],
    mode: str = "eager",
) -> Choice:
    """Choose an algorithm for ``problem``. All inputs are the same on all ranks, and so is the choice.

    Args:
        argument: the algorithm named in the call, ``"auto"`` or ``"lossless"``.
        environment: the algorithm that SHOTCAST_ALGORITHM names, or ``"auto"``; skipped if it is not legal. A lossy
            algorithm serves if ``argument`` or this names it; tables and the cost model select one only if the topology
            allows it, and never one marked ``by_name``.
        tables: (source, table), in lookup order.
        mode: ``"graph"`` for a call captured in a CUDA graph, else ``"eager"``.

    Raises:
        ConfigError: the call names an algorithm that is unknown or cannot serve it.
        UnsupportedError: no algorithm of the numerics contract serves the call, and the mode is batch-invariant.
    """
    algorithms = problem.topology.algorithms
    legal = {candidate.algorithm: candidate for candidate in candidates(problem)}
    if argument not in ("auto", LOSSLESS):
        if argument not in algorithms:
            known = f"there are auto, {LOSSLESS}, {', '.join(algorithms)}"
            raise ConfigError(f"{problem.op.label}: unknown algorithm {argument!r}; {known}")
        if argument not in legal:
            raise ConfigError(
                f"{argument} cannot serve this {problem.op.label} of {problem.dtype}, {format_size(problem.nbytes)}: "
                f"{unsupported_reason(problem, argument)}"
            )
        return Choice(legal[argument], "argument", "named in the call")
    if environment in legal:
        return Choice(legal[environment], "environment", "SHOTCAST_ALGORITHM")
    if all(algorithms[name].library for name in legal):
        return _the_library(problem, legal)
    passed = []
    if environment != "auto":
        passed.append(f"SHOTCAST_ALGORITHM is {environment}, but {unsupported_reason(problem, environment)}")
    if sharing := next((name for name in legal if _shares(problem, name)), ""):
        least = format_size(algorithms[sharing].forms[problem.op].shared_from)
        reason = f"it leaves the SMs to others, as calls from {least} on do, whatever tables have"
        return Choice(legal[sharing], "sharing", "; ".join((reason, *passed)))
    for number, (source, table) in enumerate(tables):
        op = problem.op
        row = table.lookup(op.label, problem.dtype, problem.nbytes, mode, problem.sms)
        tuned = row.launch if row else None
        for similar in FUSED.get(problem.op, ()):
            if row is None:
                # a table that is silent on a fused operation may know a similar one; its launch is of another kernel
                op = similar
                row = table.lookup(op.label, problem.dtype, problem.nbytes, mode)
        if row is None:
            continue
        if row.algorithm not in legal:
            passed.append(f"{table.name} has {row.algorithm}, but {unsupported_reason(problem, row.algorithm)}")
            continue
        if why := _not_taken(problem, row.algorithm, argument):
            passed.append(f"{table.name} has {row.algorithm}, but {why}")
            continue
        candidate = legal[row.algorithm]
        if tuned is not None and not algorithms[row.algorithm].library:
            candidate = Candidate(row.algorithm, fitted(problem, row.algorithm, tuned))
            if why := algorithms[row.algorithm].forms[problem.op].launch_unsupported_reason(problem, candidate.launch):
                passed.append(f"{table.name} has {row.algorithm}, but {why}")
                continue
        limit = "any size" if row.nbytes == float("inf") else f"up to {format_size(int(row.nbytes))}"
        other_mode = "" if row.mode == mode else f", by its {row.mode} rows, as it has none for {mode} calls"
        reason = "; ".join((f"{table.name}: {row.algorithm} for {limit}{other_mode}", *passed))
        return Choice(candidate, source, reason, (number, (row.mode, with_sms(op.label, row.sms), problem.dtype)))
    choice = _by_model(problem, legal, argument)
    return Choice(choice.candidate, choice.source, "; ".join((choice.reason, *passed)))


def _shares(problem: CollectiveProblem, name: str) -> bool:
    """Return whether ``auto`` selects an algorithm because the GPU also has other work."""
    topology, algorithm = problem.topology, problem.topology.algorithms[name]
    form = algorithm.forms.get(problem.op)
    least = form.shared_from if form is not None else 0
    return _beside_others(topology) and topology.shape.nodes == 1 and 0 < least <= problem.nbytes


def _beside_others(topology: Topology) -> bool:
    return topology.device == "cuda" and not topology.exclusive


def _not_taken(problem: CollectiveProblem, name: str, argument: str) -> str:
    """Return why ``auto`` may not select an algorithm, regardless of tables and cost model; empty if it may."""
    topology, algorithm = problem.topology, problem.topology.algorithms[name]
    if algorithm.by_name:
        return _BY_NAME
    form = algorithm.forms.get(problem.op)
    if form is not None and _beside_others(topology) and 0 < form.shared_to < problem.nbytes:
        return f"other communicators share the GPU, where it serves up to {format_size(form.shared_to)}"
    if algorithm.lossy and argument == LOSSLESS:
        return "it loses precision, and the call is to be lossless"
    return "allow_fp8 is not set" if algorithm.lossy and not topology.allow_fp8 else ""


def _the_library(problem: CollectiveProblem, legal: dict[str, Candidate]) -> Choice:
    """Return the choice if no native algorithm may serve, with all their reasons.

    Raises UnsupportedError if the library may not serve either.
    """
    algorithms = problem.topology.algorithms
    one_node = problem.topology.shape.nodes == 1
    serving = [one for one in algorithms.serving(problem.op) if not one.library]
    forms = {one.name: one.forms[problem.op] for one in serving}
    own = [name for name, form in forms.items() if not (one_node and form.between_nodes)]
    own = [name for name in own if forms[name].keeps_to_sms == bool(problem.sms)]
    why = dict.fromkeys(
        unsupported_reason(problem, name)
        or (_BY_NAME if algorithms[name].by_name else "")
        or f"{name} adds up in another order than the contract has over several nodes"
        for name in own
    )
    reason = "; ".join(why) or ("no own algorithm keeps to a number of SMs" if problem.sms else "no own algorithm")
    if problem.op in FUSED:
        reason += "; so the sum is a call of its own, and the norm follows it"
    library = next((name for name in legal if algorithms[name].library), None)
    if library is None:
        raise UnsupportedError(
            f"batch-invariant mode takes reductions that an algorithm of the numerics contract serves, at every size, "
            f"and not this {problem.op.label} ({problem.reduction}) of {problem.dtype}, "
            f"{format_size(problem.nbytes)}: {reason}"
        )
    return Choice(legal[library], "legality", reason)


def predicted_us(topology: Topology, op: Op, dtype: str, nbytes: int, name: str, sms: int = 0) -> float:
    """Predict an algorithm's time in microseconds with the cost model; ``sms`` limits the SMs, 0 for no limit."""
    link = NVLINK4 if topology.device == "cuda" else SHARED_MEMORY
    form = topology.algorithms[name].forms[op]
    sent = 2 * nbytes if by_cells(topology, dtype, form) else nbytes
    work = form.work(sent, topology.shape, wire.DTYPES.get(dtype, 1))
    return time_us(work, link, topology.network.cost, sms)


def _by_model(problem: CollectiveProblem, legal: dict[str, Candidate], argument: str) -> Choice:
    topology = problem.topology
    algorithms = topology.algorithms
    lossy = [name for name in legal if algorithms[name].lossy]
    own = [name for name in legal if keeps_bits(problem, name) and not algorithms[name].library] + lossy
    allowed = [name for name in own if not _not_taken(problem, name, argument)]
    if not allowed:
        return _the_library(problem, legal)
    if problem.nbytes > _MOST_IN_CELLS and problem.op in REDUCING and topology.device == "cuda":
        forms = {name: algorithms[name].forms[problem.op] for name in allowed}
        library = next((candidate for name, candidate in legal.items() if algorithms[name].library), None)
        if library and all(by_cells(topology, problem.dtype, form) for form in forms.values()):
            reason = (
                f"native kernels would send {problem.dtype} as flag cells, twice the bytes, and the vendor library is "
                f"faster beyond {format_size(_MOST_IN_CELLS)}"
            )
            return Choice(library, "cost model", reason)
    call = problem.op, problem.dtype, problem.nbytes
    times = {name: predicted_us(topology, *call, name, problem.sms) for name in own}
    best = min(allowed, key=times.__getitem__)
    reason = "predicted us: " + ", ".join(f"{name} {times[name]:.1f}" for name in allowed)
    if topology.network.name:
        reason += f", for {topology.shape} ranks over {topology.network.name} of {topology.network.cost}"
    fastest = min(own, key=times.__getitem__)
    if fastest not in allowed:
        reason += f"; {fastest} might do with {times[fastest]:.1f}, but {_not_taken(problem, fastest, argument)}"
    return Choice(legal[best], "cost model", reason)
