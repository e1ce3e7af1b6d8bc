"""Every reduction of every dtype by compiled CPU ranks, compared with plain torch in rank order."""

from __future__ import annotations

import random

import pytest
import torch
from expected_results import reduced
from test_cpu_collectives import assert_bits, misaligned

from executor_calls import run_call
from local_ranks import run_ranks
from shotcast import wire
from shotcast.collectives.registry import registered
from shotcast.errors import UnsupportedError
from shotcast.transport.cpu.executor import CpuExecutor
from shotcast.wire import CallPlan, LaunchShape, Op

pytestmark = pytest.mark.usefixtures("compiled_before_forking")

EVERY = [(dtype, name) for dtype, names in wire.REDUCED.items() for name in names]


def contribution(rank: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return the input of ``rank``, which every rank can compute: integers of any bits, floats with special values."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    shape = (count, 2) if dtype.is_complex else (count,)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40])
    where = torch.rand(shape, generator=generator) < 0.2
    x = torch.where(where, special[torch.randint(len(special), shape, generator=generator)].double(), x)
    return torch.view_as_complex(x).to(dtype) if dtype.is_complex else x.to(dtype)


def as_reals(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def check_reductions(group, every):
    rank, world_size = group.rank, group.world_size
    executor = CpuExecutor(group, 1 << 20, 100.0, registered())
    together = random.Random(world_size)
    for seed, (name, reduction) in enumerate(every):
        dtype = getattr(torch, name)
        count = (1, 7, 33, 1001, 515)[(seed + world_size) % 5]
        inputs = [contribution(r, count, dtype, seed) for r in range(world_size)]
        wanted = reduced(inputs, reduction)
        for algorithm in ("one_shot", "two_shot"):
            x = misaligned(inputs[rank], together.choice((0, 1, 3)))
            out = x if together.random() < 0.5 else misaligned(torch.empty_like(x), together.choice((0, 1, 5)))
            launch = LaunchShape(chunk_bytes=together.choice((0, 1024)))
            plan = CallPlan(Op.ALL_REDUCE, algorithm, name, x.nbytes, launch=launch, reduction=reduction)
            run_call(executor, plan, x, out)
            assert executor.fault() is None
            assert_bits(as_reals(out), as_reals(wanted), (name, reduction, algorithm, count))
        inputs = [contribution(r, count * world_size, dtype, seed) for r in range(world_size)]
        out = misaligned(torch.empty(count, dtype=dtype), seed % 3)
        plan = CallPlan(Op.REDUCE_SCATTER, "one_shot", name, inputs[rank].nbytes, reduction=reduction)
        run_call(executor, plan, misaligned(inputs[rank], seed % 2), out)
        wanted = reduced(inputs, reduction)[rank * count : (rank + 1) * count]
        assert_bits(as_reals(out), as_reals(wanted), (name, reduction, "reduce_scatter", count))
    executor.close()


@pytest.mark.parametrize(("world_size", "part"), [(2, 0), (3, 1), (5, 2), (8, 3)])
def test_every_dtype_and_reduction(world_size, part):
    run_ranks(world_size, check_reductions, EVERY[part::4])


@pytest.mark.full
@pytest.mark.parametrize("world_size", range(2, 9))
def test_every_dtype_and_reduction_on_every_number_of_ranks(world_size):
    run_ranks(world_size, check_reductions, EVERY)


def check_refusals(group):
    executor = CpuExecutor(group, 1 << 20, 100.0, registered())
    for algorithm, dtype, reduction in (
        ("ring", "float32", "max"),
        ("ring", "int32", "sum"),
        ("two_shot", "float32", "bor"),
        ("one_shot", "int32", "avg"),
        ("one_shot", "complex64", "max"),
        ("one_shot", "float8_e4m3fn", "sum"),
    ):
        with pytest.raises(UnsupportedError, match=f"have no .*{dtype}"):
            executor.bind(CallPlan(Op.ALL_REDUCE, algorithm, dtype, 16, reduction=reduction)).load()
    executor.close()


def test_what_is_not_reduced_is_refused():
    run_ranks(2, check_refusals)
