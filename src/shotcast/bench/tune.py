"""Finds what is fastest here for each size, and writes it down as a table (docs/guides/tuning.md).

At each size, for each way to make calls:

1. All algorithms, launched by default, are measured, twice.
2. Those within :data:`NEAR` of the fastest have their other launch shapes measured, briefly.
3. Each of these with its default and its :data:`FINALISTS` best shapes, and the vendor library, are measured again, and
   the fastest is chosen. What is not an own algorithm launched by default must be faster by :data:`GAIN`; and so must
   what differs from the choice at the size before (:func:`settled`), or a table would repeat the noise.

Measuring is :mod:`shotcast.bench.harness`: checked before timed and again after, the slowest rank's median. A candidate
that was wrong is reported and cannot be chosen. Every decision is a function of times gathered from all ranks, so all
ranks make the same one.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shotcast import env, wire
from shotcast.bench import harness
from shotcast.bench.baselines import Call
from shotcast.bench.cases import Case, Reference
from shotcast.bench.plan import BenchPlan
from shotcast.collectives.choice import table
from shotcast.collectives.choice.candidates import candidates, keeps_bits, launch_shapes
from shotcast.collectives.choice.problem import Candidate, CollectiveProblem
from shotcast.collectives.communicator import Communicator
from shotcast.errors import ConfigError, ShotcastError
from shotcast.hardware.detect import cpu_model
from shotcast.launcher.spawn import spawn
from shotcast.units import align_up, format_size
from shotcast.wire import LaunchShape, Op

OPS = ("all_reduce", "reduce_scatter", "all_gather")
NEAR = 1.3
FINALISTS = 2
GAIN = 1.03
_SHARES = (0.3, 0.3, 0.4)
"""Of the time for a size: to each of the three stages."""
_APPROXIMATE = ("two_shot_fp8",)
"""Never chosen by time alone: their results are off by more than an order of additions can explain."""

Measure = Callable[[Sequence[Candidate], float], Mapping[Candidate, float | None]]
"""Microseconds of each candidate, None for one whose result is wrong; the number is seconds to spend."""


@dataclass(frozen=True, slots=True)
class TunePlan:
    """What to tune; picklable, as it travels to the ranks.

    Attributes:
        sizes: bytes of the whole tensor, ascending. Where neighbours choose different algorithms, sizes between are
            measured too, until neighbours are within a factor of 2.
        modes: of :data:`shotcast.collectives.choice.table.MODES`; CPU ranks have ``eager`` only.
        seconds: for the timed calls of all candidates at one size; of each, at least
            :data:`shotcast.bench.plan.MIN_CALLS` are timed.
        any_bits: algorithms whose sums have other bits than the numerics contract says may be chosen.
        timeout_s: seconds for everything; then the ranks are ended.
    """

    ops: tuple[str, ...]
    device: str
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    modes: tuple[str, ...]
    seconds: float = 1.0
    any_bits: bool = False
    timeout_s: float = 1800.0
    progress: bool = False

    def __post_init__(self) -> None:
        for what, values, known in (
            ("op", self.ops, OPS),
            ("dtype", self.dtypes, wire.REDUCIBLE),
            ("mode", self.modes, table.MODES),
            ("device", (self.device,), ("cpu", "cuda")),
        ):
            if not values or not set(values) <= set(known):
                raise ConfigError(
                    f"tuning takes as {what} some of {', '.join(known)}, not {', '.join(values) or 'none'}"
                )
        if self.device == "cpu" and "graph" in self.modes:
            raise ConfigError("CPU ranks have no graphs; their mode is eager")
        if not self.sizes or min(self.sizes) < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ConfigError("message sizes start at 1 byte and ascend")
        if not self.seconds >= 0:
            raise ConfigError(f"seconds for a size start at 0, not {self.seconds}")
        if self.device == "cpu" and env.cpu_kernels() == "interpreter":
            raise ConfigError("interpreted kernels are for testing; unset SHOTCAST_CPU_KERNELS to tune CPU ranks")


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate and its time; ``by_default``: launched as it is without a table."""

    algorithm: str
    launch: LaunchShape
    by_default: bool
    time_us: float

    @property
    def written(self) -> tuple[str, LaunchShape | None]:
        """Algorithm and launch as a row of a table has them."""
        return self.algorithm, None if self.by_default else self.launch


@dataclass(frozen=True, slots=True)
class Choice:
    """What :func:`search` found: the candidate to take, the others of the last stage from the fastest on, and what was
    wrong."""

    best: Timed
    others: tuple[Timed, ...]
    wrong: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """The choice at one size."""

    mode: str
    op: str
    dtype: str
    nbytes: int
    choice: Choice

    @property
    def key(self) -> table.Key:
        return self.mode, self.op, self.dtype


# --- the search -------------------------------------------------------------------------------------------------------


def contenders(problem: CollectiveProblem, any_bits: bool) -> list[Candidate]:
    """Candidates that may be chosen, launched by default."""
    return [
        candidate
        for candidate in candidates(problem)
        if candidate.algorithm == "vendor"
        or keeps_bits(problem, candidate.algorithm)
        or (any_bits and candidate.algorithm not in _APPROXIMATE)
    ]


def search(
    problem: CollectiveProblem,
    measure: Measure,
    seconds: float,
    any_bits: bool = False,
    launches: Mapping[str, LaunchShape] | None = None,
) -> Choice:
    """Choose for one problem as the module says.

    Args:
        problem: what is called.
        measure: times candidates.
        seconds: for all of it.
        any_bits: as in :class:`TunePlan`.
        launches: shapes found before, by algorithm: then nothing but these is measured, and stage 2 falls away.

    Raises:
        ShotcastError: no candidate's results are right.
    """
    first = contenders(problem, any_bits)
    defaults = {candidate.algorithm: candidate.launch for candidate in first}
    if launches is not None:
        first = [Candidate(c.algorithm, launches.get(c.algorithm, c.launch)) for c in first]
    wrong: dict[Candidate, None] = {}

    def right(asked: Sequence[Candidate], share: float) -> dict[Candidate, float]:
        times = measure(asked, seconds * share) if asked else {}
        wrong.update((candidate, None) for candidate, time_us in times.items() if time_us is None)
        return {candidate: time_us for candidate, time_us in times.items() if time_us is not None}

    # twice, as one disturbed moment (the first calls of all find the GPU at rest) must not cost an algorithm its place
    times = right(first, _SHARES[0] / 2)
    again = right(list(times), _SHARES[0] / 2)
    times = {candidate: min(time_us, again[candidate]) for candidate, time_us in times.items() if candidate in again}
    if not times:
        raise ShotcastError(
            f"no algorithm gives right results for {problem.op.label} of {problem.dtype}, {format_size(problem.nbytes)}"
        )
    near = [c for c, time_us in times.items() if time_us <= NEAR * min(times.values()) or c.algorithm == "vendor"]
    finalists = list(near)
    if launches is None:
        shapes = [
            Candidate(c.algorithm, launch)
            for c in near
            for launch in launch_shapes(problem, c.algorithm)
            if launch != c.launch
        ]
        brief = right(shapes, _SHARES[1])
        for algorithm in dict.fromkeys(c.algorithm for c in near):
            fastest = sorted((c for c in brief if c.algorithm == algorithm), key=lambda c: brief[c])
            finalists += fastest[:FINALISTS]
        finalists.sort(key=lambda c: list(defaults).index(c.algorithm))
    final = right(finalists, _SHARES[2])
    if not final:
        raise ShotcastError(
            f"algorithms gave right results and then wrong ones for {problem.op.label} of {problem.dtype}, "
            f"{format_size(problem.nbytes)}"
        )
    timed = [Timed(c.algorithm, c.launch, c.launch == defaults[c.algorithm], us) for c, us in final.items()]
    return _decide(timed, tuple(wrong))


def _decide(timed: Sequence[Timed], wrong: tuple[Candidate, ...]) -> Choice:
    def handicapped(one: Timed) -> float:
        return one.time_us * (1.0 if one.by_default and one.algorithm != "vendor" else GAIN)

    best = min(timed, key=handicapped)
    others = sorted((one for one in timed if one is not best), key=lambda one: one.time_us)
    return Choice(best, tuple(others), wrong)


def settled(points: Sequence[Point]) -> list[Point]:
    """Points of each key by size, with a change from one size to the next only where it gains :data:`GAIN`."""
    before: dict[table.Key, Timed] = {}
    found = []
    for point in sorted(points, key=lambda point: point.nbytes):
        best, others, last = point.choice.best, point.choice.others, before.get(point.key)
        if last is not None and last.algorithm != "vendor":
            for one in others:
                if one.written == last.written and one.time_us <= GAIN * best.time_us:
                    rest = sorted((best, *(other for other in others if other is not one)), key=lambda t: t.time_us)
                    point = dataclasses.replace(point, choice=Choice(one, tuple(rest), point.choice.wrong))
                    break
        before[point.key] = point.choice.best
        found.append(point)
    keys = list(dict.fromkeys(point.key for point in points))
    return sorted(found, key=lambda point: keys.index(point.key))


# --- ranks ------------------------------------------------------------------------------------------------------------


class _Tuner(harness._Rank):
    """One rank's part: the harness, with candidates of one communicator for contenders."""

    def __init__(self, plan: TunePlan, comm: Communicator, group: dist.ProcessGroup, control: harness._Control):
        self.tuned = plan
        bench = BenchPlan(plan.ops[0], plan.device, plan.dtypes[0], plan.sizes)
        super().__init__(bench, (), comm.device, group, control)
        self.place = dataclasses.replace(self.place, comm=comm)
        self.comm = comm
        self._asked: list[Candidate] = []
        self._kept: _Case | None = None

    def points(self) -> list[Point]:
        plan = self.tuned
        found: list[Point] = []
        combinations = list(itertools.product(plan.ops, plan.dtypes, plan.modes))
        with harness._progress(plan.progress and self.control.rank == 0, len(combinations)) as advance:
            for op, dtype, mode in combinations:
                advance(f"{op}, {dtype}, {mode}")
                graph = {p.nbytes: p.choice for p in found if p.key == ("graph", op, dtype)} if mode == "eager" else {}
                found += self._sizes(op, dtype, mode, graph)
        return found

    def _sizes(self, op: str, dtype: str, mode: str, known: Mapping[int, Choice]) -> list[Point]:
        """All sizes of one key, and those between that decide where a row ends."""
        unit = wire.DTYPES[dtype] * (1 if op == "all_reduce" else self.control.world_size)
        found: dict[int, Point] = {}
        wanted = list(dict.fromkeys(align_up(size, unit) for size in self.tuned.sizes))
        while wanted:
            for nbytes in wanted:
                found[nbytes] = Point(mode, op, dtype, nbytes, self._choice(op, dtype, mode, nbytes, known.get(nbytes)))
            wanted = [
                align_up(low << round(math.log2(high / low) / 2), unit)
                for low, high in itertools.pairwise(sorted(found))
                if high > 2 * low and found[low].choice.best.algorithm != found[high].choice.best.algorithm
            ]
            wanted = [nbytes for nbytes in wanted if nbytes not in found]
        return [found[nbytes] for nbytes in sorted(found)]

    def _choice(self, op: str, dtype: str, mode: str, nbytes: int, known: Choice | None) -> Choice:
        self.place = dataclasses.replace(self.place, dtype=getattr(torch, dtype))
        self._kept = None  # before the next is made, as both may not fit
        self.plan = dataclasses.replace(
            self.plan, op=op, dtype=dtype, sizes=(nbytes,), eager=mode == "eager", warmup_iters=3
        )
        launches: dict[str, LaunchShape] | None = None
        if known is not None:
            # an eager call's kernel is that of a captured one: what differs is what the host adds
            launches = {}
            for one in sorted((known.best, *known.others), key=lambda one: one.time_us):
                launches.setdefault(one.algorithm, one.launch)
            launches[known.best.algorithm] = known.best.launch
        problem = CollectiveProblem(Op[op.upper()], nbytes, dtype, self.comm.topology)
        return search(problem, self._measure, self.tuned.seconds, self.tuned.any_bits, launches)

    def _measure(self, asked: Sequence[Candidate], seconds: float) -> dict[Candidate, float | None]:
        self._asked = list(asked)
        self.plan = dataclasses.replace(self.plan, budget_s=seconds / len(asked))
        rows = list(self._size(self.plan.sizes[0], seed=0))
        return {asked[int(row.algorithm)]: row.time_us for row in rows}

    def _case(self, nbytes: int, seed: int) -> Case:
        if self._kept is None:
            self._kept = _Case(self.place, self.plan.op, nbytes, seed)
        self._kept.asked = self._asked
        return self._kept


class _Case(Case):
    """One size, for all stages of its search: calls of the candidates asked for, and one reference."""

    asked: Sequence[Candidate] = ()
    _known: Reference | None = None

    def calls(self, names: Sequence[str]) -> list[Call]:
        return [self.call(str(number), candidate) for number, candidate in enumerate(self.asked)]

    def call(self, name: str, candidate: Candidate) -> Call:
        comm, op, out = self.place.comm, Op[self.op.upper()], self._new()
        assert comm is not None
        launch = None if candidate.algorithm == "vendor" else candidate.launch
        run = functools.partial(comm._run, op, self.x, out, algorithm=candidate.algorithm, launch=launch)
        return Call(name, run, lambda: None, self.x, (out,))

    def reference(self) -> Reference:
        if self._known is None:
            self._known = super().reference()
        return self._known


def measure(plan: TunePlan) -> tuple[str, list[Point]]:
    """One rank's part. Every rank returns the same: the part that a table is made for, and all points."""
    largest = align_up(plan.sizes[-1], max(wire.DTYPES[dtype] for dtype in plan.dtypes) * wire.MAX_WORLD_SIZE)
    comm = Communicator(device=plan.device, max_bytes=harness._workspace(plan.device, largest))
    with comm:
        if not comm.topology.kernels:
            raise ConfigError(f"there is nothing to tune: {comm.topology.obstacle}")
        group = dist.group.WORLD
        assert group is not None
        part = cpu_model() if plan.device == "cpu" else comm.topology.part
        return part, settled(_Tuner(plan, comm, group, harness._Control(group)).points())


def run(plan: TunePlan, world_size: int) -> tuple[str, list[Point]]:
    """Start ``world_size`` ranks and tune. Tables and overrides of the environment decide nothing meanwhile."""
    settings = {"SHOTCAST_TABLE": "", "SHOTCAST_ALGORITHM": ""}
    return spawn(measure, world_size, plan, timeout_s=plan.timeout_s, env=settings)[0]


def run_under_torchrun(plan: TunePlan) -> tuple[str, list[Point]]:
    """Tune with the ranks that are there already. All of them call this, and all get the points."""
    faulthandler.dump_traceback_later(plan.timeout_s, exit=True)  # nobody watches these ranks as spawn watches its own
    try:
        return measure(plan)
    finally:
        faulthandler.cancel_dump_traceback_later()
