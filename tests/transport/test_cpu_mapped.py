"""Calls on tensors that all ranks map: values and bits, what is staged, ranks that differ, and ranks that are late."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time

import pytest
import torch

from executor_calls import run_call
from local_ranks import DEAD, LocalGroup, run_ranks
from shotcast.collectives.registry import registered
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.executor import CpuExecutor
from shotcast.transport.cpu.mapped import LEAST_BYTES, PIECE_BYTES
from shotcast.wire import DEAD as ENDED
from shotcast.wire import MISMATCH, TIMEOUT, CallPlan, Op

pytestmark = pytest.mark.usefixtures("compiled_before_forking")

MAX_BYTES = 1 << 20
COUNTS = (1, 16_385, 70_001)
"""Elements of a rank's part: below the least bytes that are not staged, about there, and pieces that are not whole."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64)
STAGED = 0xA5


def contribution(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (count,), generator=generator).to(dtype)
    return (torch.randn(count, generator=generator) * torch.exp(torch.randn(count, generator=generator))).to(dtype)


def summed(count: int, dtype: torch.dtype, ranks: int) -> torch.Tensor:
    """Return the sum in rank order, in float32 rounded once; in the dtype itself where it is wider or exact."""
    between = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = torch.zeros(count, dtype=between)
    for rank in range(ranks):
        total = total + contribution(rank, count, dtype).to(between)
    return total.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def mapped_or_not(executor: CpuExecutor, mapped: bool, x: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Return a copy of x, ``offset`` elements into a tensor that all ranks map or that they do not."""
    found = executor.empty((x.numel() + offset,), x.dtype) if mapped else torch.empty(x.numel() + offset, dtype=x.dtype)
    assert found is not None
    return found[offset:].copy_(x)


def staging(executor: CpuExecutor) -> ctypes.Array:
    address = executor._regions[executor._rank] + layout.CONTROL_BYTES
    return (ctypes.c_ubyte * (2 * executor._generation)).from_address(address)


def is_staged(executor: CpuExecutor) -> bool:
    return set(bytes(staging(executor))) != {STAGED}


def clear_staging(executor: CpuExecutor, group: LocalGroup) -> None:
    group.barrier()
    memory = staging(executor)
    ctypes.memset(memory, STAGED, len(memory))
    group.barrier()


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make(executor: CpuExecutor, op: Op, x: torch.Tensor, out: torch.Tensor, nbytes: int, root: int = 0) -> None:
    algorithm = "two_shot" if op is Op.ALL_REDUCE else "one_shot"
    run_call(executor, CallPlan(op, algorithm, name(x.dtype), nbytes, root=root), x, out)
    assert executor.fault() is None


def calls(executor, group, mask, count, dtype, offset):
    """Make every call, of which the ranks of ``mask`` have mapped tensors; return by call whether this rank staged."""
    rank, ranks = group.rank, group.world_size
    mapped, staged = bool(mask >> rank & 1), {}
    item = dtype.itemsize

    x = mapped_or_not(executor, mapped, contribution(rank, count, dtype), offset)
    clear_staging(executor, group)
    make(executor, Op.ALL_REDUCE, x, x, count * item)
    assert same(x, summed(count, dtype, ranks))
    staged["in place"] = is_staged(executor)

    x = mapped_or_not(executor, mapped, contribution(rank, count, dtype), offset)
    out = mapped_or_not(executor, mapped, torch.zeros(count, dtype=dtype))
    make(executor, Op.ALL_REDUCE, x, out, count * item)
    assert same(out, summed(count, dtype, ranks))
    assert same(x, contribution(rank, count, dtype))

    whole = contribution(rank, count * ranks, dtype)
    x, out = mapped_or_not(executor, mapped, whole, offset), torch.zeros(count, dtype=dtype)
    clear_staging(executor, group)
    make(executor, Op.REDUCE_SCATTER, x, out, count * ranks * item)
    assert same(out, summed(count * ranks, dtype, ranks)[rank * count : (rank + 1) * count])
    assert same(x, whole)
    part = x[rank * count : (rank + 1) * count]
    make(executor, Op.REDUCE_SCATTER, x, part, count * ranks * item)
    assert same(part, out)
    staged["reduce-scatter"] = is_staged(executor)

    clear_staging(executor, group)
    make(executor, Op.ALL_GATHER, part, x, count * ranks * item)
    assert same(x, summed(count * ranks, dtype, ranks))
    apart = torch.zeros_like(x)
    make(executor, Op.ALL_GATHER, part, apart, count * ranks * item)
    assert same(apart, x)
    staged["all-gather"] = is_staged(executor)

    for root in range(ranks):
        x = mapped_or_not(executor, mapped, contribution(rank, count, dtype), offset)
        clear_staging(executor, group)
        make(executor, Op.BROADCAST, x, x, count * item, root)
        assert same(x, contribution(root, count, dtype))
        if root == rank:
            staged["broadcast"] = is_staged(executor)
    return staged


def check_values(group: LocalGroup, dtypes: tuple[torch.dtype, ...], counts: tuple[int, ...]) -> int:
    executor, done, ranks = CpuExecutor(group, MAX_BYTES, 300.0, registered()), 0, group.world_size
    everyone = (1 << ranks) - 1
    for dtype, count, mask in itertools.product(dtypes, counts, (everyone, 1, everyone - 1, 0)):
        staged = calls(executor, group, mask, count, dtype, 3 * (done % 2))
        where = (dtype, count, mask, staged)
        mapped = bool(mask >> group.rank & 1)
        long, whole = (n * count * dtype.itemsize >= LEAST_BYTES for n in (1, ranks))
        assert staged["in place"] == (not long or mask != everyone), where
        assert staged["broadcast"] == (not long or not mapped), where
        assert staged["reduce-scatter"] == staged["all-gather"] == (not whole or mask != everyone), where
        done += 1
    executor.close()
    return done


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("world_size", "dtypes"),
    [(2, (torch.bfloat16, torch.int64)), (3, (torch.float32,)), pytest.param(8, DTYPES[1:2], marks=pytest.mark.full)],
)
def test_values_and_what_is_staged(world_size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    done = run_ranks(world_size, check_values, dtypes, COUNTS, timeout_s=200.0)
    assert set(done) == {len(dtypes) * len(COUNTS) * 4}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", range(2, 9))
def test_all_values(world_size: int) -> None:
    dtypes = DTYPES if world_size < 4 else DTYPES[world_size % 2 :: 2]
    counts = (16_385, PIECE_BYTES // 4 * world_size, 300_007)
    run_ranks(world_size, check_values, dtypes, counts, timeout_s=800.0)


def check_changes_with_stragglers(group: LocalGroup, turns: int) -> None:
    """Tensors come and go, ranks differ in which are mapped, and each uses its tensor at once when a call is over."""
    executor = CpuExecutor(group, MAX_BYTES, 300.0, registered())
    rank, ranks = group.rank, group.world_size
    same_everywhere, own = torch.Generator().manual_seed(5), torch.Generator().manual_seed(rank)
    kept: list[torch.Tensor] = []
    for turn in range(turns):
        count = int(torch.randint(8_000, 60_000, (), generator=same_everywhere))
        op = int(torch.randint(4, (), generator=same_everywhere))
        everyone = bool(torch.rand((), generator=same_everywhere) < 0.7)
        late = int(torch.randint(ranks, (), generator=same_everywhere))
        mapped = everyone or bool(torch.rand((), generator=own) < 0.5)
        x = mapped_or_not(executor, mapped, torch.full((count * ranks,), float(rank + turn)))
        if rank == late:
            time.sleep(0.002)
        total = sum(range(ranks)) + ranks * turn
        if op == 0:
            make(executor, Op.ALL_REDUCE, x, x, x.nbytes)
            assert x.eq(total).all(), turn
        elif op == 1:
            out = torch.empty(count)
            make(executor, Op.REDUCE_SCATTER, x, out, x.nbytes)
            assert out.eq(total).all(), turn
        elif op == 2:
            make(executor, Op.ALL_GATHER, x[rank * count : (rank + 1) * count], x, x.nbytes)
            expected = (torch.arange(ranks) + float(turn)).repeat_interleave(count)
            assert torch.equal(x, expected), turn
        else:
            make(executor, Op.BROADCAST, x, x, x.nbytes, late)
            assert x.eq(late + turn).all(), turn
        x.fill_(-1.0)
        if turn % 3 == 0:
            kept = [*kept[-3:], x]
        del x
        assert all(tensor.eq(-1).all() for tensor in kept), turn
    executor.close()
    assert all(tensor.eq(-1).all() for tensor in kept)


@pytest.mark.parametrize("world_size", [2, 4, pytest.param(7, marks=pytest.mark.full)])
def test_tensors_that_change_with_stragglers(world_size: int) -> None:
    run_ranks(world_size, check_changes_with_stragglers, 300 // world_size, timeout_s=300.0)


def check_two_executors(group: LocalGroup) -> None:
    """The tensor of one group is an ordinary one in another, of the same ranks or of others."""
    one, two = (CpuExecutor(group, MAX_BYTES, 300.0, registered()) for _ in range(2))
    x, y = one.empty((40_000,), torch.float32), two.empty((40_000,), torch.float32)
    assert x is not None
    assert y is not None
    total = sum(range(group.world_size))
    for executor, tensor, staged in ((one, x, False), (two, x, True), (two, y, False), (one, y, True)):
        for _ in range(3):
            tensor.fill_(float(group.rank))
            clear_staging(executor, group)
            make(executor, Op.ALL_REDUCE, tensor, tensor, tensor.nbytes)
            assert tensor.eq(total).all()
            assert is_staged(executor) == staged
            group.barrier()
    one.close()
    two.close()
    assert x.eq(total).all()


def test_a_tensor_of_another_communicator_is_staged() -> None:
    run_ranks(3, check_two_executors)


def check_mismatch(group: LocalGroup) -> None:
    executor = CpuExecutor(group, MAX_BYTES, 100.0, registered())
    x = executor.empty((80_000,), torch.float32)
    assert x is not None
    x.fill_(1.0)
    count = 80_000 if group.rank else 40_000
    run_call(executor, CallPlan(Op.ALL_REDUCE, "two_shot", "float32", 4 * count), x[:count], x[:count])
    fault = executor.fault()
    assert fault is not None
    assert fault.kind == MISMATCH
    assert x[:count].isnan().all()
    assert x[count:].eq(1).all(), "written beyond the call"
    group.barrier()
    again(executor, group)


def again(executor: CpuExecutor, group: LocalGroup) -> None:
    """Reset the group, after which all goes on."""
    executor.clear(max(group.all_gather(executor.epoch)))
    group.barrier()
    x = executor.empty((40_000,), torch.float32)
    assert x is not None
    x.fill_(float(group.rank))
    make(executor, Op.ALL_REDUCE, x, x, x.nbytes)
    assert x.eq(sum(range(group.world_size))).all()


def test_ranks_with_other_sizes_write_nowhere() -> None:
    run_ranks(2, check_mismatch)


def check_late(group: LocalGroup) -> None:
    """A tensor that dies after its call has failed is not used again before all ranks have met."""
    executor = CpuExecutor(group, MAX_BYTES, 300.0, registered())
    x = executor.empty((40_000,), torch.float32)
    assert x is not None
    place = x.data_ptr()
    group.barrier()
    if group.rank == 1:
        group.barrier()  # the others have given up
    else:
        executor.set_timeout(1.0)
    begun = time.monotonic()
    run_call(executor, CallPlan(Op.ALL_REDUCE, "two_shot", "float32", x.nbytes), x, x)
    fault = executor.fault()
    assert fault is not None
    assert (fault.kind, fault.ranks) == (TIMEOUT, (1,))
    assert time.monotonic() - begun < 60
    if group.rank != 1:
        executor.set_timeout(300.0)
        group.barrier()
    del x
    assert all(other is not None and other.data_ptr() != place for other in taken(executor, 2))
    group.barrier()
    again(executor, group)
    assert place in [other.data_ptr() for other in taken(executor, 4) if other is not None]


def taken(executor: CpuExecutor, count: int) -> list[torch.Tensor | None]:
    return [executor.empty((40_000,), torch.float32) for _ in range(count)]


@pytest.mark.timing
def test_a_late_rank_is_named_and_finds_no_other_tensor() -> None:
    run_ranks(3, check_late)


def check_killed(group: LocalGroup) -> str:
    executor = CpuExecutor(group, MAX_BYTES, 300.0, registered())
    x = executor.empty((1 << 20,), torch.float32)
    assert x is not None
    for turn in range(1000):
        x.fill_(1.0)
        if group.rank == 1 and turn == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank != 1 and turn == 20:
            time.sleep(0.3)
            executor.mark_gone(1)
        run_call(executor, CallPlan(Op.ALL_REDUCE, "two_shot", "float32", x.nbytes), x, x)
        if (fault := executor.fault()) is not None:
            assert turn == 20
            assert (fault.kind, fault.ranks) == (ENDED, (1,))
            assert x.isnan().all()
            return "named"
        assert x.eq(group.world_size).all()
    return "nothing happened"


@pytest.mark.timing
def test_a_killed_rank_is_named() -> None:
    assert run_ranks(3, check_killed, mortal=True) == ["named", DEAD, "named"]


def check_no_memory(group: LocalGroup) -> None:
    """One rank has no memory for a tensor, and passes another: the call is right, and staged."""
    executor = CpuExecutor(group, MAX_BYTES, 100.0, registered())
    if group.rank == 1:
        executor._heap = None
    x = executor.empty((40_000,), torch.float32)
    assert (x is None) == (group.rank == 1)
    x = torch.empty(40_000) if x is None else x
    x.fill_(float(group.rank))
    make(executor, Op.ALL_REDUCE, x, x, x.nbytes)
    assert x.eq(1).all()


def test_a_rank_without_memory_for_tensors() -> None:
    run_ranks(2, check_no_memory)
