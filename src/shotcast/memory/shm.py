"""Symmetric memory of CPU ranks: one POSIX shared-memory segment per rank, mapped by all of them.

A segment has a name only while the ranks find each other; after that it lives as long as its mappings, so however a
job ends, nothing is left behind. A creator that is killed in that short time leaves a file whose lock is free: the next
buffer that anybody of the same user creates removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Sequence

import torch

from shotcast import env
from shotcast.errors import ClosedError, ConfigError
from shotcast.memory.symmetric import HostGroup
from shotcast.units import about_size, align_up

_ATTEMPTS = 100


def _prefix() -> str:
    return f"shotcast-{os.geteuid()}-"


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def sweep(directory: str) -> list[str]:
    """Removes segments in ``directory`` that killed processes of this user left; returns their names.

    A segment is stale when its lock can be taken: the creator holds it from creation until it removes the name. (A
    creator that has not come to locking yet finds its segment taken or gone, and makes another.)
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


def _create(directory: str, nbytes: int) -> tuple[str, int]:
    """A new locked segment with its memory reserved: (path, descriptor). Raises OSError, leaving nothing."""
    for _ in range(_ATTEMPTS):
        path = os.path.join(directory, _prefix() + secrets.token_hex(8))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            if _lock(descriptor) and os.fstat(descriptor).st_nlink > 0:
                os.posix_fallocate(descriptor, 0, nbytes)
                return path, descriptor
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.close(descriptor)
            raise
        # A sweep came between creation and locking.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(descriptor)
    raise OSError(errno.EAGAIN, f"no segment could be locked in {_ATTEMPTS} attempts", directory)


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    # Page tables are filled now rather than by faults in the first collective.
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _map_peer(path: str, nbytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != nbytes:
            raise OSError(errno.EPERM, f"not a segment of this user with {nbytes} bytes", path)
        return _map(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _explain(error: OSError, directory: str, nbytes: int, world_size: int) -> str:
    wanted = f"{about_size(nbytes * world_size)} for {world_size} ranks ({about_size(nbytes)} each)"
    if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
        return f"cannot create shared memory in {directory}, {wanted}: {error}. SHOTCAST_SHM_DIR names another tmpfs"
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


def _raise_failures(group: HostGroup, failure: str | None) -> None:
    """Collective: raises on every rank what failed on any."""
    failures = group.all_gather(failure)
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None)
    if told:
        raise ConfigError(told)


class ShmBuffer:
    """``nbytes`` (rounded up to whole pages) of zeroed shared memory per rank, mapped by every rank of ``group``.

    Construction is collective. It raises ConfigError on every rank when it fails on one (message: which rank, how much
    was wanted and free, what to do), and CollectiveTimeout when a rank does not come. No file outlives construction.

    The mappings end with :meth:`close` and the last tensor that :meth:`view` gave out.
    """

    def __init__(self, group: HostGroup, nbytes: int):
        if nbytes < 1:
            raise ConfigError(f"shared memory of {nbytes} bytes cannot be mapped")
        self._nbytes = align_up(nbytes, mmap.PAGESIZE)
        self._maps: tuple[mmap.mmap, ...] = ()
        self._addresses: tuple[int, ...] = ()
        directory = os.path.abspath(env.shm_dir())
        path: str | None = None
        descriptor = -1
        failure: str | None = None
        maps: list[mmap.mmap] = []
        try:
            sweep(directory)
            try:
                path, descriptor = _create(directory, self._nbytes)
            except OSError as error:
                failure = _explain(error, directory, self._nbytes, group.world_size)
            offers = group.all_gather((path, failure, self._nbytes))
            told = "; ".join(f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(offers) if text is not None)
            sizes = [size for _, _, size in offers]
            if not told and len(set(sizes)) > 1:
                told = f"the ranks ask for different sizes of shared memory: {sizes}"
            if told:
                raise ConfigError(told)
            try:
                for rank, (peer_path, _, _) in enumerate(offers):
                    own = rank == group.rank
                    maps.append(_map(descriptor, self._nbytes) if own else _map_peer(peer_path, self._nbytes))
            except OSError as error:
                failure = f"cannot map the shared memory of rank {len(maps)}: {error}"
            # Also the barrier after which names are no longer needed.
            _raise_failures(group, failure)
        except BaseException:
            for mapping in maps:
                mapping.close()
            raise
        finally:
            if path is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            if descriptor >= 0:
                os.close(descriptor)
        self._maps = tuple(maps)
        self._addresses = tuple(ctypes.addressof(ctypes.c_char.from_buffer(mapping)) for mapping in maps)

    @property
    def nbytes(self) -> int:
        """Bytes of each rank's memory, a multiple of the page size."""
        return self._nbytes

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each rank's memory lies in this process, by rank; valid until :meth:`close`. ClosedError after."""
        if not self._maps:
            raise ClosedError("this shared memory was closed")
        return self._addresses

    @property
    def multicast_address(self) -> int:
        """0: every store to shared memory reaches all ranks already."""
        return 0

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Rank ``rank``'s bytes from ``offset`` on as a tensor of ``shape``; it keeps the memory mapped while it lives.

        Raises ConfigError when that is not inside the memory, or ``offset`` is no multiple of the item size, and
        ClosedError after :meth:`close`.
        """
        if not self._maps:
            raise ClosedError("this shared memory was closed")
        count = 1
        for extent in shape:
            count *= extent
        end = offset + count * dtype.itemsize
        if not 0 <= rank < len(self._maps) or offset < 0 or count < 0 or end > self._nbytes or offset % dtype.itemsize:
            raise ConfigError(
                f"no {dtype} tensor of shape {tuple(shape)} at byte {offset} of rank {rank}: "
                f"there are {self._nbytes} bytes on each of {len(self._maps)} ranks"
            )
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._maps[rank], dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def close(self) -> None:
        """Ends this process's mappings, those of living views when the last of them dies. Does nothing twice."""
        # Not mmap.close(): a tensor made by torch.frombuffer holds the map, but not in a way that close() respects.
        self._maps = ()

    def __enter__(self) -> ShmBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
