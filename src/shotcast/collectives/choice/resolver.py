"""Resolve the arguments of a call to a plan, bound to its kernels."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from shotcast import wire
from shotcast.collectives import fingerprints
from shotcast.collectives.algorithm import FUSED, CollectiveProblem, Topology
from shotcast.collectives.algorithms.copy_engines import COPY_ENGINES
from shotcast.collectives.arguments import sm_budget
from shotcast.collectives.choice.candidates import candidates, capacity, launch_unsupported_reason, unsupported_reason
from shotcast.collectives.choice.choice import Explanation
from shotcast.collectives.choice.select import LOSSLESS, choose
from shotcast.collectives.choice.table import MODES, Table
from shotcast.collectives.first_use import CompiledVariant
from shotcast.collectives.interface import BoundCall, Executor
from shotcast.collectives.reductions import Reduction, check_reduction, is_divided, reduction_name
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.units import format_size
from shotcast.wire import UNEVEN, CallPlan, LaunchShape, Norm, Op

Tables = tuple[tuple[str, Table], ...]
"""Tables with their sources, in lookup order."""

_MAKESHIFT_SMS = 16
"""The SMs of a call that runs in its current workspace instead of enlarging it."""
_DTYPE_NAMES = {getattr(torch, name): name for name in wire.DTYPES if hasattr(torch, name)}


class Handshake:
    """Header messages in both directions: the sender's, and the receiver's answer. A BoundCall.

    Neither end enters the library before the other has arrived with the same call. No other rank takes part. Answers
    are distinguishable from messages, so two ranks that both send first get an error instead of waiting in the library.
    ``own`` moves the header in the direction of this rank's data; ``answer`` moves it the other way.
    """

    def __init__(self, own: BoundCall, answer: BoundCall):
        self._in_turn = own, answer

    def run(self, *_: Any, **__: Any) -> None:
        """Exchange the headers; the tensors are untouched."""
        for bound in self._in_turn:
            bound.run(None, None)

    def load(self) -> None:
        """Compile or load what both directions need."""
        for bound in self._in_turn:
            bound.load()


@dataclasses.dataclass(slots=True)
class ResolvedCall:
    """A resolved call with its kernels. The communicator caches it, so that repeating the call costs one lookup."""

    plan: CallPlan
    by_library: bool  # the vendor library makes the call
    bound: BoundCall | None  # the plan, bound to its kernels; None where no executor takes part
    # the variants that must have been compiled on all ranks, each with a bound call that uses it: the call's own, and
    # that of the same call in a capture, which compiles nothing and may choose another. Empty once that is done
    needs: dict[CompiledVariant, BoundCall]
    # the longest message, in bytes, that the workspace must be laid out for, also if captured; 0 where any will do
    capacity: int
    label: str  # a name for profilers and errors
    is_makeshift: bool = False  # it is made once, as the workspace has no room for the call that would be made


@dataclasses.dataclass(slots=True)
class Resolver:
    """The decisions of one communicator, identical on all its ranks.

    Args:
        environment: the algorithm that SHOTCAST_ALGORITHM names.
        passed: why tables that exist are not among ``tables``.
        executor: binds plans to kernels; None if there are no native kernels, or only one rank.
        graphs: whether calls can be captured.
    """

    topology: Topology
    environment: str
    tables: Tables
    passed: tuple[str, ...]
    executor: Executor | None
    graphs: bool

    def within(self, max_bytes: int) -> Resolver:
        """Return the resolver for calls in a fixed workspace for messages of ``max_bytes``."""
        topology = dataclasses.replace(self.topology, max_bytes=max_bytes)
        return dataclasses.replace(self, topology=topology)

    def makeshift(self, problem: CollectiveProblem) -> tuple[CollectiveProblem, str]:
        """Return a problem in such a workspace, and its algorithm: few SMs if the library would serve it otherwise.

        The library might have to connect ranks first, which makes their hosts wait for each other.
        """
        few = dataclasses.replace(problem, sms=_MAKESHIFT_SMS)
        taken = choose(problem, "auto", self.environment, self.tables).candidate
        if self.topology.algorithms[taken.algorithm].library and not unsupported_reason(few, "few_sms"):
            return few, "few_sms"
        return problem, "auto"

    def problem(
        self,
        op: Op,
        dtype: torch.dtype | None,
        count: int,
        reduction: Reduction,
        root: int,
        sizes: tuple[int, ...],
        norm: Norm | None,
        sms: int | None = None,
    ) -> CollectiveProblem:
        """Describe a call on ``count`` elements as a problem; ``dtype`` is None for a call without data."""
        budget = sm_budget(sms, op.label)
        if dtype is None:
            return CollectiveProblem(op, 0, "uint8", self.topology)
        name = _DTYPE_NAMES.get(dtype)
        if name is None:
            raise UnsupportedError(f"{op.label}: dtype {dtype} is not served; {', '.join(wire.DTYPES)} are")
        reduction = reduction_name(reduction, op.label)
        check_reduction(name, reduction, f"{op.label}: ")
        if is_divided(name, reduction):
            reduction = "sum"
        nbytes, budget = count * dtype.itemsize, budget if self.topology.runs_grids else 0
        return CollectiveProblem(op, nbytes, name, self.topology, root, sizes, reduction, norm, budget)

    def named(self, problem: CollectiveProblem, algorithm: str, sms: int | None) -> str:
        """Return the name of a call's algorithm: copy engines for a call limited to no SM, if they can serve it."""
        free = algorithm in ("auto", LOSSLESS) and self.environment == "auto"
        without = sms == 0 and free and self.topology.runs_grids
        return COPY_ENGINES if without and not unsupported_reason(problem, COPY_ENGINES) else algorithm

    def resolve(
        self, problem: CollectiveProblem, algorithm: str, capturing: bool, launch: LaunchShape | None = None
    ) -> ResolvedCall:
        """Return a call for ``problem``; ``launch`` replaces the chosen launch.

        Raises ConfigError if the kernels do not support the launch, whether it comes from an argument, a table, or the
        description of an algorithm.
        """
        op, sizes, norm = problem.op, problem.sizes, problem.norm
        choice = choose(problem, algorithm, self.environment, self.tables, "graph" if capturing else "eager")
        candidate = choice.candidate
        # the root's field in the header is free where there is no root: it tells norms, and uneven parts, apart
        code = problem.root
        if op is Op.ALL_GATHER and sizes:
            code = UNEVEN
        elif norm is not None:
            code = norm.code
        shape = candidate.launch if launch is None else launch
        chosen = self.topology.algorithms[candidate.algorithm]
        if why := launch_unsupported_reason(self.topology.transport, chosen, shape):
            raise ConfigError(f"{op.label} by {candidate.algorithm} cannot be launched so: {why}")
        needed = capacity(problem, candidate.algorithm)
        made = op, candidate.algorithm, problem.dtype, problem.nbytes, code, sizes, shape, norm
        plan, by_library = CallPlan(*made, capacity=needed, reduction=problem.reduction), chosen.library
        how = "" if plan.reduction == "sum" else f" {plan.reduction}"
        label = f"shotcast.{op.label}{how} {plan.algorithm} {plan.dtype} {format_size(plan.nbytes)}"
        # a message is of two ranks, and headers of GPUs on several hosts are for all
        alone = self.topology.network.puts and op in (Op.SEND, Op.RECV)
        if self.executor is None or alone:
            return ResolvedCall(plan, by_library, None, {}, needed, label)
        names = self.executor.variants(plan)
        variants = [CompiledVariant(name) for name in names]
        bound: BoundCall = self.executor.bind(plan)
        if op in (Op.SEND, Op.RECV):
            other = dataclasses.replace(plan, op=Op.RECV if op is Op.SEND else Op.SEND)
            variants = [CompiledVariant(names[0], problem.root, self.executor.variants(other)[0])]
            if by_library:
                answer = dataclasses.replace(other, piece=wire.ANSWER)  # no message passes for one
                bound, name = Handshake(bound, self.executor.bind(answer)), f"handshake/{plan.dtype}"
                variants = [CompiledVariant(name, problem.root, name)]
        needs = dict.fromkeys(variants, bound)
        if self.graphs and not capturing and launch is None:
            captured = self.resolve(problem, algorithm, True)
            needs |= captured.needs
            needed = max(needed, captured.capacity)
        return ResolvedCall(plan, by_library, bound, needs, needed, label)

    def plans_of_sizes(self, like: CallPlan) -> dict[CompiledVariant, CallPlan]:
        """Return the plans, eager and captured, that calls like this one use at any size: one per variant."""
        executor, found = self.executor, dict[CompiledVariant, CallPlan]()
        assert executor is not None
        most, quads = self.topology.max_bytes, 16 * self.topology.world_size  # so that parts are multiples of 16 bytes
        sizes = (quads * part << bits for bits in range(most.bit_length()) for part in (2, 3))
        problem = CollectiveProblem(like.op, most, like.dtype, self.topology, like.root, reduction=like.reduction)
        fitting = itertools.takewhile(most.__ge__, sizes)
        asked = [(dataclasses.replace(problem, nbytes=nbytes), "auto") for nbytes in fitting]
        if executor.capacity < most:
            within = self.within(executor.capacity)
            asked.append(within.makeshift(dataclasses.replace(problem, topology=within.topology)))
        for (problem, algorithm), mode in itertools.product(asked, MODES):
            taken = choose(problem, algorithm, self.environment, self.tables, mode).candidate
            if not self.topology.algorithms[taken.algorithm].library:
                name, nbytes, needed = taken.algorithm, problem.nbytes, capacity(problem, taken.algorithm)
                plan = dataclasses.replace(like, algorithm=name, nbytes=nbytes, launch=taken.launch, capacity=needed)
                found |= {one: plan for one in map(CompiledVariant, executor.variants(plan)) if one not in found}
        return found

    def explain(
        self, x: torch.Tensor, op: str, algorithm: str, reduction: Reduction, mode: str, sms: int | None = None
    ) -> Explanation:
        """Return the explanation that :meth:`Communicator.explain` describes."""
        if not isinstance(op, str) or op.upper() not in Op.__members__:
            raise ConfigError(f"explain: unknown operation {op!r}; there are {', '.join(o.label for o in Op)}")
        asked = Op[op.upper()]
        if not isinstance(x, torch.Tensor):
            raise ConfigError(f"explain: x is a torch.Tensor, not {type(x).__name__}")
        kind = wire.LAYER if asked is Op.ALL_REDUCE_LAYER_NORM else wire.RMS
        norm = Norm(x.shape[-1] if x.dim() else 1, kind=kind) if asked in FUSED else None
        dtype = None if asked is Op.BARRIER else x.dtype
        # ranks that exchange parts of any sizes have to choose alike
        count = 0 if asked is Op.ALL_TO_ALL_UNEVEN else x.numel()
        problem = self.problem(asked, dtype, count, reduction, 0, (), norm, sms)
        if mode not in (MODES if self.graphs else ("eager",)):
            known = " or ".join(MODES) if self.graphs else "eager, as CPU ranks have no graphs"
            raise ConfigError(f"mode is {known}, not {mode!r}")
        choice = choose(problem, self.named(problem, algorithm, sms), self.environment, self.tables, mode)
        candidate, reason = choice.candidate, choice.reason
        if choice.source in ("packaged table", "cost model"):
            reason = "; ".join((reason, *self.passed))
        if choice.entry is not None:
            (number, key), topology = choice.entry, self.topology
            made_by = fingerprints.of_table(self.tables[number][1], key, topology.algorithms, topology.transport)
            reason += f"; {made_by}" if made_by else ""
        legal = tuple(candidate.algorithm for candidate in candidates(problem))
        size, taken = (problem.nbytes, problem.dtype), (candidate.algorithm, candidate.launch)
        by_library = self.topology.algorithms[candidate.algorithm].library
        executor = self.executor
        memory = (0, 0) if executor is None else (executor.held_bytes, executor.more_bytes(capacity(problem, taken[0])))
        gated = self.topology.device == "cuda" and not self.topology.exclusive and not by_library
        gated = gated and asked not in (Op.SEND, Op.RECV, Op.BARRIER)
        sms, invariant = problem.sms, self.topology.batch_invariant
        return Explanation(
            asked.label, *size, *taken, choice.source, reason, legal, mode, by_library, *memory, sms, invariant, gated
        )
