"""Multicast on real GPUs, where PyTorch's allocator offers an address. Run with ``pytest -m gpu``; not run so far."""

from __future__ import annotations

import random

import pytest
import torch
from workers import FLOATS, SIGNALS, check, killed, straggle

import shotcast
from shotcast.collectives import reference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
WORLD_SIZES = [n for n in (2, 3, 4, 8) if n <= torch.cuda.device_count()]
COUNTS = [0, 1, 5, 64, 1000, 4099, 65536, 100_003, 1 << 20, 3_000_001]


def bound(xs: list[torch.Tensor]) -> torch.Tensor:
    """Return the error bound of a sum in the switch: N - 1 additions in float32 in any order, and one rounding."""
    total = torch.stack([x.double() for x in xs]).sum(0)
    size = torch.stack([x.double().abs() for x in xs]).sum(0)
    kind = torch.finfo(xs[0].dtype)
    rounding = kind.eps / 2 * total.abs() if xs[0].dtype != torch.float32 else 0.0
    return len(xs) * torch.finfo(torch.float32).eps / 2 * size * 1.01 + rounding + kind.smallest_subnormal


def sums_in_the_switch(repeats: int) -> int:
    """Check that multimem is within its bound, with equal bits on all ranks. Return 0 without a multicast address."""
    done = 0
    with shotcast.Communicator(device="cuda", timeout_s=60, max_bytes=32 << 20) as comm:
        if not comm.topology.multicast:
            return 0
        rng = random.Random(comm.rank)
        for dtype in FLOATS.values():
            for number, count in enumerate(COUNTS * repeats):
                generator = torch.Generator().manual_seed(number)
                xs = [torch.randn(count, generator=generator).to(dtype).to(comm.device) for _ in range(comm.world_size)]
                straggle(comm, rng)
                got = comm.all_reduce(xs[comm.rank], algorithm="multimem")
                exact = torch.stack([x.double() for x in xs]).sum(0)
                assert bool(((got.double() - exact).abs() <= bound(xs)).all()), (dtype, count)
                kind = torch.int16 if dtype.itemsize == 2 else torch.int32
                for theirs in comm.all_gather(got.view(kind)).view(comm.world_size, -1):
                    assert torch.equal(theirs, got.view(kind)), (dtype, count, "the ranks differ")
                check(comm.all_reduce(xs[comm.rank], algorithm="two_shot"), reference.ordered_sum(xs), (dtype, count))
                check(comm.all_gather(xs[comm.rank]), torch.cat(xs), (dtype, count))
                done += 1
        torch.cuda.synchronize()
        comm.check()
    return done


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sums_in_the_switch(world_size: int) -> None:
    done = shotcast.spawn(sums_in_the_switch, world_size, 3, timeout_s=300)
    if not any(done):
        pytest.skip("no multicast address here")
    assert done == [3 * 3 * len(COUNTS)] * world_size


def has_multicast() -> bool:
    with shotcast.Communicator(device="cuda", max_bytes=1 << 16) as comm:
        return comm.topology.multicast


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_killed_rank(world_size: int) -> None:
    if not all(shotcast.spawn(has_multicast, world_size)):
        pytest.skip("no multicast address here")
    victim = world_size - 1
    results = shotcast.spawn(
        killed, world_size, "cuda", "multimem", victim, SIGNALS["killed"], 600.0, timeout_s=25, return_exceptions=True
    )
    for outcome in results[:victim]:
        assert isinstance(outcome, dict), outcome
        assert outcome["error"].missing == (victim,)
        assert outcome["nan"]
