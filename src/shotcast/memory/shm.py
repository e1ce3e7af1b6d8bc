"""Symmetric memory of CPU ranks: one POSIX shared-memory segment per rank, mapped by all of them.

A segment has a name only until the ranks have found each other, so nothing is left behind, however the job ends. A
creator that is killed in that short time leaves a file whose lock is free: the next buffer that any process of the same
user creates removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
import secrets
import stat
from collections.abc import Sequence

import torch

from shotcast import env
from shotcast.errors import ClosedError, ConfigError
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.mapped_heap import MappedHeap
from shotcast.memory.symmetric import raise_failures
from shotcast.units import about_size, align_up

_ATTEMPTS = 100


def _prefix() -> str:
    return f"shotcast-{os.geteuid()}-"


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def sweep(directory: str) -> list[str]:
    """Remove segments in ``directory`` left by killed processes of this user; return their names.

    A segment is stale if its lock can be taken: the creator holds the lock from creation until it removes the name.
    """
    removed = []
    try:
        names = [name for name in os.listdir(directory) if name.startswith(_prefix())]
    except OSError:
        return []
    for name in names:
        path = os.path.join(directory, name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and _lock(descriptor):
                os.unlink(path)
                removed.append(name)
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return removed


def _create(directory: str, nbytes: int, heap_nbytes: int = 0) -> tuple[str, int]:
    """Create a locked segment with its memory reserved; return path and descriptor. On OSError nothing is left behind.

    The heap has no memory yet; it is omitted if the file cannot be that long.
    """
    for _ in range(_ATTEMPTS):
        path = os.path.join(directory, _prefix() + secrets.token_hex(8))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            if _lock(descriptor) and os.fstat(descriptor).st_nlink > 0:  # else a sweep ran between creation and locking
                os.posix_fallocate(descriptor, 0, nbytes)
                if heap_nbytes:
                    with contextlib.suppress(OSError):
                        os.ftruncate(descriptor, nbytes + heap_nbytes)
                return path, descriptor
        except BaseException:
            _discard(path, descriptor)
            raise
        _discard(path, descriptor)
    raise OSError(errno.EAGAIN, f"no segment could be locked in {_ATTEMPTS} attempts", directory)


def _discard(path: str, descriptor: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.close(descriptor)


def _map(path: str, nbytes: int, length: int, with_heap: bool) -> mmap.mmap:
    """Map a rank's segment of ``length`` bytes, without its heap if there is no address space for it.

    The first ``nbytes`` are prefaulted so that the first call does not take the faults.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != length:
            raise OSError(errno.EPERM, f"not a segment of this user with {length} bytes", path)
        if with_heap:
            with contextlib.suppress(OSError):
                mapping = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED)
                torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)[:: mmap.PAGESIZE].sum()
                return mapping
        return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


def _explain(error: OSError, directory: str, nbytes: int, world_size: int) -> str:
    wanted = f"{about_size(nbytes * world_size)} for {world_size} ranks ({about_size(nbytes)} each)"
    if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
        return (
            f"cannot create shared memory in {directory}, {wanted}: {error}. Set SHOTCAST_SHM_DIR to use another tmpfs"
        )
    try:
        state = os.statvfs(directory)
        free = about_size(state.f_bavail * state.f_frsize)
    except OSError:
        free = "an unknown amount"
    return (
        f"not enough shared memory: wanted {wanted}, {free} free in {directory} ({error.strerror}). "
        "Use a smaller max_bytes, a larger /dev/shm (docker run --shm-size=...), "
        "or set SHOTCAST_SHM_DIR to another tmpfs"
    )


class ShmBuffer:
    """``nbytes`` (rounded up to whole pages) of zeroed shared memory on each rank, mapped by every rank of ``group``.

    Construction is collective. If it fails on one rank, it raises ConfigError on every rank (with the rank, the wanted
    and free memory, and what to do); if a rank does not arrive, it raises CollectiveTimeout. The mappings end with
    :meth:`close` and with the last tensor that :meth:`view` or the heap returned.

    The following ``heap_nbytes`` of address space are for a :class:`MappedHeap` (``heap``), which has memory only for
    its tensors. It is None if ``heap_nbytes`` is 0, or if a process limit leaves too little address space.
    """

    multicast_address = 0
    """There is none, because every store to shared memory already reaches all ranks."""

    def __init__(self, group: StoreGroup, nbytes: int, heap_nbytes: int = 0):
        if nbytes < 1:
            raise ConfigError(f"shared memory of {nbytes} bytes cannot be mapped")
        self.nbytes = align_up(nbytes, mmap.PAGESIZE)
        self._maps: tuple[mmap.mmap, ...] = ()
        self._addresses: tuple[int, ...] = ()
        self.heap: MappedHeap | None = None
        directory = os.path.abspath(env.shm_dir())
        path: str | None = None
        descriptor = -1
        length = 0
        failure = ""
        maps: list[mmap.mmap] = []
        try:
            sweep(directory)
            try:
                path, descriptor = _create(directory, self.nbytes, heap_nbytes)
                length = os.fstat(descriptor).st_size
            except OSError as error:
                failure = _explain(error, directory, self.nbytes, group.world_size)
            offers = group.all_gather((path, failure, self.nbytes, length))
            message = "; ".join(f"rank {rank}: {text}" for rank, (_, text, _, _) in enumerate(offers) if text)
            sizes = [size for _, _, size, _ in offers]
            if not message and len(set(sizes)) > 1:
                message = f"the ranks request different sizes of shared memory: {sizes}"
            if message:
                raise ConfigError(message)
            lengths = [length for *_, length in offers]
            has_heap = min(lengths) > self.nbytes
            try:
                for rank, (peer_path, *_) in enumerate(offers):
                    maps.append(_map(peer_path, self.nbytes, lengths[rank], has_heap))
            except OSError as error:
                failure = f"cannot map the shared memory of rank {len(maps)}: {error}"
            # This is also the barrier after which the names are no longer needed.
            raise_failures(group, failure)
            if has_heap and all(group.all_gather(list(map(len, maps)) == lengths)):
                self.heap = MappedHeap(maps[group.rank], descriptor, self.nbytes)
        except BaseException:
            for mapping in maps:
                mapping.close()
            raise
        finally:
            if path is not None:
                _discard(path, descriptor)
        self._maps = tuple(maps)
        self._addresses = tuple(ctypes.addressof(ctypes.c_char.from_buffer(mapping)) for mapping in maps)

    @property
    def addresses(self) -> tuple[int, ...]:
        """The address of each rank's memory in this process, by rank; valid until :meth:`close`, then ClosedError."""
        if not self._maps:
            raise ClosedError("this shared memory was closed")
        return self._addresses

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if not self._maps:
            raise ClosedError("this shared memory was closed")
        count = math.prod(shape)
        end = offset + count * dtype.itemsize
        if not 0 <= rank < len(self._maps) or offset < 0 or count < 0 or end > self.nbytes or offset % dtype.itemsize:
            raise ConfigError(
                f"no {dtype} tensor of shape {tuple(shape)} at byte {offset} of rank {rank}: "
                f"there are {self.nbytes} bytes on each of {len(self._maps)} ranks"
            )
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return torch.frombuffer(self._maps[rank], dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def close(self) -> None:
        """End this process's mappings; a mapping with live views ends with the last of them."""
        # Not mmap.close(): it does not respect that a tensor made by torch.frombuffer still uses the map.
        self._maps = ()
        self.heap = None
