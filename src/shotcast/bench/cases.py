"""One size of one operation on one rank: its tensors, the calls of all implementations, and the reference.

The inputs come from generators that any rank can run for any other, so the reference needs no communication that might
itself be wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shotcast.bench import baselines, implementations
from shotcast.bench.baselines import BenchCall, SymmetricMemoryOps
from shotcast.bench.operations import OPERATIONS, ROOT, expected
from shotcast.collectives.algorithm import imported
from shotcast.collectives.choice.choice import Explanation
from shotcast.collectives.communicator import Communicator

Reference = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""The expected result of each named value in float64, and the error bound of its elements."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """A rank's device, group and communicators.

    ``comm`` and ``symmetric`` are None unless one of the measured implementations needs them.
    """

    device: torch.device
    dtype: torch.dtype
    rank: int
    world_size: int
    group: dist.ProcessGroup
    comm: Communicator | None = None
    symmetric: SymmetricMemoryOps | None = None

    def random(self, seed: int, rank: int, count: int) -> torch.Tensor:
        """Generate the input of rank ``rank``: uniform in -1..1, rounded to the dtype; integers are from 0 to 9."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + rank)
        if not self.dtype.is_floating_point:
            return torch.randint(10, (count,), generator=generator, device=self.device).to(self.dtype)
        values = torch.empty(count, dtype=torch.float32, device=self.device)
        return values.uniform_(-1.0, 1.0, generator=generator).to(self.dtype)


class Case:
    """The tensors, calls and reference of a plain operation; ``x`` is this rank's input."""

    def __init__(self, context: RankContext, op: str, nbytes: int, seed: int, reduction: str = "sum"):
        self.context, self.op, self.nbytes, self._seed, self.reduction = context, op, nbytes, seed, reduction
        self._operation = OPERATIONS[op]
        self._count = nbytes // context.dtype.itemsize
        self._part = self._count // context.world_size
        self.x = self._input(context.rank)

    def _input(self, rank: int) -> torch.Tensor:
        return self.context.random(self._seed, rank, self._part if self._operation.takes_part else self._count)

    def _new(self) -> torch.Tensor:
        count = self._part if self._operation.gives_part else self._count
        return torch.empty(count, dtype=self.context.dtype, device=self.context.device)

    def calls(self, names: Sequence[str]) -> list[BenchCall]:
        """Build the calls of the implementations that support this tensor."""
        context = self.context
        calls = []
        legal: tuple[str, ...] = ()
        if context.comm is not None:
            legal = (*self._explained("eager").candidates, implementations.AUTO)
        for name in names:
            if implementations.is_own(name):
                if name in legal:
                    calls.append(self._own(name))
            elif baselines.supports(name, context.dtype, self.nbytes, context.world_size, self.reduction):
                calls.append(self._other(name))
        return calls

    def _explained(self, mode: str) -> Explanation:
        assert self.context.comm is not None
        message = self._new() if self._operation.takes_part else self.x  # the size of gathered tensors is the result's
        return self.context.comm.explain(message, op=self.op, reduction=self.reduction, mode=mode)

    def chosen(self, mode: str) -> str:
        """Return the algorithm that ``auto`` selects for calls of a mode, ``graph`` or ``eager``."""
        return self._explained(mode).algorithm

    def _own(self, name: str) -> BenchCall:
        call = baselines.own_call(name, self.op, self.context.comm, self.x, self._new(), self.reduction)
        if name not in implementations.lossy_algorithms():
            return call
        return dataclasses.replace(call, values=lambda: {name: call.results[0]})

    def _other(self, name: str) -> BenchCall:
        if implementations.is_torch(name):
            assert self.context.symmetric is not None
            return self.context.symmetric.call(name, self.x, self._new())
        return baselines.library_call(name, self.op, self.context.group, self.x, self._new(), self.reduction)

    def reference(self) -> Reference:
        """Return this rank's expected result, and the largest error that any order of additions may cause.

        Both come from :func:`~shotcast.bench.operations.expected`. Each lossy algorithm has a separate value, with its
        documented error bound added. If only the root gets a result, other ranks have nothing.
        """
        rank, world_size = self.context.rank, self.context.world_size
        if self._operation.to_root and rank != ROOT:
            return {}
        value, bound = expected(self.op, self.reduction, rank, world_size, self._input)
        results = {"sum": (value, bound)}
        if not self._operation.reduces or self.reduction != "sum" or not self.context.dtype.is_floating_point:
            return results
        for name in implementations.lossy_algorithms():
            error_bound = imported(implementations.algorithms()[name].error_bound)
            inputs = (self._own_part(other).double() for other in range(world_size))
            results[name] = (value, bound + error_bound(inputs))
        return results

    def _own_part(self, rank: int) -> torch.Tensor:
        """Return the part of the input of ``rank`` that contributes to this rank's result."""
        values = self._input(rank).reshape(-1)
        return values.view(self.context.world_size, -1)[self.context.rank] if self._operation.gives_part else values
