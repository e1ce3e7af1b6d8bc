"""CUDA driver functions that PyTorch lacks or only offers in a slow form."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

_NON_BLOCKING = 1


@functools.cache
def library() -> Any:
    """Load the driver's library, which every machine with a GPU has."""
    return ctypes.CDLL("libcuda.so.1")


class SideStream:
    """A GPU stream that waits for no other; usable from any thread, and created for good on one that uses the GPU."""

    def __init__(self, device: torch.device):
        self._context, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # the runtime makes its context current on this thread
            call("cuCtxGetCurrent", "asking for the context", ctypes.byref(self._context))
            call("cuStreamCreate", "creating a stream", ctypes.byref(self._stream), _NON_BLOCKING)

    def write_word(self, address: int, word: int) -> None:
        """Store 64 bits in GPU memory while kernels may be running."""
        with self.current():
            words = ctypes.c_uint64(address), ctypes.c_uint64(word)
            call("cuStreamWriteValue64_v2", "writing a word", self._stream, *words, 0)

    def read_words(self, address: int, count: int) -> list[int]:
        """Read ``count`` signed 64-bit words of GPU memory while kernels may be running."""
        words = (ctypes.c_int64 * count)()
        with self.current():
            source, nbytes = ctypes.c_uint64(address), ctypes.c_size_t(ctypes.sizeof(words))
            call("cuMemcpyDtoHAsync_v2", "reading words", words, source, nbytes, self._stream)
            call("cuStreamSynchronize", "reading words", self._stream)
        return list(words)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the GPU's context current on this thread."""
        call("cuCtxPushCurrent_v2", "making a context current", self._context)
        try:
            yield
        finally:
            library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def side_stream(device_index: int) -> SideStream:
    return SideStream(torch.device("cuda", device_index))


def new_stream(device: torch.device, urgent: bool = False) -> torch.cuda.ExternalStream:
    """Create a dedicated stream for good, even during captures; PyTorch's pool reuses its streams after 32.

    An ``urgent`` one has the highest priority.
    """
    made, least, most = ctypes.c_void_p(), ctypes.c_int(0), ctypes.c_int(0)
    with relaxed():
        if urgent:
            call("cuCtxGetStreamPriorityRange", "asking for priorities", ctypes.byref(least), ctypes.byref(most))
        call("cuStreamCreateWithPriority", "creating a stream", ctypes.byref(made), _NON_BLOCKING, most)
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
    allocates memory, whose descriptor the caller must close. Raises RuntimeError if this fails.
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
                call("cuMemCreate", what, ctypes.byref(handle), self._nbytes, ctypes.byref(properties), none)
            else:
                what, file = "mapping memory of another process", ctypes.c_void_p(descriptor)
                call("cuMemImportFromShareableHandle", what, ctypes.byref(handle), file, _FILE_DESCRIPTOR)
            with contextlib.ExitStack() as handles:  # what is mapped stays without its handle
                handles.callback(library().cuMemRelease, handle)
                call("cuMemAddressReserve", what, ctypes.byref(address), self._nbytes, ctypes.c_size_t(0), none, none)
                undone.callback(library().cuMemAddressFree, address, self._nbytes)
                call("cuMemMap", what, address, self._nbytes, ctypes.c_size_t(0), handle, none)
                undone.callback(library().cuMemUnmap, address, self._nbytes)
                access = ctypes.byref(_Access(place, _READ_AND_WRITE))
                call("cuMemSetAccess", what, address, self._nbytes, access, ctypes.c_size_t(1))
                if descriptor < 0:
                    call("cuMemExportToShareableHandle", what, ctypes.byref(made), handle, _FILE_DESCRIPTOR, none)
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
    call("cuThreadExchangeStreamCaptureMode", "relaxing captures", ctypes.byref(mode))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def call(function: str, what: str, *arguments: Any) -> None:
    """Call a driver function; ``what`` names the operation. Raises RuntimeError if it returns an error."""
    check(getattr(library(), function)(*arguments), what)


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
