"""The arena's leases, by threads that stand for processes: who may share what, when, and what is released."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from local_ranks import run_ranks
from shotcast.errors import ClosedError, CollectiveTimeout, ConfigError
from shotcast.memory import arena as arenas
from shotcast.memory import holdings
from shotcast.memory.arena import KEPT_BYTES, PAGE, Arena, Lease, Process
from shotcast.memory.holdings import HeldMemory
from shotcast.memory.shm import ShmBuffer
from shotcast.memory.symmetric import raise_failures

MIB = 1 << 20


class Machine:
    """Some processes, each a thread, and the blocks that they have in memory."""

    def __init__(self, count: int, multicast: bool = False, room: Sequence[int] | None = None, waits: bool = False):
        self.processes = [Process() for _ in range(count)]
        self.waits = [0] * count
        self.busy: set[int] = set()
        """The processes in whose device a graph is captured."""
        self.arenas = [
            Arena(process, wait=functools.partial(self._wait, number) if waits else None)
            for number, process in enumerate(self.processes)
        ]
        self.multicast = multicast
        self.free = list(room or [1 << 60] * count)
        self.made = 0
        self._threads = ThreadPoolExecutor(count)

    def _wait(self, number: int) -> None:
        if number in self.busy:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.waits[number] += 1

    def close(self) -> None:
        self._threads.shutdown()

    def together(self, ranks: Sequence[int], work: Callable[[Group], Any]) -> list[Any]:
        """Run ``work`` in a thread for each of ``ranks``; return what each returned or raised."""
        meeting = Meeting(len(ranks))

        def one(rank: int, process: int) -> Any:
            try:
                return work(Group(meeting, self, rank, process))
            except Exception as error:
                return error

        return list(self._threads.map(one, range(len(ranks)), ranks))

    def lease(self, ranks: Sequence[int], nbytes: int, multicast: bool = True) -> list[Any]:
        def work(group: Group) -> Lease:
            return self.arenas[group.process].lease(group, nbytes, allocate, multicast)

        return self.together(ranks, work)


class Meeting:
    """An exchange between threads."""

    def __init__(self, count: int):
        self.values: list[Any] = [None] * count
        self.barrier = threading.Barrier(count)


class Group:
    """The HostGroup of a thread."""

    def __init__(self, meeting: Meeting, machine: Machine, rank: int, process: int):
        self.meeting, self.machine, self.rank, self.process = meeting, machine, rank, process
        self.world_size = len(meeting.values)

    def all_gather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait(100)
        values = list(self.meeting.values)
        self.meeting.barrier.wait(100)
        return values

    def barrier(self, timeout_s: float | None = None) -> None:
        self.all_gather(None)


class Buffer:
    """A SymmetricBuffer of threads: real words, and addresses that mean nothing."""

    def __init__(self, group: Group, nbytes: int, words: list[torch.Tensor]):
        self.nbytes, self.words, self.closed = nbytes, words, False
        self.machine, self.process = group.machine, group.process
        self.addresses = tuple((rank + 1) << 40 for rank in range(group.world_size))
        self.multicast_address = 1 << 50 if group.machine.multicast else 0

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert not self.closed
        count = torch.Size(shape).numel() * dtype.itemsize
        assert 0 <= offset <= self.nbytes - count
        return self.words[rank][offset : offset + count].view(dtype).view(tuple(shape))

    def close(self) -> None:
        if not self.closed:
            self.machine.free[self.process] += self.nbytes
        self.closed = True


def allocate(group: Any, nbytes: int) -> Buffer:
    """Make a block as CudaBuffer does: no rank goes on unless all have the memory."""
    machine, process = group.machine, group.process
    short = machine.free[process] < nbytes
    raise_failures(group, f"wanted {nbytes}, {machine.free[process]} free" if short else "")
    machine.free[process] -= nbytes
    words = group.all_gather(torch.full((nbytes,), 0x5A, dtype=torch.uint8))
    if group.rank == 0:
        machine.made += 1
    return Buffer(group, nbytes, words)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Any:
    made = Machine(4, **getattr(request, "param", {}))
    yield made
    made.close()


def places(leases: list[Any]) -> list[int]:
    """Return where each rank's lease begins in its own memory."""
    return [lease._part.start for lease in leases]


def close_all(leases: list[Any]) -> None:
    for lease in leases:
        lease.close()


def block_of(nbytes: int) -> int:
    """Return the bytes of a block that is made for one lease."""
    return nbytes + PAGE


# -- one after the other ----------------------------------------------------------------------------------------------


def test_a_lease_is_memory_that_all_ranks_see(machine: Machine) -> None:
    leases = machine.lease([2, 0, 3], MIB)
    assert machine.made == 1
    for rank, lease in enumerate(leases):
        assert lease.nbytes == MIB
        lease.view(rank, MIB - 8, (2,), torch.int32).fill_(rank + 7)
    for lease in leases:
        assert [lease.view(r, MIB - 4, (1,), torch.int32).item() for r in range(3)] == [7, 8, 9]
        with pytest.raises(ConfigError, match="exceeds the lease's 1048576 bytes"):
            lease.view(0, MIB - 4, (2,), torch.int32)
    assert machine.arenas[0].held == HeldMemory(MIB + PAGE, MIB + PAGE)
    assert machine.arenas[1].held == HeldMemory(0, 0)
    leases[0].close()
    leases[0].close()
    with pytest.raises(ClosedError):
        leases[0].view(0, 0, (1,), torch.int32)
    assert machine.arenas[2].held == HeldMemory(0, 0)
    close_all(leases)


def test_communicators_in_use_at_once_share_no_memory(machine: Machine) -> None:
    whole, half = machine.lease([0, 1, 2, 3], MIB), machine.lease([1, 3], 3 * MIB)
    assert machine.made == 2, "the block of the first has no room"
    close_all(half)
    small = [machine.lease([1, 3], MIB), machine.lease([3, 1], MIB)]
    assert machine.made == 2, "both fit into the empty block"
    taken = sorted(places(small[0])[:1] + places(small[1])[1:])
    assert taken == [0, block_of(MIB)]
    for lease in (*whole, *small[0], *small[1]):
        lease.close()
    assert {arena.held for arena in machine.arenas} == {HeldMemory(0, 0)}


def test_ranks_of_a_larger_block_lease_from_it(machine: Machine) -> None:
    first, second = machine.lease([0, 1, 2, 3], MIB), machine.lease([0, 1, 2, 3], 4 * MIB)
    close_all(second)
    pairs = machine.lease([2, 3], MIB), machine.lease([1, 2], MIB), machine.lease([3, 0], MIB)
    assert machine.made == 2
    assert places(pairs[1]) == [0, block_of(MIB)], "each rank takes what is free of its own memory"
    for number, pair in enumerate(pairs):
        for rank, lease in enumerate(pair):
            lease.view(rank, 0, (MIB,), torch.uint8).fill_(10 * number + rank)
    for number, pair in enumerate(pairs):
        for lease, rank in ((lease, rank) for lease in pair for rank in range(2)):
            assert (lease.view(rank, 0, (MIB,), torch.uint8) == 10 * number + rank).all()
    for leases in (first, *pairs):
        close_all(leases)


def test_memory_is_leased_again_when_all_ranks_have_closed_it(machine: Machine) -> None:
    """A rank that has not closed may still store its data, or the news of a failure, into the memory of the others."""
    held_by_all = machine.lease([0, 1, 2, 3], MIB)
    early = machine.lease([0, 1, 2], MIB)
    early[0].close()
    early[2].close()
    assert machine.made == 2
    again = machine.lease([0, 2], MIB)
    assert machine.made == 3, "rank 1 has not closed"
    close_all(again)
    early[1].close()
    again = machine.lease([0, 2], MIB)
    assert machine.made == 3
    close_all(again)
    close_all(held_by_all)


def test_memory_of_a_rank_that_never_closes_is_not_leased_again(machine: Machine) -> None:
    parent = machine.lease([0, 1], 4 * MIB)
    killed = machine.lease([0, 1], MIB)
    killed[0].close()
    assert machine.arenas[0].held.leased == block_of(4 * MIB)
    after = machine.lease([0, 2], MIB)
    assert machine.made == 3
    close_all(after)
    killed[1].abandon()
    after = machine.lease([0, 1], MIB)
    assert machine.made == 4, "an abandoned lease has no mark"
    close_all(after)
    close_all(parent)
    assert machine.arenas[0].held == HeldMemory(0, 0), "no lease is open, so nothing is kept"


def test_leases_that_are_collected_are_given_back(machine: Machine) -> None:
    leases = machine.lease([0, 1], MIB)
    assert machine.arenas[0].held.leased
    del leases
    gc.collect()
    assert [machine.arenas[rank].held for rank in (0, 1)] == [HeldMemory(0, 0)] * 2


def test_a_lease_that_is_collected_while_the_arena_is_at_work_waits(machine: Machine) -> None:
    (lease,) = machine.lease([0], MIB)
    arena = machine.arenas[0]
    with arena._lock:
        lease.abandon()
        assert len(arena._blocks) == 1
    assert arena.held == HeldMemory(0, 0)


def test_small_empty_blocks_are_kept_while_others_are_in_use(machine: Machine) -> None:
    parent = machine.lease([0, 1], MIB)
    large = KEPT_BYTES - PAGE
    for nbytes, kept in ((MIB, True), (large, True), (large + PAGE, False)):
        close_all(machine.lease([0, 1], nbytes))
        blocks = block_of(MIB) + (block_of(nbytes) if kept else 0)
        assert machine.arenas[0].held.blocks <= blocks
        made = machine.made
        close_all(machine.lease([1, 0], nbytes))
        assert machine.made == made + (not kept)
    close_all(parent)
    assert machine.arenas[0].held == HeldMemory(0, 0)


def test_one_rank_without_memory_is_an_error_of_all(machine: Machine) -> None:
    machine.free[1] = 2 * MIB
    first = machine.lease([0, 1, 2], MIB)
    outcomes = machine.lease([0, 1, 2], MIB)
    assert [str(outcome) for outcome in outcomes] == [f"rank 1: wanted {block_of(MIB)}, {MIB - PAGE} free"] * 3
    assert all(isinstance(outcome, ConfigError) for outcome in outcomes)
    assert [machine.arenas[rank].held for rank in range(3)] == [HeldMemory(block_of(MIB), block_of(MIB))] * 3
    others = machine.lease([0, 2], MIB)
    assert machine.made == 2, "the others have memory"
    close_all(first + others)
    close_all(machine.lease([1, 2], MIB))


def test_room_on_some_ranks_only_is_none(machine: Machine) -> None:
    pair, whole = machine.lease([0, 1], MIB), machine.lease([0, 1, 2], 2 * MIB)
    close_all(whole)
    mine = machine.lease([0, 1], 2 * MIB)
    assert machine.made == 2
    other = machine.lease([1, 2], 2 * MIB)
    assert machine.made == 3, "rank 2 has room in the block of three, and rank 1 has none"
    for leases in (pair, mine, other):
        close_all(leases)


GPUS = pytest.mark.parametrize("machine", [{"waits": True}], indirect=True)


@GPUS
def test_memory_whose_release_waits_is_kept_and_leased_again(machine: Machine) -> None:
    """A kernel may wait there for what its rank does only after this. So no lease, close or look may wait for it."""
    large = KEPT_BYTES + MIB
    parent, grown = machine.lease([0, 1], MIB), machine.lease([0, 1], large)
    close_all(grown)
    del grown
    gc.collect()
    kept = HeldMemory(block_of(MIB), block_of(MIB) + block_of(large))
    assert [machine.arenas[rank].held for rank in (0, 1)] == [kept] * 2
    again = machine.lease([1, 0], large)
    assert machine.made == 2
    close_all(again)
    machine.lease([0, 1], 2 * MIB)[0].abandon()
    assert machine.waits == [0] * 4
    machine.busy.add(0)
    with pytest.raises(RuntimeError, match="capturing"):
        machine.arenas[0].release()
    assert machine.arenas[0].held == kept, "nothing is released while a graph is captured"
    machine.busy.clear()
    for rank in (0, 1):
        machine.arenas[rank].release()
        assert machine.arenas[rank].held == HeldMemory(block_of(MIB), block_of(MIB)), "small blocks may be kept"
    assert machine.waits == [1, 1, 0, 0]
    close_all(parent)
    for rank in (0, 1):
        machine.arenas[rank].release()
        machine.arenas[rank].release()
        assert machine.arenas[rank].held == HeldMemory(0, 0)
    assert machine.waits == [2, 2, 0, 0], "nothing to release is nothing to wait for"


@GPUS
def test_ranks_without_memory_release_theirs_together(machine: Machine) -> None:
    """Memory of a rank is free when no rank maps it, so those with enough release too."""
    large = KEPT_BYTES + MIB
    machine.free[1] = large + 2 * MIB
    parent = machine.lease([0, 1], MIB)
    close_all(machine.lease([0, 1], large))
    grown = machine.lease([0, 1], large + PAGE)
    assert machine.waits == [1, 1, 0, 0]
    whole = block_of(MIB) + block_of(large + PAGE)
    assert [machine.arenas[rank].held for rank in (0, 1)] == [HeldMemory(whole, whole)] * 2
    errors = machine.lease([0, 1], large)
    assert ["rank 1: wanted" in str(error) for error in errors] == [True] * 2
    assert machine.waits == [1, 1, 0, 0], "there was nothing to release"
    close_all(grown)
    machine.busy.add(0)
    errors = machine.lease([0, 1], large + 2 * PAGE)
    assert [str(error) for error in errors] == [
        "rank 0: memory of cpu cannot be released now: operation not permitted when stream is capturing"
    ] * 2
    machine.busy.clear()
    close_all(parent)
    for rank in (0, 1):
        machine.arenas[rank].release()
        assert machine.arenas[rank].held == HeldMemory(0, 0)


@pytest.mark.parametrize("machine", [{"multicast": True}], indirect=True)
def test_multicast_takes_all_members_at_one_place(machine: Machine) -> None:
    """One address stands for the same offset in the memory of every member."""
    parent = machine.lease([0, 1, 2, 3], 4 * MIB)
    assert [lease.multicast_address for lease in parent] == [1 << 50] * 4
    copy = machine.lease([3, 2, 1, 0], 2 * MIB)
    close_all(copy)
    copy, again = machine.lease([1, 0, 2, 3], MIB // 4), machine.lease([0, 1, 2, 3], MIB // 4)
    assert machine.made == 2
    assert {lease.multicast_address for lease in again} == {(1 << 50) + block_of(MIB // 4)}
    pair = machine.lease([0, 1], MIB // 4)
    assert machine.made == 3, "stores to all would reach ranks 2 and 3"
    assert pair[0].multicast_address == pair[1].multicast_address != 0
    quiet = machine.lease([1, 2], MIB // 4, multicast=False)
    assert machine.made == 3
    assert quiet[0].multicast_address == 0
    shifted = machine.lease([0, 1, 2, 3], MIB // 4)
    assert machine.made == 4, "ranks 1 and 2 would begin elsewhere"
    for leases in (parent, copy, again, pair, quiet, shifted):
        close_all(leases)


def test_multicast_is_for_all_ranks_or_none(machine: Machine) -> None:
    """Ranks choose algorithms by it, and must choose alike: one that has none, or was told not to, decides for all."""

    def work(group: Group) -> int:
        def one_without(group: Any, nbytes: int) -> Buffer:
            buffer = allocate(group, nbytes)
            buffer.multicast_address = 0 if group.rank == 1 else 1 << 50
            return buffer

        with_closed = machine.arenas[group.process].lease(group, MIB, one_without, True)
        address = with_closed.multicast_address
        group.barrier()
        with_closed.close()
        return address

    assert machine.together([0, 1, 2], work) == [0, 0, 0]
    machine.multicast = True
    told = machine.together(
        [0, 1, 2], lambda group: machine.arenas[group.process].lease(group, MIB, allocate, group.rank != 2)
    )
    assert [lease.multicast_address for lease in told] == [0, 0, 0]
    close_all(told)


def test_a_rank_that_does_not_come_leaves_nothing_reserved(machine: Machine) -> None:
    parent = machine.lease([0, 1], MIB)
    close_all(machine.lease([0, 1], MIB))

    def absent(value: Any, timeout_s: float | None = None) -> Any:
        raise CollectiveTimeout(0, [1], "setup", 0, 1.0)

    group: Any = SimpleNamespace(rank=0, world_size=2, all_gather=absent)
    with pytest.raises(CollectiveTimeout):
        machine.arenas[0].lease(group, MIB, allocate, False)
    assert machine.arenas[0].held.leased == block_of(MIB)
    close_all(machine.lease([0, 1], MIB))
    assert machine.made == 2
    close_all(parent)


def test_a_forked_child_has_arenas_of_its_own() -> None:
    assert run_ranks(1, forked, timeout_s=200) == [(True, {})]


def forked(group: Any) -> tuple[bool, dict[str, HeldMemory]]:
    return arenas._process is not arenas._forked[-1], arenas.held()


def test_leases_of_shared_memory_between_processes() -> None:
    assert run_ranks(3, lease_and_close, 12, timeout_s=200) == [12, 12, 12]


def lease_and_close(group: Any, turns: int) -> int:
    """Lease shared memory again and again; data of one turn is never seen by another."""
    arena = arenas.arena_of(torch.device("cpu"))
    parent = arena.lease(group, 4 * PAGE, ShmBuffer, False)
    for turn in range(turns):
        lease = arena.lease(group, 2 * PAGE, ShmBuffer, False)
        lease.view((group.rank + 1) % 3, 0, (3,), torch.int64).fill_(turn * 10 + group.rank)
        group.barrier()
        assert lease.view(group.rank, 0, (3,), torch.int64).tolist() == [turn * 10 + (group.rank - 1) % 3] * 3
        group.barrier()
        lease.close()
        group.barrier()
        assert arena.held == HeldMemory(5 * PAGE, 8 * PAGE)
    parent.close()
    assert arenas.held() == {"cpu": HeldMemory(0, 0)}
    return turns


# -- in any order -----------------------------------------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("lease"),
            st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
            st.integers(1, 9),
            st.booleans(),
        ),
        st.tuples(st.just("close"), st.integers(0, 99), st.integers(0, 3)),
        st.tuples(st.just("abandon"), st.integers(0, 99), st.integers(0, 3)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.booleans(), st.lists(st.integers(20, 200), min_size=4, max_size=4))
def test_any_order(order: list[tuple[Any, ...]], multicast: bool, room: list[int]) -> None:
    """Whatever is leased, closed and abandoned in which order, by which ranks:

    - leases overlap no other that a rank has not closed, on any rank;
    - a lease fails on all ranks or on none, and only if a rank has too little memory for a new block;
    - a multicast address stands for the memory of the lease on all ranks;
    - when all leases are closed, all memory is free.
    """
    machine = Machine(4, multicast, [pages * PAGE for pages in room])
    living: list[dict[int, Lease]] = []  # by process, those that are not closed
    try:
        for step in order:
            if step[0] == "lease":
                _, ranks, pages, wanted = step
                before = list(machine.free)
                outcomes = machine.lease(ranks, pages * PAGE, wanted)
                failed = [isinstance(outcome, ConfigError) for outcome in outcomes]
                assert all(failed) or not any(failed), outcomes
                if failed[0]:
                    assert min(before[process] for process in ranks) < block_of(pages * PAGE)
                    continue
                _check(machine, ranks, outcomes)
                living.append(dict(zip(ranks, outcomes, strict=True)))
            elif living:
                leases = living[step[1] % len(living)]
                process = sorted(leases)[step[2] % len(leases)]
                lease = leases[process]
                lease.close() if step[0] == "close" else lease.abandon()
                del leases[process]
                living = [leases for leases in living if leases]
            _no_overlap(machine, living)
        for leases in living:
            close_all(list(leases.values()))
        assert [arena.held for arena in machine.arenas] == [HeldMemory(0, 0)] * 4
        assert machine.free == [pages * PAGE for pages in room]
    finally:
        machine.close()


def _check(machine: Machine, ranks: list[int], leases: list[Any]) -> None:
    names = {lease._block.name for lease in leases}
    assert len(names) == 1
    for lease in leases:
        assert lease.addresses == leases[0].addresses
        if lease.multicast_address:
            assert set(lease._block.members) == {machine.processes[process].name for process in ranks}
            offsets = {address % (1 << 40) for address in lease.addresses}
            assert offsets == {lease.multicast_address - (1 << 50)}


def _no_overlap(machine: Machine, living: list[dict[int, Lease]]) -> None:
    """Check that the memory of each lease that is open on a rank is no other lease's, in anybody's memory."""
    seen: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for leases in living:
        lease = next(iter(leases.values()))
        for member, start in lease._places:
            seen.setdefault((lease._block.name, member), []).append((start, start + lease._part.nbytes))
    for spans in seen.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), spans


# -- what is held ------------------------------------------------------------------------------------------------------


def test_processes_say_what_they_hold() -> None:
    with_first, with_second = run_ranks(2, hold, timeout_s=200)
    assert with_first == with_second
    (first, second), nothing = with_first
    assert first == second == {"cpu": HeldMemory(3 * PAGE, 3 * PAGE)}
    assert nothing == [{}, {}]


def hold(group: Any) -> tuple[list[dict[str, HeldMemory]], list[dict[str, HeldMemory]]]:
    processes = group.all_gather(os.getpid())
    lease = arenas.arena_of(torch.device("cpu")).lease(group, 2 * PAGE, ShmBuffer, False)
    group.barrier()
    said = [holdings.of_all_processes().get(process, {}) for process in processes]
    if os.fork() == 0:
        os._exit(os.getpid() in holdings.of_all_processes())
    assert os.wait()[1] == 0, "a forked child holds nothing of its own"
    group.barrier()
    lease.close()
    group.barrier()
    after = [holdings.of_all_processes().get(process, {}) for process in processes]
    group.barrier()
    return said, after
