"""Find the fastest algorithm and launch for each size, and write a tuned table (docs/guides/tuning.md).

At each size, for each mode (eager or captured):

1. All algorithms are measured with their default launches, twice.
2. The other launch shapes of those within :data:`NEAR` of the fastest are measured briefly.
3. Each of these with its default and its :data:`FINALISTS` best shapes, and the vendor library, are measured again, and
   the fastest is chosen. Anything other than a native algorithm with its default launch must be faster by :data:`GAIN`.
   So must a choice that differs from the one at the previous size (:func:`settled`); otherwise the table would record
   noise.

:mod:`shotcast.bench.harness` does the measuring: it checks results before and after timing them, and reports the
slowest rank's median. A candidate with wrong results is reported and cannot be chosen. Each decision is a function of
times gathered from all ranks, so all ranks make the same one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shotcast import wire
from shotcast.bench import harness
from shotcast.bench.baselines import BenchCall
from shotcast.bench.cases import Case, Reference
from shotcast.bench.config import BenchConfig
from shotcast.bench.progress import progress
from shotcast.collectives.algorithm import LIBRARY, CollectiveProblem
from shotcast.collectives.choice import table
from shotcast.collectives.choice.candidates import candidates, keeps_bits, launch_shapes
from shotcast.collectives.choice.choice import Candidate
from shotcast.collectives.communicator import Communicator
from shotcast.errors import ConfigError, ShotcastError
from shotcast.hardware.detect import cpu_model
from shotcast.launcher.spawn import spawn
from shotcast.transport.registry import find
from shotcast.units import align_up, format_size
from shotcast.wire import LaunchShape, NodeShape, Op

OPS = ("all_reduce", "reduce_scatter", "all_gather")
NEAR = 1.3
FINALISTS = 2
GAIN = 1.03
_SHARES = (0.3, 0.3, 0.4)
"""Each of the three stages' share of the time for a size."""

Measure = Callable[[Sequence[Candidate], float], Mapping[Candidate, float | None]]
"""Measures candidates within a number of seconds: microseconds of each, None for one whose result is wrong."""


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """The calls to tune for. Picklable, since it is sent to the ranks."""

    ops: tuple[str, ...]
    device: str
    dtypes: tuple[str, ...]
    # bytes of the whole tensor, ascending. Where the choices of neighboring sizes differ, sizes between them are
    # measured too, until neighbors are within a factor of 2
    sizes: tuple[int, ...]
    modes: tuple[str, ...]  # of :data:`shotcast.collectives.choice.table.MODES`; CPU ranks have ``eager`` only
    # for the timed calls of all candidates at one size; of each candidate, at least
    # :data:`shotcast.bench.config.MIN_CALLS` calls are timed
    seconds: float = 1.0
    any_bits: bool = False  # algorithms whose sums differ in bits from the numerics contract may be chosen
    timeout_s: float = 1800.0  # seconds for everything; then the ranks are ended
    progress: bool = False
    # the numbers of SMs that calls are given; 0 for calls that are given none. The vendor library ignores the number,
    # so it is not compared where one of our algorithms respects it
    sms: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.sms or any(not 0 <= number <= wire.MAX_SMS for number in self.sms):
            raise ConfigError(f"sms to tune for are numbers from 1 to {wire.MAX_SMS}, not {self.sms}")
        if self.device == "cpu" and any(self.sms):
            raise ConfigError("sms are about SMs of GPUs; leave them out for CPU ranks")
        for name, values, known in (
            ("op", self.ops, OPS),
            ("dtype", self.dtypes, wire.REDUCIBLE),
            ("mode", self.modes, table.MODES),
            ("device", (self.device,), ("cpu", "cuda")),
        ):
            if not values or not set(values) <= set(known):
                raise ConfigError(f"{name} to tune must be among {', '.join(known)}, not {', '.join(values) or 'none'}")
        if self.device == "cpu" and "graph" in self.modes:
            raise ConfigError("CPU ranks have no graphs; their only mode is eager")
        if not self.sizes or min(self.sizes) < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ConfigError("message sizes must be at least 1 byte and ascend")
        if not self.seconds >= 0:
            raise ConfigError(f"seconds for a size cannot be negative: {self.seconds}")
        if self.device == "cpu" and find(self.device).serial:
            raise ConfigError("interpreted kernels are for testing; unset SHOTCAST_CPU_KERNELS to tune CPU ranks")


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate and its time. ``by_default`` marks the launch used without a table."""

    algorithm: str
    launch: LaunchShape
    by_default: bool
    time_us: float

    @property
    def written(self) -> tuple[str, LaunchShape | None]:
        """The algorithm and the launch in the notation of table rows."""
        return self.algorithm, None if self.by_default else self.launch


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """The result of :func:`search`.

    Holds the best candidate, the others of the last stage, fastest first, and the candidates with wrong results.
    """

    best: Timed
    others: tuple[Timed, ...]
    wrong: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class TunePoint:
    """The choice at one size, for calls limited to ``sms`` SMs (0: no limit)."""

    mode: str
    op: str
    dtype: str
    nbytes: int
    choice: TunedChoice
    sms: int = 0

    @property
    def key(self) -> table.Key:
        return self.mode, table.with_sms(self.op, self.sms), self.dtype


# --- the search -------------------------------------------------------------------------------------------------------


def eligible_candidates(problem: CollectiveProblem, any_bits: bool) -> list[Candidate]:
    """Return the candidates that may be chosen, with their default launches."""
    algorithms = problem.topology.algorithms
    legal = tuple(one for one in candidates(problem) if not algorithms[one.algorithm].by_name)
    if problem.sms and any(candidate.algorithm != LIBRARY for candidate in legal):
        legal = tuple(candidate for candidate in legal if candidate.algorithm != LIBRARY)
    return [
        candidate
        for candidate in legal
        if candidate.algorithm == LIBRARY
        or keeps_bits(problem, candidate.algorithm)
        or (any_bits and not algorithms[candidate.algorithm].lossy)
    ]


def search(
    problem: CollectiveProblem,
    measure: Measure,
    seconds: float,
    any_bits: bool = False,
    launches: Mapping[str, LaunchShape] | None = None,
) -> TunedChoice:
    """Choose a candidate for one problem, in the stages that the module describes. Raises ShotcastError if no candidate
    is correct.

    Args:
        seconds: for all stages together.
        launches: launch shapes found earlier, by algorithm; only these are then measured, and stage 2 is left out.
    """
    first = eligible_candidates(problem, any_bits)
    defaults = {candidate.algorithm: candidate.launch for candidate in first}
    if launches is not None:
        first = [Candidate(c.algorithm, launches.get(c.algorithm, c.launch)) for c in first]
    wrong: dict[Candidate, None] = {}

    def measure_right(requested: Sequence[Candidate], share: float) -> dict[Candidate, float]:
        times = measure(requested, seconds * share) if requested else {}
        wrong.update((candidate, None) for candidate, time_us in times.items() if time_us is None)
        return {candidate: time_us for candidate, time_us in times.items() if time_us is not None}

    # twice, so that one disturbance (such as an idle GPU at the first calls) does not eliminate an algorithm
    times = measure_right(first, _SHARES[0] / 2)
    again = measure_right(list(times), _SHARES[0] / 2)
    times = {candidate: min(time_us, again[candidate]) for candidate, time_us in times.items() if candidate in again}
    if not times:
        raise ShotcastError(
            f"no algorithm gives right results for {problem.op.label} of {problem.dtype}, {format_size(problem.nbytes)}"
        )
    near = [c for c, time_us in times.items() if time_us <= NEAR * min(times.values()) or c.algorithm == LIBRARY]
    finalists = list(near)
    if launches is None:
        shapes = [
            Candidate(c.algorithm, launch)
            for c in near
            for launch in launch_shapes(problem, c.algorithm)
            if launch != c.launch
        ]
        brief = measure_right(shapes, _SHARES[1])
        for algorithm in dict.fromkeys(c.algorithm for c in near):
            fastest = sorted((c for c in brief if c.algorithm == algorithm), key=lambda c: brief[c])
            finalists += fastest[:FINALISTS]
        finalists.sort(key=lambda c: list(defaults).index(c.algorithm))
    final = measure_right(finalists, _SHARES[2])
    if not final:
        raise ShotcastError(
            f"algorithms gave right results and then wrong ones for {problem.op.label} of {problem.dtype}, "
            f"{format_size(problem.nbytes)}"
        )
    timed = [Timed(c.algorithm, c.launch, c.launch == defaults[c.algorithm], us) for c, us in final.items()]
    return _decide(timed, tuple(wrong))


def _decide(timed: Sequence[Timed], wrong: tuple[Candidate, ...]) -> TunedChoice:
    def with_handicap(timed: Timed) -> float:
        return timed.time_us * (1.0 if timed.by_default and timed.algorithm != LIBRARY else GAIN)

    best = min(timed, key=with_handicap)
    others = sorted((other for other in timed if other is not best), key=lambda other: other.time_us)
    return TunedChoice(best, tuple(others), wrong)


def settled(points: Sequence[TunePoint]) -> list[TunePoint]:
    """Return the points of each key by size, without changes that gain too little.

    The choice changes from one size to the next only where that gains :data:`GAIN`.
    """
    before: dict[table.Key, Timed] = {}
    found = []
    for point in sorted(points, key=lambda point: point.nbytes):
        best, others, last = point.choice.best, point.choice.others, before.get(point.key)
        if last is not None and last.algorithm != LIBRARY:
            for other in others:
                if other.written == last.written and other.time_us <= GAIN * best.time_us:
                    rest = sorted((best, *(timed for timed in others if timed is not other)), key=lambda t: t.time_us)
                    point = dataclasses.replace(point, choice=TunedChoice(other, tuple(rest), point.choice.wrong))
                    break
        before[point.key] = point.choice.best
        found.append(point)
    keys = list(dict.fromkeys(point.key for point in points))
    return sorted(found, key=lambda point: keys.index(point.key))


# --- ranks ------------------------------------------------------------------------------------------------------------


class Tuner(harness.RankHarness):
    """The tuning harness of one rank, with candidates of one communicator as its implementations."""

    _sms = 0

    def __init__(self, config: TuneConfig, comm: Communicator, group: dist.ProcessGroup, control: harness.ControlGroup):
        self.tune_config = config
        bench = BenchConfig(config.ops[0], config.device, config.dtypes[0], config.sizes)
        super().__init__(bench, (), comm.device, group, control)
        self.context = dataclasses.replace(self.context, comm=comm)
        self.comm = comm
        self._requested: list[Candidate] = []
        self._cached: TuneCase | None = None

    def points(self) -> list[TunePoint]:
        config = self.tune_config
        found: list[TunePoint] = []
        combinations = list(itertools.product(config.ops, config.sms, config.dtypes, config.modes))
        total = sum(len(self._aligned_sizes(op, dtype)) for op, _, dtype, _ in combinations)
        with progress(total, config.progress and self.control.rank == 0) as advance:
            for op, sms, dtype, mode in combinations:
                self._sms, written = sms, table.with_sms(op, sms)
                key = "graph", written, dtype
                graph = {p.nbytes: p.choice for p in found if p.key == key} if mode == "eager" else {}
                begin = functools.partial(advance, f"{written}, {dtype}, {mode}")
                found += self._sizes(op, dtype, mode, graph, begin)
        return found

    def _sizes(
        self, op: str, dtype: str, mode: str, known: Mapping[int, TunedChoice], begin: Callable[[], None]
    ) -> list[TunePoint]:
        """Measure all sizes of one key, plus the sizes in between that determine where a row ends.

        ``begin`` is called for each of the configuration's sizes.
        """
        found: dict[int, TunePoint] = {}
        listed = wanted = self._aligned_sizes(op, dtype)
        while wanted:
            for nbytes in wanted:
                if nbytes in listed:
                    begin()
                choice = self._choice(op, dtype, mode, nbytes, known.get(nbytes))
                found[nbytes] = TunePoint(mode, op, dtype, nbytes, choice, self._sms)
            wanted = [
                align_up(low << round(math.log2(high / low) / 2), self._unit(op, dtype))
                for low, high in itertools.pairwise(sorted(found))
                if high > 2 * low and found[low].choice.best.algorithm != found[high].choice.best.algorithm
            ]
            wanted = [nbytes for nbytes in wanted if nbytes not in found]
        return [found[nbytes] for nbytes in sorted(found)]

    def _aligned_sizes(self, op: str, dtype: str) -> list[int]:
        unit = self._unit(op, dtype)
        return list(dict.fromkeys(align_up(size, unit) for size in self.tune_config.sizes))

    def _unit(self, op: str, dtype: str) -> int:
        """Return the bytes that a tensor's size must be a multiple of."""
        return wire.DTYPES[dtype] * (1 if op == "all_reduce" else self.control.world_size)

    def _choice(self, op: str, dtype: str, mode: str, nbytes: int, known: TunedChoice | None) -> TunedChoice:
        self.context = dataclasses.replace(self.context, dtype=getattr(torch, dtype))
        self._cached = None  # freed before the next is made, as both may not fit
        self.config = dataclasses.replace(
            self.config, op=op, dtype=dtype, sizes=(nbytes,), eager=mode == "eager", warmup_iters=3
        )
        launches: dict[str, LaunchShape] | None = None
        if known is not None:
            # an eager call runs the same kernel as a captured one; only the host's share differs
            launches = {}
            for timed in sorted((known.best, *known.others), key=lambda timed: timed.time_us):
                launches.setdefault(timed.algorithm, timed.launch)
            launches[known.best.algorithm] = known.best.launch
        problem = CollectiveProblem(Op[op.upper()], nbytes, dtype, self.comm.topology, sms=self._sms)
        return search(problem, self._measure, self.tune_config.seconds, self.tune_config.any_bits, launches)

    def _measure(self, requested: Sequence[Candidate], seconds: float) -> dict[Candidate, float | None]:
        self._requested = list(requested)
        self.config = dataclasses.replace(self.config, budget_s=seconds / len(requested))
        rows = list(self._size(self.config.sizes[0], seed=0))
        return {requested[int(row.algorithm)]: row.time_us for row in rows}

    def _case(self, nbytes: int, seed: int) -> Case:
        if self._cached is None:
            self._cached = TuneCase(self.context, self.config.op, nbytes, seed)
        self._cached.requested, self._cached.sms = self._requested, self._sms
        return self._cached


class TuneCase(Case):
    """One size for all stages of its search: calls of the requested candidates, and one shared reference."""

    requested: Sequence[Candidate] = ()
    sms = 0
    _known: Reference | None = None

    def calls(self, names: Sequence[str]) -> list[BenchCall]:
        return [self.call(str(number), candidate) for number, candidate in enumerate(self.requested)]

    def call(self, name: str, candidate: Candidate) -> BenchCall:
        comm, op, out = self.context.comm, Op[self.op.upper()], self._new()
        assert comm is not None
        launch = None if candidate.algorithm == LIBRARY else candidate.launch
        run = functools.partial(
            comm._run, op, self.x, out, algorithm=candidate.algorithm, launch=launch, sms=self.sms or None
        )
        return BenchCall(name, run, self.x, (out,))

    def reference(self) -> Reference:
        if self._known is None:
            self._known = super().reference()
        return self._known


def measure(config: TuneConfig) -> tuple[str, NodeShape, list[TunePoint]]:
    """Tune on this rank. Every rank returns the same: the table's hardware and ranks, and all points."""
    largest = align_up(config.sizes[-1], max(wire.DTYPES[dtype] for dtype in config.dtypes) * wire.MAX_WORLD_SIZE)
    comm = Communicator(device=config.device, max_bytes=harness.workspace_bytes(config.device, largest), exclusive=True)
    with comm:
        if comm.topology.unsupported_reason:
            raise ConfigError(f"there is nothing to tune: {comm.topology.unsupported_reason}")
        group = dist.group.WORLD
        assert group is not None
        part = cpu_model() if config.device == "cpu" else comm.topology.part
        return part, comm.topology.shape, settled(Tuner(config, comm, group, harness.ControlGroup(group)).points())


def run(config: TuneConfig, world_size: int) -> tuple[str, NodeShape, list[TunePoint]]:
    """Start ``world_size`` ranks and tune. Tables and environment overrides are ignored meanwhile."""
    settings = {"SHOTCAST_TABLE": "", "SHOTCAST_ALGORITHM": ""}
    return spawn(measure, world_size, config, timeout_s=config.timeout_s, env=settings)[0]
