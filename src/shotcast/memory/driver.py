"""CUDA driver functions that PyTorch lacks or only offers in a slow form."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch


@functools.cache
def library() -> Any:
    """Load the driver's library, which every machine with a GPU has."""
    return ctypes.CDLL("libcuda.so.1")


class SideStream:
    """A GPU stream that waits for no other stream, not even the default one; usable from any thread.

    Created on a thread that uses the GPU. Lives as long as the process.
    """

    def __init__(self, device: torch.device):
        self._context, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # the runtime makes its context current on this thread
            check(library().cuCtxGetCurrent(ctypes.byref(self._context)), "asking for the context")
            non_blocking = 1
            check(library().cuStreamCreate(ctypes.byref(self._stream), non_blocking), "creating a stream")

    def write_word(self, address: int, word: int) -> None:
        """Store 64 bits in GPU memory while kernels may be running."""
        with self.current():
            error = library().cuStreamWriteValue64_v2(self._stream, ctypes.c_uint64(address), ctypes.c_uint64(word), 0)
            check(error, "writing a word")

    def read_words(self, address: int, count: int) -> list[int]:
        """Read ``count`` signed 64-bit words of GPU memory while kernels may be running."""
        words = (ctypes.c_int64 * count)()
        with self.current():
            source, nbytes = ctypes.c_uint64(address), ctypes.c_size_t(ctypes.sizeof(words))
            check(library().cuMemcpyDtoHAsync_v2(words, source, nbytes, self._stream), "reading words")
            check(library().cuStreamSynchronize(self._stream), "reading words")
        return list(words)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the GPU's context current on this thread."""
        check(library().cuCtxPushCurrent_v2(self._context), "making a context current")
        try:
            yield
        finally:
            library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def side_stream(device_index: int) -> SideStream:
    return SideStream(torch.device("cuda", device_index))


def new_stream(device: torch.device, urgent: bool = False) -> torch.cuda.ExternalStream:
    """Create a dedicated stream on the current GPU, which lives as long as the process.

    An ``urgent`` one has the highest priority.

    PyTorch's pool reuses its streams after 32. Captures may be in progress.
    """
    made, non_blocking, least, most = ctypes.c_void_p(), 1, ctypes.c_int(0), ctypes.c_int(0)
    with relaxed():
        if urgent:
            check(
                library().cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(most)), "asking for priorities"
            )
        check(library().cuStreamCreateWithPriority(ctypes.byref(made), non_blocking, most), "creating a stream")
    handle = made.value
    assert handle is not None
    return torch.cuda.ExternalStream(handle, device)


class GpuBytes:
    """Bytes of GPU memory in a form that PyTorch accepts without a copy."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("unused", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _FILE_DESCRIPTOR, _DEVICE, _READ_AND_WRITE = 1, 1, 1, 3


class SharedMemory:
    """GPU memory that other processes can map through a file descriptor, at an address of this process's GPU.

    Only :meth:`release` waits for GPU work. The GPU's side stream must exist (:func:`side_stream`), and ``nbytes`` must
    be a multiple of 2 MiB. ``descriptor`` refers to another process's memory, on a GPU that this one can access; -1
    allocates memory, whose descriptor the caller must close. Raises RuntimeError if there is no memory, or it cannot be
    mapped.
    """

    def __init__(self, device_index: int, nbytes: int, descriptor: int = -1):
        self._index, self._nbytes = device_index, ctypes.c_size_t(nbytes)
        place = _Location(_DEVICE, device_index)
        handle, address, made = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(-1)
        none = ctypes.c_uint64(0)
        with side_stream(device_index).current(), relaxed(), contextlib.ExitStack() as undone:
            if descriptor < 0:
                what = f"taking {nbytes} bytes of GPU {device_index}"
                properties = _AllocationProperties(_PINNED, _FILE_DESCRIPTOR, place)
                taken = library().cuMemCreate(ctypes.byref(handle), self._nbytes, ctypes.byref(properties), none)
                check(taken, what)
            else:
                what, file = "mapping memory of another process", ctypes.c_void_p(descriptor)
                check(library().cuMemImportFromShareableHandle(ctypes.byref(handle), file, _FILE_DESCRIPTOR), what)
            with contextlib.ExitStack() as handles:  # what is mapped stays without its handle
                handles.callback(library().cuMemRelease, handle)
                reserved = library().cuMemAddressReserve(
                    ctypes.byref(address), self._nbytes, ctypes.c_size_t(0), none, none
                )
                check(reserved, what)
                undone.callback(library().cuMemAddressFree, address, self._nbytes)
                check(library().cuMemMap(address, self._nbytes, ctypes.c_size_t(0), handle, none), what)
                undone.callback(library().cuMemUnmap, address, self._nbytes)
                access = ctypes.byref(_Access(place, _READ_AND_WRITE))
                check(library().cuMemSetAccess(address, self._nbytes, access, ctypes.c_size_t(1)), what)
                if descriptor < 0:
                    given = ctypes.byref(made), handle
                    check(library().cuMemExportToShareableHandle(*given, _FILE_DESCRIPTOR, none), what)
            undone.pop_all()
        self.address, self.descriptor = int(address.value), int(made.value)

    def release(self) -> None:
        """Unmap the memory. All work on it must have ended."""
        with side_stream(self._index).current(), relaxed():
            library().cuMemUnmap(ctypes.c_uint64(self.address), self._nbytes)
            library().cuMemAddressFree(ctypes.c_uint64(self.address), self._nbytes)


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Allow this thread to make calls that could disturb a capture if they were ordered with it."""
    mode = ctypes.c_int(2)
    check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "relaxing captures")
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def check(error: int, what: str) -> None:
    """Raise RuntimeError if a driver function returned an error; ``what`` names the operation."""
    if error:
        text = ctypes.c_char_p()
        library().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'unknown').decode()} (CUDA error {error})")


def uuid_of(device: torch.device) -> str:
    """Return a GPU's UUID, which does not depend on how a process numbers it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_gpus() -> dict[str, int]:
    """Return the numbers, by UUID, of the GPUs that this process sees."""
    return {uuid_of(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
