"""Values of every operation, dtype and world size, compared with sums written out in rank order."""

from __future__ import annotations

import random
import time

import pytest
import torch

from executor_calls import run_call
from local_ranks import run_ranks
from shotcast.collectives.registry import registered
from shotcast.errors import UnsupportedError
from shotcast.transport.cpu.executor import CpuExecutor
from shotcast.wire import CallPlan, LaunchShape, Op, slice_bytes

pytestmark = pytest.mark.usefixtures("compiled_before_forking")

MAX_BYTES = 1 << 20
COUNTS = (0, 1, 2, 3, 7, 33, 1000, 4099)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALL_REDUCE = ("one_shot", "two_shot", "ring")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def contribution(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return the input of ``rank``, which every rank can compute: a wide range of magnitudes, with special values."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype is torch.bool else 100, (count,), generator=generator).to(dtype)
    x = torch.randn(count, generator=generator) * torch.exp(torch.randn(count, generator=generator) * 3)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-7, -6e-8, 1e-40, 65504.0, 3e38])
    where = torch.rand(count, generator=generator) < 0.05
    picked = special[torch.randint(len(special), (count,), generator=generator)]
    return torch.where(where, picked, x).to(dtype)


def misaligned(x: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a copy of x that starts ``offset`` elements into its storage."""
    return torch.cat([x.new_zeros(offset), x])[offset:]


def in_rank_order(inputs: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(inputs[0].shape)
    for x in inputs:
        total = total + x.float()
    return total.to(inputs[0].dtype)


def around_the_ring(inputs: list[torch.Tensor], owner: int) -> torch.Tensor:
    world_size, dtype = len(inputs), inputs[0].dtype
    partial = torch.zeros(inputs[0].shape, dtype=dtype)
    for hop in range(1, world_size + 1):
        partial = (partial.float() + inputs[(owner + hop) % world_size].float()).to(dtype)
    return partial


def ring_reference(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Sum slice j of the whole message from rank j + 1 around to rank j, independent of the chunks."""
    world_size, count, itemsize = len(inputs), inputs[0].numel(), inputs[0].element_size()
    part = slice_bytes(count * itemsize, world_size) // itemsize
    result = torch.empty_like(inputs[0])
    for owner in range(world_size):
        mine = slice(owner * part, (owner + 1) * part)
        result[mine] = around_the_ring([x[mine] for x in inputs], owner)
    return result


def assert_bits(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Assert that bits are equal; where NaN is expected, any NaN will do."""
    assert actual.shape == expected.shape, what
    if expected.dtype.is_floating_point and expected.dtype.itemsize <= 8 and expected.dtype.itemsize > 1:
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan), what
        actual, expected = actual[~nan], expected[~nan]
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), what


def check_reductions(group, dtype):
    rank, world_size = group.rank, group.world_size
    with_itemsize = dtype.itemsize
    executor = CpuExecutor(group, MAX_BYTES, 100.0, registered())
    shape = random.Random(7)
    for seed, count in enumerate((*COUNTS, 70_001, 30)):
        inputs = [contribution(r, count, dtype, seed) for r in range(world_size)]
        expected = in_rank_order(inputs)
        for algorithm in ALL_REDUCE:
            for chunk in (0, 1024) if count > 1000 else (0,):
                x = misaligned(inputs[rank], shape.choice((0, 1, 3)))
                in_place = shape.random() < 0.5
                out = x if in_place else misaligned(torch.empty_like(x), shape.choice((0, 1, 5)))
                launch = LaunchShape(chunk_bytes=chunk)
                plan = CallPlan(Op.ALL_REDUCE, algorithm, name(dtype), count * with_itemsize, launch=launch)
                run_call(executor, plan, x, out)
                assert executor.fault() is None
                reference = expected
                if algorithm == "ring" and world_size > 1:
                    reference = ring_reference(inputs)
                assert_bits(out, reference, (algorithm, count, chunk, in_place))
                if not in_place:
                    assert_bits(x, inputs[rank], "x was changed")
                if algorithm != "ring":
                    # The bits of NaN, too, are the same on all ranks.
                    digests = group.all_gather(hash(bytes(out.contiguous().view(torch.uint8).tolist())))
                    assert len(set(digests)) == 1

        inputs = [contribution(r, count * world_size, dtype, seed) for r in range(world_size)]
        mine = slice(rank * count, (rank + 1) * count)
        for algorithm in ("one_shot", "ring"):
            out = misaligned(torch.empty(count, dtype=dtype), seed % 3)
            plan = CallPlan(Op.REDUCE_SCATTER, algorithm, name(dtype), count * world_size * with_itemsize)
            run_call(executor, plan, misaligned(inputs[rank], seed % 2), out)
            expected = in_rank_order(inputs)
            if algorithm == "ring" and world_size > 1:
                expected = around_the_ring(inputs, rank)
            assert_bits(out, expected[mine], (algorithm, count))
    executor.close()


@pytest.mark.every(7)
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (1, torch.float16),
        *((2, dtype) for dtype in FLOATS),
        (3, torch.bfloat16),
        (4, torch.float32),
        (5, torch.float32),
        (8, torch.float16),
    ],
)
def test_reductions_are_exact_to_the_bit(world_size, dtype):
    run_ranks(world_size, check_reductions, dtype)


def check_copies(group, dtypes):
    rank, world_size = group.rank, group.world_size
    executor = CpuExecutor(group, MAX_BYTES, 100.0, registered())
    for seed, (dtype, count) in enumerate(
        (dtype, count) for dtype in dtypes for count in (0, 1, 3, 257, 40_003 // world_size)
    ):
        inputs = [contribution(r, count * world_size, dtype, seed) for r in range(world_size)]
        short = [x[:count] for x in inputs]
        itemsize, launch = dtype.itemsize, LaunchShape(chunk_bytes=(0, 512)[seed % 2])
        for algorithm in ("one_shot", "ring"):
            out = misaligned(torch.empty(count * world_size, dtype=dtype), seed % 3)
            plan = CallPlan(Op.ALL_GATHER, algorithm, name(dtype), count * world_size * itemsize, launch=launch)
            run_call(executor, plan, short[rank], out)
            assert torch.equal(out.view(torch.uint8), torch.cat(short).view(torch.uint8)), (dtype, count, algorithm)

            sizes = tuple(
                (0, count, 1, 2 * count // 3, 5, 0, 2, count)[r] if count else r % 2 for r in range(world_size)
            )
            parts = [contribution(r, sizes[r], dtype, seed) for r in range(world_size)]
            out = torch.empty(sum(sizes), dtype=dtype)
            plan = CallPlan(Op.ALL_GATHER, algorithm, name(dtype), sum(sizes) * itemsize, sizes=sizes, launch=launch)
            run_call(executor, plan, parts[rank], out)
            assert torch.equal(out.view(torch.uint8), torch.cat(parts).view(torch.uint8)), (dtype, sizes, algorithm)

        out = torch.empty(count * world_size, dtype=dtype)
        plan = CallPlan(Op.ALL_TO_ALL, "one_shot", name(dtype), count * world_size * itemsize, launch=launch)
        run_call(executor, plan, inputs[rank], out)
        expected = torch.cat([x.view(world_size, count)[rank] for x in inputs]) if count else out
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8)), (dtype, count)

        root = seed % world_size
        x = inputs[rank].clone()
        run_call(
            executor,
            CallPlan(Op.BROADCAST, "one_shot", name(dtype), x.numel() * itemsize, root=root, launch=launch),
            x,
            (x, None)[seed % 2],
        )
        assert torch.equal(x.view(torch.uint8), inputs[root].view(torch.uint8)), (dtype, count)
        run_call(executor, CallPlan(Op.BARRIER, "one_shot", "uint8", 0), None, None)
        run_call(executor, CallPlan(Op.ALL_REDUCE, "vendor", "int64", 800), None, None)
        assert executor.fault() is None
    executor.close()


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("world_size", "dtypes"),
    [
        (1, (torch.int64,)),
        (2, (torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex128)),
        (3, (torch.bfloat16, torch.uint8)),
        (5, (torch.float64, torch.int16)),
        (8, (torch.float16, torch.int32)),
    ],
)
def test_copies_are_exact_to_the_bit(world_size, dtypes):
    run_ranks(world_size, check_copies, dtypes)


def check_stragglers(group, max_bytes, seconds):
    """Run random operations, algorithms and sizes, with every rank late at times; a lost word gives a wrong sum."""
    rank, world_size = group.rank, group.world_size
    executor = CpuExecutor(group, max_bytes, 100.0, registered())
    together, alone = random.Random(1), random.Random(100 + rank)
    calls = 0
    until = time.monotonic() + seconds
    while True:
        if calls % 50 == 0 and group.all_gather(calls > 0 and time.monotonic() > until)[0]:
            break
        calls += 1
        count = together.choice((1, 5, 64, 1000, 3000, 20_000))
        chunk = together.choice((0, 64, 256, 4096))
        chunk = chunk if count <= 3000 or chunk == 4096 else 0
        launch = LaunchShape(chunk_bytes=chunk)
        base = torch.arange(count, dtype=torch.float32) % 97
        operation = together.choice(("reduce", "reduce", "gather", "broadcast", "scatter", "exchange"))
        x = base + (rank + calls)
        if alone.random() < 0.03:
            time.sleep(alone.random() * 0.003)
        if operation == "reduce":
            algorithm, in_place = together.choice(ALL_REDUCE), together.random() < 0.5
            out = x if in_place else torch.empty_like(x)
            run_call(executor, CallPlan(Op.ALL_REDUCE, algorithm, "float32", count * 4, launch=launch), x, out)
            expected = base * world_size + (sum(range(world_size)) + calls * world_size)
        elif operation == "gather":
            algorithm = together.choice(("one_shot", "ring"))
            out = torch.empty(count * world_size)
            plan = CallPlan(Op.ALL_GATHER, algorithm, "float32", out.numel() * 4, launch=launch)
            run_call(executor, plan, x, out)
            expected = torch.cat([base + (r + calls) for r in range(world_size)])
        elif operation == "broadcast":
            root = together.randrange(world_size)
            run_call(executor, CallPlan(Op.BROADCAST, "one_shot", "float32", count * 4, root=root, launch=launch), x, x)
            out, expected = x, base + (root + calls)
        elif operation == "scatter":
            algorithm = together.choice(("one_shot", "ring"))
            out = torch.empty(count)
            plan = CallPlan(Op.REDUCE_SCATTER, algorithm, "float32", count * world_size * 4, launch=launch)
            run_call(executor, plan, torch.cat([x + 3 * b for b in range(world_size)]), out)
            expected = base * world_size + (sum(range(world_size)) + (calls + 3 * rank) * world_size)
        else:
            out = torch.empty(count * world_size)
            plan = CallPlan(Op.ALL_TO_ALL, "one_shot", "float32", out.numel() * 4, launch=launch)
            run_call(executor, plan, torch.cat([x + 3 * b for b in range(world_size)]), out)
            expected = torch.cat([base + (r + calls + 3 * rank) for r in range(world_size)])
        assert executor.fault() is None, executor.fault()
        assert torch.equal(out, expected), (calls, operation, count, chunk, (out - expected).abs().max())
    assert executor.epoch == calls
    executor.close()
    return calls


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "max_bytes"),
    [
        pytest.param(2, 300_000, marks=pytest.mark.full),
        pytest.param(3, 1, marks=pytest.mark.full),
        pytest.param(4, 64 << 20, marks=pytest.mark.full),
        (8, 1),
    ],
)
def test_stragglers_and_changing_sizes(world_size, max_bytes):
    calls = run_ranks(world_size, check_stragglers, max_bytes, 2.0)
    assert min(calls) > 20


def check_epochs(group):
    executor = CpuExecutor(group, MAX_BYTES, 100.0, registered())
    for start in ((1 << 16) - 3, (1 << 31) - 3, (1 << 32) - 3, (1 << 48) - 3):
        group.barrier()
        executor.set_epoch(start)
        group.barrier()
        for call in range(6):
            x = torch.full((5,), float(group.rank + call))
            plan = CallPlan(Op.ALL_REDUCE, ALL_REDUCE[call % 3], "float32", 20)
            run_call(executor, plan, x, x)
            assert executor.fault() is None
            assert executor.epoch == start + call + 1
            assert executor.headers(executor.epoch)[group.rank] == registered().header(plan)
            assert x.tolist() == [sum(r + call for r in range(group.world_size))] * 5
    executor.close()


def test_epochs_beyond_16_31_32_and_48_bits():
    run_ranks(3, check_epochs)


def check_prepare(group):
    executor = CpuExecutor(group, MAX_BYTES, 100.0, registered())
    plan = CallPlan(Op.ALL_REDUCE, "one_shot", "float32", 4)
    executor.bind(plan).load()
    assert executor.bind(plan).call.schedule._loaded is not None
    for call in (
        CallPlan(Op.ALL_REDUCE, "one_shot", "float8_e5m2", 4),
        CallPlan(Op.ALL_TO_ALL, "ring", "float32", 8),
        CallPlan(Op.REDUCE_SCATTER, "two_shot", "float32", 8),
    ):
        with pytest.raises(UnsupportedError, match=call.op.label):
            executor.bind(call)
    # Equal plans that are different objects.
    for _ in range(3):
        for count in range(1, 2500):
            x = torch.ones(1)
            run_call(
                executor, CallPlan(Op.BROADCAST, "one_shot", "float32", 4, launch=LaunchShape(programs=count)), x, x
            )
    assert executor.fault() is None
    executor.close()
    executor.close()


@pytest.mark.full
def test_plans_are_prepared_once_and_unsupported_ones_refused():
    run_ranks(2, check_prepare)
