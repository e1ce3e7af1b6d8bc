"""One size of one operation on one rank: tensors, the calls of all contenders on them, and what is right.

Inputs come from generators that any rank can run for any other, so the reference needs no communication that could be
wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shotcast.bench import baselines, contenders
from shotcast.bench.baselines import Call, NcclMemory, SymmetricMemoryOps
from shotcast.collectives.communicator import Communicator

FP8_TRANSPORT = "two_shot_fp8"
"""An algorithm, and the name of its sum, which is farther off than other sums."""

Reference = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By name of a value: what it should be, in float64, and how far off it may be."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank makes calls with; the last three are there when a contender needs them."""

    device: torch.device
    dtype: torch.dtype
    rank: int
    world_size: int
    group: dist.ProcessGroup
    comm: Communicator | None = None
    symmetric: SymmetricMemoryOps | None = None
    nccl_memory: NcclMemory | None = None

    def random(self, seed: int, rank: int, count: int) -> torch.Tensor:
        """Rank ``rank``'s input: uniform in -1..1, rounded to the dtype."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + rank)
        values = torch.empty(count, dtype=torch.float32, device=self.device)
        return values.uniform_(-1.0, 1.0, generator=generator).to(self.dtype)


class Case:
    """all_reduce, reduce_scatter or all_gather.

    Attributes:
        x: this rank's input.
    """

    def __init__(self, place: Place, op: str, nbytes: int, seed: int):
        self.place, self.op, self.nbytes, self._seed = place, op, nbytes, seed
        self._count = nbytes // place.dtype.itemsize
        self._part = self._count // place.world_size
        self.x = self._input(place.rank)

    def _input(self, rank: int) -> torch.Tensor:
        return self.place.random(self._seed, rank, self._part if self.op == "all_gather" else self._count)

    def restore(self) -> None:
        """Put the input back where work between calls wrote something else."""
        self.x.copy_(self._input(self.place.rank))

    def _new(self) -> torch.Tensor:
        """A tensor for the result."""
        count = self._part if self.op == "reduce_scatter" else self._count
        return torch.empty(count, dtype=self.place.dtype, device=self.place.device)

    def calls(self, names: Sequence[str]) -> list[Call]:
        """The calls of those contenders that take such a tensor."""
        place = self.place
        made = []
        # an all_gather goes by the size of its result
        whole = self._new() if self.op == "all_gather" else self.x
        legal = (*place.comm.candidates(whole, op=self.op), "auto") if place.comm is not None else ()
        for name in names:
            if contenders.is_own(name):
                if name in legal or name in contenders.FUSED:
                    made.append(self._own(name))
            elif baselines.serves(name, str(place.dtype).split(".")[-1], self.nbytes, place.world_size):
                made.append(self._other(name))
        return made

    def _own(self, name: str) -> Call:
        call = baselines.own(name, self.op, self.place.comm, self.x, self._new())
        if name != FP8_TRANSPORT:
            return call
        return dataclasses.replace(call, values=lambda: {FP8_TRANSPORT: call.results[0]})

    def _other(self, name: str) -> Call:
        if contenders.is_torch(name):
            assert self.place.symmetric is not None
            return self.place.symmetric.call(name, self.x, self._new())
        if name == contenders.NCCL_SYMMETRIC:
            assert self.place.nccl_memory is not None
            return self.place.nccl_memory.call(name, self.x)
        return baselines.library(name, self.op, self.place.group, self.x, self._new())

    def reference(self) -> Reference:
        """What this rank should get, and the error that any order of additions may make.

        With u the spacing of the dtype at 1, n ranks and every partial sum rounded to the dtype:
        ``|error| <= n * u * sum_r |x_r|``. Gathered data must be exact. FP8 transport rounds each part, and their sum,
        to e4m3 with the scale of its block: ``docs/reference/numerics.md`` has its bound, here with the largest value
        of all.
        """
        world_size = self.place.world_size
        if self.op == "all_gather":
            gathered = torch.cat([self._input(rank) for rank in range(world_size)]).double()
            return {"sum": (gathered, torch.zeros_like(gathered))}
        mine = slice(None)
        if self.op == "reduce_scatter":
            mine = slice(self.place.rank * self._part, (self.place.rank + 1) * self._part)
        expected = torch.zeros_like(self.x.reshape(-1)[mine], dtype=torch.float64)
        magnitude, transport_off = torch.zeros_like(expected), torch.zeros_like(expected)
        for rank in range(world_size):
            values = self._input(rank).reshape(-1)[mine].double()
            expected += values
            magnitude += values.abs()
            transport_off += _e4m3_off(values.abs())
        off = magnitude * (world_size * torch.finfo(self.place.dtype).eps)
        transport_off += _e4m3_off(expected.abs() + transport_off) + off
        return {"sum": (expected, off), FP8_TRANSPORT: (expected, transport_off)}


def _e4m3_off(values: torch.Tensor) -> torch.Tensor:
    """How far off non-negative values may be once they were e4m3, scaled so that the largest is 448."""
    return 1.001 * torch.maximum(values / 16, values.max() / (448 * 1024))
