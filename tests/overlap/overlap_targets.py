"""What ranks do in the tests of overlap."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import shotcast
from shotcast.collectives import reference
from shotcast.overlap import chain

SIZES = (1000, 1, 40_000, 333)


def all_ways() -> dict[str, Any]:
    """Run a chain in each way; return the results, and what ``auto`` decided."""
    found: dict[str, Any] = {}
    with shotcast.Communicator(device="cpu") as comm, comm.split(0) as second:
        computations = [_computation(comm.rank, number) for number in range(len(SIZES))]
        for way in ("sequential", "plain", "auto"):
            one = chain((comm, second), computations, way=way)
            found[way] = [x.clone() for x in one()]
            found[f"{way} again"] = [x.clone() for x in one()]
            if way == "auto":
                found["decision"] = one.decision
            one.close()
        gathered = chain(comm, computations, lambda comm, x: comm.all_gather(x), way="plain")
        found["gathered"] = gathered()
        gathered.close()
    return found


def _computation(rank: int, number: int) -> Callable[[], torch.Tensor]:
    return lambda: inputs(rank, number)


def inputs(rank: int, number: int) -> torch.Tensor:
    return torch.randn(SIZES[number], generator=torch.Generator().manual_seed(100 * rank + number)).bfloat16()


def expected_sum(ranks: int, number: int) -> torch.Tensor:
    return reference.all_reduce([inputs(rank, number) for rank in range(ranks)], "one_shot")


def late_ranks(seconds: float) -> list[float]:
    """Run a chain of which each rank is late in another step; return the first value of each result."""
    with shotcast.Communicator(device="cpu") as comm:

        def computation(number: int) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                if number % comm.world_size == comm.rank:
                    time.sleep(seconds)
                return torch.full((3,), float(10**number * (comm.rank + 1)))

            return run

        one = chain(comm, [computation(number) for number in range(4)], way="plain")
        found = [float(x[0]) for x in one()]
        one.close()
        return found


def failing(step: str) -> str:
    """Run a chain in which rank 1 raises in a step; return what this rank gets."""
    with shotcast.Communicator(device="cpu", timeout_s=3) as comm:

        def computation() -> torch.Tensor:
            if step == "compute" and comm.rank == 1:
                raise ValueError("rank 1 cannot compute")
            return torch.ones(4)

        def communicate(comm: shotcast.Communicator, x: torch.Tensor) -> torch.Tensor:
            return comm.all_reduce(x[: 4 - comm.rank] if step == "communicate" else x)

        one = chain(comm, [lambda: torch.ones(4), computation], communicate, way="plain")
        try:
            one()
        except (ValueError, shotcast.ShotcastError) as error:
            return type(error).__name__
        finally:
            one.close()
        return "nothing"
