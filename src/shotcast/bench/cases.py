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
from shotcast.bench.baselines import BenchCall, NcclMemory, SymmetricMemoryOps
from shotcast.collectives.algorithm import imported
from shotcast.collectives.communicator import Communicator

Reference = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""The expected result of each named value in float64, and the error bound of its elements."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """A rank's device, group and communicators.

    ``comm``, ``symmetric`` and ``nccl_memory`` are None unless one of the measured implementations needs them.
    """

    device: torch.device
    dtype: torch.dtype
    rank: int
    world_size: int
    group: dist.ProcessGroup
    comm: Communicator | None = None
    symmetric: SymmetricMemoryOps | None = None
    nccl_memory: NcclMemory | None = None

    def random(self, seed: int, rank: int, count: int) -> torch.Tensor:
        """Return the input of rank ``rank``: uniform in -1..1, rounded to the dtype."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + rank)
        values = torch.empty(count, dtype=torch.float32, device=self.device)
        return values.uniform_(-1.0, 1.0, generator=generator).to(self.dtype)


class Case:
    """The tensors, calls and reference of an all_reduce, reduce_scatter or all_gather.

    Attributes:
        x: this rank's input.
    """

    def __init__(self, context: RankContext, op: str, nbytes: int, seed: int):
        self.context, self.op, self.nbytes, self._seed = context, op, nbytes, seed
        self._count = nbytes // context.dtype.itemsize
        self._part = self._count // context.world_size
        self.x = self._input(context.rank)

    def _input(self, rank: int) -> torch.Tensor:
        return self.context.random(self._seed, rank, self._part if self.op == "all_gather" else self._count)

    def restore(self) -> None:
        """Restore the input after work between calls has overwritten it."""
        self.x.copy_(self._input(self.context.rank))

    def _new(self) -> torch.Tensor:
        """Return a new tensor for the result."""
        count = self._part if self.op == "reduce_scatter" else self._count
        return torch.empty(count, dtype=self.context.dtype, device=self.context.device)

    def calls(self, names: Sequence[str]) -> list[BenchCall]:
        """Return the calls of those implementations that take this tensor."""
        context = self.context
        calls = []
        # the size of an all_gather is that of its result
        message = self._new() if self.op == "all_gather" else self.x
        legal = (*context.comm.candidates(message, op=self.op), "auto") if context.comm is not None else ()
        for name in names:
            if implementations.is_own(name):
                if name in legal or name in implementations.FUSED:
                    calls.append(self._own(name))
            elif baselines.supports(name, str(context.dtype).split(".")[-1], self.nbytes, context.world_size):
                calls.append(self._other(name))
        return calls

    def _own(self, name: str) -> BenchCall:
        call = baselines.own_call(name, self.op, self.context.comm, self.x, self._new())
        if name not in implementations.lossy_algorithms():
            return call
        return dataclasses.replace(call, values=lambda: {name: call.results[0]})

    def _other(self, name: str) -> BenchCall:
        if implementations.is_torch(name):
            assert self.context.symmetric is not None
            return self.context.symmetric.call(name, self.x, self._new())
        if name == implementations.NCCL_SYMMETRIC:
            assert self.context.nccl_memory is not None
            return self.context.nccl_memory.call(name, self.x)
        return baselines.library_call(name, self.op, self.context.group, self.x, self._new())

    def reference(self) -> Reference:
        """Return the result that this rank should get, and the error that any order of additions may cause.

        With u the spacing of the dtype at 1, n ranks, and every partial sum rounded to the dtype: ``|error| <= n * u *
        sum_r |x_r|``. Gathered data must be exact. A lossy algorithm has a value of its own,
        with the error bound of its description added.
        """
        world_size = self.context.world_size
        if self.op == "all_gather":
            gathered = torch.cat([self._input(rank) for rank in range(world_size)]).double()
            return {"sum": (gathered, torch.zeros_like(gathered))}
        own_part = slice(None)
        if self.op == "reduce_scatter":
            own_part = slice(self.context.rank * self._part, (self.context.rank + 1) * self._part)
        expected = torch.zeros_like(self.x.reshape(-1)[own_part], dtype=torch.float64)
        magnitude = torch.zeros_like(expected)
        for rank in range(world_size):
            values = self._input(rank).reshape(-1)[own_part].double()
            expected += values
            magnitude += values.abs()
        bound = magnitude * (world_size * torch.finfo(self.context.dtype).eps)
        results = {"sum": (expected, bound)}
        for name in implementations.lossy_algorithms():
            error_bound = imported(implementations.algorithms()[name].error_bound)
            inputs = (self._input(rank).reshape(-1)[own_part].double() for rank in range(world_size))
            results[name] = (expected, bound + error_bound(inputs))
        return results
