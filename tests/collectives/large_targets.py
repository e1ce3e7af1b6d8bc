"""Functions that the ranks of tests/collectives/test_large_messages.py run: messages of 4 GiB, in little memory.

On CPU ranks, a tensor's addresses all exist, but its memory only near the places that are looked at. Elsewhere, a few
megabytes appear again and again, which must stay zero.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from workers import settle

import shotcast
from shotcast.units import align_up

_SHARED_BYTES = 32 << 20
_PAGE = mmap.PAGESIZE
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 1, 2, 0x10, 0x20, 0x4000
_READ_WRITE = 3
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(address: int, nbytes: int, flags: int, file: int) -> int:
    found: int | None = _libc.mmap(address or None, nbytes, _READ_WRITE, flags, file, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def sparse(nbytes: int, windows: Sequence[int], writable: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``nbytes`` bytes, zero, with memory of their own in the pages next to the offsets ``windows``.

    The other pages take no memory if they are only read. If they are ``writable``, they are the same few megabytes,
    which are returned too.
    """
    size = align_up(max(nbytes, 1), _PAGE)
    private = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    base, shared = _map(0, size, private, -1), None
    if writable:
        file = os.memfd_create("shared")
        os.ftruncate(file, _SHARED_BYTES)
        shared = _bytes_at(_map(0, _SHARED_BYTES, _MAP_SHARED, file), _SHARED_BYTES)
        for start in range(0, size, _SHARED_BYTES):
            _map(base + start, min(_SHARED_BYTES, size - start), _MAP_SHARED | _MAP_FIXED, file)
        os.close(file)
        for page in {(offset + near) // _PAGE for offset in windows for near in (-_PAGE, 0, _PAGE)}:
            if 0 <= page < size // _PAGE:
                _map(base + page * _PAGE, _PAGE, private | _MAP_FIXED, -1)
    return _bytes_at(base, nbytes), shared


def unmap(tensor: torch.Tensor) -> None:
    _libc.munmap(tensor.data_ptr(), align_up(tensor.nbytes, _PAGE))


def value(rank: int, index: int) -> int:
    """Return element ``index`` of a rank's input where it is marked; sums of two have no more than 8 bits."""
    return (index * 7919 + rank * 31) % 97 + 1


class Large:
    """Inputs and outputs of one call on this rank, which know where offsets could lose their high bits."""

    def __init__(self, comm: shotcast.Communicator, dtype: torch.dtype) -> None:
        self.comm, self.dtype = comm, dtype
        self.made: list[torch.Tensor] = []
        self.shared: list[torch.Tensor] = []

    def borders(self, count: int) -> list[int]:
        """Return the first and the last element, and those next to 2^29 to 2^33 elements and bytes."""
        powers = {1 << bits for bits in range(29, 34)} | {(1 << bits) // self.dtype.itemsize for bits in range(29, 34)}
        near = {power + step for power in powers for step in (-1, 0, 1)}
        return sorted(index for index in near | {0, count - 1} if 0 <= index < count)

    def tensor(self, count: int, marks: Sequence[int], writable: bool) -> torch.Tensor:
        item = self.dtype.itemsize
        if self.comm.device.type == "cuda":
            return torch.zeros(count, dtype=self.dtype, device=self.comm.device)
        made, shared = sparse(count * item, [mark * item for mark in marks], writable)
        self.made.append(made)
        if shared is not None:
            self.made.append(shared)
            self.shared.append(shared)
        return made.view(self.dtype)

    def input(self, count: int, marks: Sequence[int]) -> torch.Tensor:
        """Return an input of ``count`` elements, zero but at ``marks``."""
        x = self.tensor(count, marks, writable=False)
        for mark in marks:
            x[mark] = value(self.comm.rank, mark)
        return x

    def output(self, count: int, marks: Sequence[int]) -> torch.Tensor:
        out = self.tensor(count, marks, writable=True)
        for mark in marks:
            for index in range(max(0, mark - 3), min(count, mark + 4)):
                out[index] = 99
        return out

    def check(self, out: torch.Tensor, marks: Sequence[int], wanted: Callable[[int], float], what: Any) -> None:
        """Compare ``out`` at ``marks`` and next to them with ``wanted``, and elsewhere with zero."""
        settle(self.comm)
        looked_at = {i for mark in marks for i in range(max(0, mark - 3), min(len(out), mark + 4))}
        for index in looked_at:
            assert float(out[index]) == wanted(index), (what, len(out), index, float(out[index]), wanted(index))
        if self.comm.device.type == "cuda":
            found = sum(int(part.count_nonzero()) for part in out.split(1 << 28))
            assert found == sum(wanted(index) != 0 for index in looked_at), what
        assert not any(int(shared.count_nonzero()) for shared in self.shared), what

    def close(self) -> None:
        for made in self.made:
            unmap(made)
        self.made.clear()
        self.shared.clear()


def sums(device: str, steps: Sequence[int], algorithms: Sequence[str]) -> int:
    """Sum tensors of 4 GiB and ``steps`` elements of bfloat16, whole and in parts. Return the number of calls."""
    with shotcast.Communicator(device=device, timeout_s=200) as comm:
        return sum(_sums(comm, (1 << 31) + step, algorithms) for step in steps)


def _sums(comm: shotcast.Communicator, count: int, algorithms: Sequence[str]) -> int:
    ranks = range(comm.world_size)
    large = Large(comm, torch.bfloat16)
    marks = large.borders(count)
    marked = set(marks)

    def total(index: int) -> int:
        return sum(value(r, index) for r in ranks) if index in marked else 0

    x, out = large.input(count, marks), large.output(count, marks)
    for algorithm in algorithms:
        comm.all_reduce(x, out=out, algorithm=algorithm)
        large.check(out, marks, total, ("all_reduce", algorithm))
    large.close()
    part = count // comm.world_size
    parts, first = large.borders(part), comm.rank * part
    marked.clear()
    marked.update(r * part + mark for r in ranks for mark in parts)
    x, out = large.input(part * comm.world_size, sorted(marked)), large.output(part, parts)
    scattering = (
        [name for name in algorithms if name in ("one_shot", "ring")] if comm.device.type == "cpu" else ["auto"]
    )
    for algorithm in scattering:
        comm.reduce_scatter(x, out=out, algorithm=algorithm)
        large.check(out, parts, lambda index: total(first + index), ("reduce_scatter", algorithm))
    large.close()
    return len(algorithms) + len(scattering)


def copies(device: str, steps: Sequence[int], dtype: torch.dtype) -> int:
    """Gather, exchange, broadcast and pass on 4 GiB and ``steps`` elements. Return the number of calls."""
    with shotcast.Communicator(device=device, timeout_s=200) as comm:
        return sum(_copies(comm, (1 << 32) // dtype.itemsize + step, dtype) for step in steps)


def _copies(comm: shotcast.Communicator, count: int, dtype: torch.dtype) -> int:
    size, rank = comm.world_size, comm.rank
    large = Large(comm, dtype)
    part = count // size
    parts = large.borders(part)
    in_part = set(parts)
    gathered = sorted({r * part + mark for r in range(size) for mark in parts})
    in_gathered = set(gathered)
    out = large.output(part * size, gathered)
    comm.all_gather(large.input(part, parts), out=out)
    large.check(out, gathered, lambda i: value(i // part, i % part) if i % part in in_part else 0, "all_gather")
    comm.all_to_all(large.input(part * size, gathered), out=out)

    def exchanged(i: int) -> int:
        source = rank * part + i % part
        return value(i // part, source) if source in in_gathered else 0

    large.check(out, gathered, exchanged, "all_to_all")
    large.close()

    marks = large.borders(count)
    marked = set(marks)
    sizes = [count, *(5 for _ in range(1, size))]
    ends = [*marks, sum(sizes) - 1]
    out = large.output(sum(sizes), ends)
    comm.all_gather(large.input(count, marks) if rank == 0 else large.input(5, range(5)), out=out, sizes=sizes)

    def unevenly(i: int) -> int:
        return exact(i) if i < count else value((i - count) // 5 + 1, (i - count) % 5)

    def exact(i: int) -> int:
        return value(0, i) if i in marked else 0

    large.check(out, ends, unevenly, "uneven all_gather")
    large.close()
    for name in ("broadcast", "message"):
        x = large.input(count, marks) if rank == 0 else large.output(count, marks)
        if name == "broadcast":
            comm.broadcast(x, 0)
        elif rank < 2:
            comm.recv(x, 0) if rank else comm.send(x, 1)
        if name == "broadcast" or rank < 2:
            large.check(x, marks, exact, name)
        large.close()
    return 5


def norms(device: str, rows: int, hidden: int) -> None:
    """Sum and norm ``rows`` rows of bfloat16 in one call."""
    with shotcast.Communicator(device=device, timeout_s=200) as comm:
        size, count = comm.world_size, rows * hidden
        large = Large(comm, torch.bfloat16)
        weight = torch.ones(hidden, dtype=torch.bfloat16, device=comm.device)
        part = count // size
        marks = large.borders(count)
        every = sorted(set(marks) | {r * part + mark for r in range(size) for mark in large.borders(part)})
        marked = set(every)
        x = large.input(count, every).view(rows, hidden)
        out = tuple(large.output(count, every).view(rows, hidden) for _ in range(2))
        residual = large.tensor(count, [], writable=False).view(rows, hidden)
        normed, new_residual = comm.all_reduce_rms_norm(x, residual, weight, out=(out[0], out[1]))
        settle(comm)
        for index in every:
            assert float(new_residual.view(-1)[index]) == sum(value(r, index) for r in range(size)), index
            assert float(normed.view(-1)[index]) > 0, index
            near = index + 5
            if near < count and near not in marked:
                assert float(normed.view(-1)[near]) == 0, index
        large.close()


def sizes_that_differ_above_32_bits(device: str) -> list[tuple[str, tuple[int, ...], float]]:
    """Have rank 1 pass 4 GiB more than the others, in each kind of call. Return the errors, by what differs."""
    found = []
    for name in ("all_reduce", "broadcast", "send"):
        with shotcast.Communicator(device=device, timeout_s=100) as comm:
            comm.barrier()
            large = Large(comm, torch.uint8 if name != "all_reduce" else torch.bfloat16)
            x = large.tensor(4096 + ((1 << 32) // large.dtype.itemsize) * (comm.rank == 1), [], writable=True)
            try:
                if name == "all_reduce":
                    comm.all_reduce(x, out=x, algorithm="two_shot")
                elif name == "broadcast":
                    comm.broadcast(x, 0)
                elif comm.rank < 2:
                    comm.recv(x, 0) if comm.rank else comm.send(x, 1)
                settle(comm)
            except shotcast.CollectiveMismatch as error:
                found.append((name, error.fields, len(error.calls)))
            large.close()
    return found
