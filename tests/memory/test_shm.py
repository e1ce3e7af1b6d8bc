"""Shared memory of CPU ranks, with real processes: mappings, failures on all ranks, leftovers."""

from __future__ import annotations

import fcntl
import gc
import mmap
import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest
import torch

from local_ranks import DEAD, LocalGroup, run_ranks
from shotcast.errors import ClosedError, CollectiveTimeout, ConfigError
from shotcast.memory import shm
from shotcast.memory.shm import ShmBuffer


@pytest.fixture
def directory(tmp_path_factory, monkeypatch):
    """Yield a directory of its own on the real tmpfs, which is empty before and after."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    path = Path(f"/dev/shm/shotcast-test-{os.getpid()}")
    path.mkdir(mode=0o700)
    monkeypatch.setenv("SHOTCAST_SHM_DIR", str(path))
    yield path
    left = sorted(entry.name for entry in path.iterdir())
    for name in left:
        (path / name).unlink()
    path.rmdir()
    assert not left


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_shared(group, directory):
    before = descriptors()
    buffer = ShmBuffer(group, 5000)
    assert buffer.nbytes == 2 * mmap.PAGESIZE == 8192
    assert buffer.multicast_address == 0
    assert len(set(buffer.addresses)) == group.world_size
    group.barrier()
    assert not list(directory.iterdir())
    for rank in range(group.world_size):
        assert not buffer.view(rank, 0, (8192,), torch.uint8).any()
        assert buffer.view(rank, 64, (2,), torch.int32).data_ptr() == buffer.addresses[rank] + 64
    group.barrier()
    buffer.view(group.rank, 4096, (2, 3), torch.float32).fill_(group.rank + 1)
    group.barrier()
    for rank in range(group.world_size):
        view = buffer.view(rank, 4096, (2, 3), torch.float32)
        assert view.tolist() == [[rank + 1.0] * 3] * 2
    group.barrier()

    for bad in ((0, 8192, (1,), torch.uint8), (0, -4, (1,), torch.int32), (0, 2, (1,), torch.int32)):
        with pytest.raises(ConfigError, match="8192 bytes"):
            buffer.view(*bad)
    with pytest.raises(ConfigError):
        buffer.view(group.world_size, 0, (1,), torch.uint8)
    assert buffer.view(0, 8192, (0,), torch.uint8).numel() == 0

    buffer.close()
    buffer.close()
    # A view keeps its memory; nothing new comes out.
    assert view.tolist() == [[group.world_size] * 3] * 2
    with pytest.raises(ClosedError):
        buffer.view(0, 0, (1,), torch.uint8)
    with pytest.raises(ClosedError):
        _ = buffer.addresses
    del view
    gc.collect()
    assert descriptors() == before
    assert "shotcast" not in Path("/proc/self/maps").read_text().replace("/shotcast/", "/")


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_share_and_leave_nothing(directory, world_size):
    run_ranks(world_size, check_shared, directory)


def test_garbage_of_the_test_process_stays_open_in_ranks(directory):
    garbage = [open(os.devnull)]  # noqa: SIM115
    garbage.append(garbage)
    gc.disable()
    try:
        del garbage
        run_ranks(1, check_shared, directory)
    finally:
        gc.enable()


def check_private(group, directory):
    seen = []

    class Watching(LocalGroup):
        def all_gather(self, value, timeout_s=None):
            for entry in directory.iterdir():
                status = entry.stat()
                seen.append((stat.S_IMODE(status.st_mode), status.st_uid, status.st_blocks * 512 >= 1 << 20))
            return super().all_gather(value, timeout_s)

    watching = Watching(group.rank, group.world_size, group._pipes)
    ShmBuffer(watching, 1 << 20).close()
    assert seen
    assert all(one == (0o600, os.geteuid(), True) for one in seen)


def test_segments_are_private_and_reserved(directory):
    previous = os.umask(0)
    try:
        run_ranks(1, check_private, directory)
    finally:
        os.umask(previous)


def check_failure(group, directory, where):
    """One rank fails; all ranks report it."""
    before = descriptors()
    if group.rank == 1:
        if where == "reserve":

            def full(descriptor, offset, nbytes):
                raise OSError(28, os.strerror(28))

            os.posix_fallocate = full
        elif where == "directory":
            os.environ["SHOTCAST_SHM_DIR"] = str(directory / "absent")
        else:

            def refuse(path, *sizes):
                raise OSError(12, os.strerror(12))

            shm._map = refuse
    with pytest.raises(ConfigError) as caught:
        ShmBuffer(group, 3 << 20)
    text = str(caught.value)
    assert "rank 1: " in text
    if where == "reserve":
        for part in ("9 MiB for 3 ranks", "3 MiB each", "B free in", "max_bytes", "--shm-size", "SHOTCAST_SHM_DIR"):
            assert part in text
    group.barrier()
    assert not list(directory.iterdir())
    assert descriptors() == before


@pytest.mark.parametrize("where", ["reserve", "directory", "map"])
def test_failure_of_one_rank_raises_on_all(directory, where):
    run_ranks(3, check_failure, directory, where)


def check_too_large(group, directory):
    with pytest.raises(ConfigError, match="not enough shared memory"):
        ShmBuffer(group, 1 << 50)
    with pytest.raises(ConfigError, match="cannot be mapped"):
        ShmBuffer(group, 0)
    with pytest.raises(ConfigError, match="different sizes"):
        ShmBuffer(group, 4096 * (1 + group.rank))
    ShmBuffer(group, 4096).close()


def test_sizes_that_cannot_be(directory):
    run_ranks(2, check_too_large, directory)


def check_killed(group, swept):
    """Rank 1 dies after its segment exists and before the others have mapped it."""

    class Dying(LocalGroup):
        def all_gather(self, value, timeout_s=None):
            if self.rank == 1:
                # Not before the other has swept, or it would sweep this one.
                assert swept.wait(60)
                os.kill(os.getpid(), signal.SIGKILL)
            swept.set()
            return super().all_gather(value, 60.0)

    with pytest.raises(CollectiveTimeout):
        ShmBuffer(Dying(group.rank, group.world_size, group._pipes), 4096)
    return "raised"


def check_alone(group):
    ShmBuffer(group, 4096).close()


def test_killed_during_rendezvous_is_swept_by_the_next(directory):
    assert run_ranks(2, check_killed, multiprocessing.get_context("fork").Event(), mortal=True) == ["raised", DEAD]
    assert len(list(directory.iterdir())) == 1
    run_ranks(1, check_alone)
    assert not list(directory.iterdir())


def check_sweepers(group, directory, turns):
    """All ranks sweep all the time while all create; nobody loses a living segment."""
    for turn in range(turns):
        shm.sweep(str(directory))
        buffer = ShmBuffer(group, 4096)
        buffer.view(group.rank, 0, (1,), torch.int64).fill_(turn * 100 + group.rank)
        group.barrier()
        values = [int(buffer.view(rank, 0, (1,), torch.int64)) for rank in range(group.world_size)]
        assert values == [turn * 100 + rank for rank in range(group.world_size)]
        group.barrier()
        buffer.close()


def test_sweeping_while_others_create(directory):
    run_ranks(4, check_sweepers, directory, 40)


def test_sweep_spares_the_living_and_strangers(directory):
    path, descriptor = shm._create(str(directory), 4096)
    stranger = directory / "somebody-elses"
    stranger.touch()
    link = directory / f"{shm._prefix()}link"
    link.symlink_to(stranger)
    assert shm.sweep(str(directory)) == []
    os.close(descriptor)
    assert shm.sweep(str(directory)) == [Path(path).name]
    assert stranger.exists()
    link.unlink()
    stranger.unlink()


def test_a_sweep_between_creation_and_locking_is_survived(directory, monkeypatch):
    locking = fcntl.flock
    swept = []

    def late(descriptor, operation):
        if not swept:
            # What a sweeper does that sees the new file before its creator has locked it.
            swept.append(None)
            swept.extend(shm.sweep(str(directory)))
        return locking(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    path, descriptor = shm._create(str(directory), 4096)
    assert len(swept) == 2
    assert os.path.exists(path)
    assert os.fstat(descriptor).st_nlink == 1
    os.close(descriptor)
    os.unlink(path)


def check_interrupted(group, directory):
    class Interrupted(LocalGroup):
        def all_gather(self, value, timeout_s=None):
            raise KeyboardInterrupt

    before = descriptors()
    with pytest.raises(KeyboardInterrupt):
        ShmBuffer(Interrupted(0, 1, {}), 4096)
    assert not list(directory.iterdir())
    assert descriptors() == before


def test_interrupted_construction_leaves_nothing(directory):
    run_ranks(1, check_interrupted, directory)


def check_kill_at_end(group):
    buffer = ShmBuffer(group, 1 << 20)
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    return buffer.nbytes


def test_killed_later_leaves_nothing(directory):
    assert run_ranks(2, check_kill_at_end, mortal=True) == [DEAD, 1 << 20]
    assert not list(directory.iterdir())
