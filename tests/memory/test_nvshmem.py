"""NVSHMEM's heap, by threads that stand for processes and a library that is a stand-in: who joins, leases and names."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shotcast.errors import ClosedError, CollectiveTimeout, ConfigError
from shotcast.memory import nvshmem, nvshmem_library
from shotcast.memory.members import Members
from shotcast.memory.nvshmem import PAGE, Heap, HeapLease

CPU = torch.device("cpu")
BLOCK_BYTES = 64 * PAGE
STRIDE = 1 << 40
"""Between the addresses of two PEs' memory where one maps the other's."""


class Job:
    """The state of NVSHMEM in all processes of a job, each a thread."""

    def __init__(self, processes: int, hosts: Sequence[int] | None = None):
        self.hosts = list(hosts or [0] * processes)
        self.sets: dict[bytes, dict[int, Library]] = {}
        self.libraries = [Library(self, process) for process in range(processes)]
        self.heaps = [Heap(lambda library=library: library, library.memory_at) for library in self.libraries]
        self.store = dist.HashStore()
        self.threads = ThreadPoolExecutor(processes)

    def together(self, processes: Sequence[int], work: Callable[[Group], Any]) -> list[Any]:
        """Run ``work`` on a thread for each process; return what each returned or raised."""
        meeting = Meeting(len(processes))

        def one(rank: int, process: int) -> Any:
            try:
                return work(Group(self, meeting, rank, process))
            except Exception as error:
                return error

        return list(self.threads.map(one, range(len(processes)), processes))

    def lease(self, processes: Sequence[int], nbytes: int) -> list[Any]:
        def work(group: Group) -> HeapLease:
            return self.heaps[group.process].lease(group, nbytes, CPU, self.mates(processes, group.process))

        return self.together(processes, work)

    def mates(self, processes: Sequence[int], process: int) -> list[int]:
        """Return the ranks among ``processes`` on the host of one."""
        return [rank for rank, other in enumerate(processes) if self.hosts[other] == self.hosts[process]]


class Library:
    """NVSHMEM in one process: collective functions wait for all PEs, as its own do."""

    def __init__(self, job: Job, process: int):
        self.job, self.process = job, process
        self.pes = self.pe = -1
        self.barrier = threading.Barrier(1)
        self.memory: dict[int, torch.Tensor] = {}
        self.fails = self.hangs = ""
        self.puts_complete = True

    @property
    def initialised(self) -> bool:
        return self.pes > 0

    def unique_id(self) -> bytes:
        return f"set of {self.process}, {len(self.job.sets)}".encode()

    def initialise(self, pe: int, pes: int, unique_id: bytes) -> None:
        assert not self.initialised
        self._do("initialise")
        self.job.sets.setdefault(unique_id, {})[pe] = self
        deadline = time.monotonic() + 100
        while len(self.job.sets[unique_id]) < pes:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.pe, self.pes, self.unique_id_of_set = pe, pes, unique_id

    def allocate(self, nbytes: int) -> int:
        self._do("allocate")
        address = 0x1000_0000 + sum(tensor.numel() for tensor in self.memory.values())
        self.memory[address] = torch.full((nbytes,), 0x5A, dtype=torch.uint8)
        return address

    def mapped(self, address: int, pe: int) -> int:
        other = self.job.sets[self.unique_id_of_set][pe]
        same_host = self.job.hosts[other.process] == self.job.hosts[self.process]
        return address + (pe - self.pe) * STRIDE if same_host else 0

    def memory_at(self, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        assert self.memory[address].numel() == nbytes
        return self.memory[address]

    def _do(self, what: str) -> None:
        if self.fails == what:
            raise RuntimeError(f"cannot {what}")
        while self.hangs == what:
            time.sleep(0.01)


class Meeting:
    def __init__(self, count: int):
        self.values: list[Any] = [None] * count
        self.barrier = threading.Barrier(count)


class Group:
    """The ranks of a communicator, seen by one thread."""

    def __init__(self, job: Job, meeting: Meeting, rank: int, process: int):
        self.job, self.meeting, self.rank, self.process = job, meeting, rank, process
        self.world_size = len(meeting.values)
        self.gone: set[int] = set()
        self.timeout = Members(rank).timeout

    def all_gather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait(100)
        values = list(self.meeting.values)
        self.meeting.barrier.wait(100)
        return values

    def barrier(self, timeout_s: float | None = None) -> None:
        self.all_gather(None)

    def store(self, name: str) -> dist.Store:
        return dist.PrefixStore(name, self.job.store)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvshmem, "BLOCK_BYTES", BLOCK_BYTES)
        yield


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(4)
    yield made
    for library in made.libraries:
        library.hangs = ""
    made.threads.shutdown()


def places(leases: Sequence[HeapLease]) -> list[tuple[int, int]]:
    """Return each rank's block and where its part begins."""
    return [(lease._block.address, lease._part.start) for lease in leases]


def test_the_first_communicator_makes_its_ranks_the_pes(job: Job) -> None:
    leases = job.lease([2, 0, 3], 10_000)
    assert [job.libraries[process].pe for process in (2, 0, 3)] == [0, 1, 2]
    assert not job.libraries[1].initialised
    assert [lease.nbytes for lease in leases] == [3 * PAGE] * 3
    assert all(not lease.view(rank, 0, (3 * PAGE,), torch.uint8).any() for rank, lease in enumerate(leases)), (
        "new memory is zero"
    )
    for rank, lease in enumerate(leases):
        assert [target.pe for target in lease.targets] == [0, 1, 2]
        assert lease.targets[rank] == (rank, lease.addresses[rank], lease.addresses[rank])
        assert [target.mapped - target.address for target in lease.targets] == [
            (other - rank) * STRIDE for other in range(3)
        ]


def test_memory_of_other_hosts_is_not_mapped() -> None:
    job = Job(4, hosts=[0, 0, 1, 1])
    leases = job.lease(range(4), PAGE)
    mapped = [[bool(address) for address in lease.addresses] for lease in leases]
    assert mapped == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2


def test_ranks_of_other_nodes_are_reached_by_puts_alone(job: Job) -> None:
    """It is so also where their memory is mapped, as on logical nodes of one host."""
    leases = job.together(range(4), lambda group: job.heaps[group.process].lease(group, PAGE, CPU, [group.rank]))
    for rank, lease in enumerate(leases):
        assert [bool(address) for address in lease.addresses] == [other == rank for other in range(4)]
        assert all(target.mapped for target in lease.targets)


def test_mates_whose_memory_is_not_mapped_are_named() -> None:
    job = Job(2, hosts=[0, 1])
    for refused in job.together([0, 1], lambda group: job.heaps[group.process].lease(group, PAGE, CPU, [0, 1])):
        assert isinstance(refused, ConfigError)
        assert "rank 0: NVSHMEM does not map the memory of ranks [1] of this node" in str(refused)


def test_later_communicators_lease_from_the_same_blocks(job: Job) -> None:
    whole = job.lease(range(4), part := 8 * PAGE)
    some = job.lease([3, 1], part)
    other = job.lease([0, 2], 2 * part)
    again = job.lease(range(4), part)
    assert len(other) == 2
    assert all(len(library.memory) == 1 for library in job.libraries)
    assert [start for _, start in places(some)] == [part, part]
    assert [start for _, start in places(again)] == [3 * part, 2 * part, 3 * part, 2 * part]
    assert [target.pe for target in some[0].targets] == [3, 1], "ranks are not PEs"
    # what rank 0 puts to rank 1 of `again` goes to where rank 1's part begins, counted from rank 0's own memory
    own = whole[0].addresses[0]
    assert [target.address - own for target in again[0].targets] == [start for _, start in places(again)]


def test_a_block_is_added_by_all_pes_alone(job: Job) -> None:
    job.lease(range(4), PAGE)
    larger = job.lease(range(4), BLOCK_BYTES + 1)
    assert [len(library.memory) for library in job.libraries] == [2] * 4
    assert larger[0]._block.memory.numel() == 2 * BLOCK_BYTES
    for refused in job.lease([1, 2], 3 * BLOCK_BYTES):
        assert isinstance(refused, ConfigError)
        assert "2 of its 4 PEs" in str(refused)


def test_ranks_of_two_sets_are_refused(job: Job) -> None:
    job.lease([0, 1], PAGE)
    job.lease([2, 3], PAGE)
    assert [library.pes for library in job.libraries] == [2] * 4
    for refused in job.lease(range(4), PAGE):
        assert isinstance(refused, ConfigError)
        assert "one set of NVSHMEM's PEs" in str(refused)
    assert isinstance(job.lease([1, 0], PAGE)[0], HeapLease), "the sets go on"


def test_a_part_is_leased_again_when_all_ranks_have_closed_it(job: Job) -> None:
    first = job.lease(range(4), PAGE)
    for lease in first[:3]:
        lease.close()
    second = job.lease(range(4), PAGE)
    assert [start for _, start in places(second)] == [PAGE] * 4
    first[3].close()
    assert [start for _, start in places(job.lease(range(4), PAGE))] == [0] * 4
    with pytest.raises(ClosedError):
        first[0].view(0, 0, (1,), torch.uint8)


def test_an_abandoned_part_is_never_leased_again(job: Job) -> None:
    first = job.lease(range(4), PAGE)
    first[2].abandon()
    for lease in first:
        lease.close()
    assert [start for _, start in places(job.lease(range(4), PAGE))] == [PAGE] * 4


def test_a_part_whose_puts_may_still_land_is_never_leased_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2, hosts=[0, 1])
    first = job.lease([0, 1], PAGE)
    monkeypatch.setattr(HeapLease, "settle", lambda lease: lease is not first[1])
    for lease in first:
        lease.close()
    assert [start for _, start in places(job.lease([0, 1], PAGE))] == [PAGE] * 2


def test_a_view_ends_with_the_lease(job: Job) -> None:
    lease = job.lease([0, 1], 100)[0]
    assert lease.view(0, PAGE - 8, (1,), torch.int64).shape == (1,)
    with pytest.raises(ConfigError, match="exceeds the lease's 4096 bytes"):
        lease.view(0, PAGE - 7, (1,), torch.int64)
    with pytest.raises(ConfigError, match="no tensor of rank 1's memory"):
        lease.view(1, 0, (1,), torch.int64)


@pytest.mark.parametrize("what", ["initialise", "allocate"])
def test_what_fails_on_one_rank_fails_on_all_and_names_it(job: Job, what: str) -> None:
    job.libraries[3].fails = what
    for refused in job.lease([0, 3] if what == "allocate" else [3], PAGE):
        assert isinstance(refused, ConfigError)
        assert f"cannot {what}" in str(refused)
    if what == "allocate":
        assert "rank 1: cannot allocate" in str(job.lease([0, 3], PAGE)[0]), "it says so from then on"


@pytest.mark.parametrize("gone", [True, False])
def test_a_rank_that_does_not_take_part_ends_the_wait(job: Job, monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    job.lease([0, 1], PAGE)
    monkeypatch.setattr(nvshmem, "_DEADLINE_S", 600 if gone else 0.3)
    monkeypatch.setattr(nvshmem, "_QUIET_S", 0.1)
    for library in job.libraries[:2]:
        library.hangs = "allocate"

    def lease(group: Group) -> HeapLease:
        group.gone = {1} if gone else set()
        return job.heaps[group.process].lease(group, 2 * BLOCK_BYTES, CPU, [0, 1])

    began = time.monotonic()
    error = job.together([0, 1], lease)[0]
    assert time.monotonic() - began < 60
    assert isinstance(error, CollectiveTimeout)
    assert (error.missing, error.reason) == (((1,), "dead") if gone else ((), "late"))
    for refused in job.lease([0, 1], PAGE):
        assert isinstance(refused, ConfigError)
        assert "start the processes again" in str(refused)


def test_a_process_has_one_gpu(job: Job) -> None:
    job.lease([0, 1], PAGE)
    meta = torch.device("meta")
    for refused in job.together([0, 1], lambda group: job.heaps[group.process].lease(group, PAGE, meta, [0, 1])):
        assert isinstance(refused, ConfigError)
        assert "on cpu, so not on meta" in str(refused)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 2), min_size=1), st.integers(1, 5 * PAGE), st.sets(st.integers(0, 20))),
        max_size=8,
    )
)
def test_leases_never_overlap(steps: list[tuple[set[int], int, set[int]]]) -> None:
    job = Job(3)
    held: list[tuple[list[int], list[HeapLease]]] = [([0, 1, 2], job.lease([0, 1, 2], PAGE))]
    for processes, nbytes, closing in steps:
        for number in sorted(closing & set(range(len(held))), reverse=True):
            for lease in held.pop(number)[1]:
                lease.close()
        ranks = sorted(processes)
        leases = job.lease(ranks, nbytes)
        assert all(isinstance(lease, HeapLease) for lease in leases)
        held.append((ranks, leases))
        for process in range(3):
            parts = sorted(
                (lease.targets[members.index(process)].address, lease.nbytes)
                for members, leases in held
                for member, lease in zip(members, leases, strict=True)
                if member == process
            )
            assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(parts))
    job.threads.shutdown()


# -- the library ------------------------------------------------------------------------------------------------------


def test_structures_have_the_sizes_of_the_library() -> None:
    sizes = {
        nvshmem_library._UniqueId: 128,
        nvshmem_library._UniqueIdArguments: 24,
        nvshmem_library._Arguments: 128,
        nvshmem_library._Attributes: 144,
    }
    assert {structure: ctypes.sizeof(structure) for structure in sizes} == sizes
    assert nvshmem_library._Attributes.arguments.offset == 16
    assert nvshmem_library._version_of(nvshmem_library._Attributes) == 0x10090


def test_the_users_variables_of_nvshmem_take_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("libnvshmem_host.so.3", "libnvshmem_device.bc"):
        (tmp_path / name).touch()
    set_by_user = {"NVSHMEM_LIB_DIR": str(tmp_path), "NVSHMEM_SYMMETRIC_SIZE": "2G", "SHOTCAST_SOCKET_IFNAME": "ib0"}
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: SimpleNamespace(nvshmem_malloc=Mock(), nvshmem_ptr=Mock()))
    with patch.dict(os.environ, set_by_user):
        nvshmem_library.Library()
        assert os.environ["NVSHMEM_SYMMETRIC_SIZE"] == "2G"
        assert os.environ["NVSHMEM_DISABLE_NCCL"] == "1"
        assert os.environ["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == "ib0"


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_LIB_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"lacks libnvshmem_host.so.3 or .* Install nvidia-nvshmem-cu13"):
        nvshmem_library.folder()
    (tmp_path / "libnvshmem_host.so.3").touch()
    with pytest.raises(ConfigError):
        nvshmem_library.folder()
    (tmp_path / "libnvshmem_device.bc").touch()
    assert nvshmem_library.extern_libs() == {"libnvshmem_device": str(tmp_path / "libnvshmem_device.bc")}
