"""Functions of the CUDA driver that PyTorch does not offer, or only in a slow form."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch


@functools.cache
def library() -> Any:
    """Return the driver's library, which every machine with a GPU has."""
    return ctypes.CDLL("libcuda.so.1")


class SideStream:
    """A stream of a GPU that waits for no other, not even for the default stream; for any thread.

    Made on a thread that uses the GPU. It lasts as long as the process.
    """

    def __init__(self, device: torch.device):
        self._context, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # the runtime makes its context current on this thread
            check(library().cuCtxGetCurrent(ctypes.byref(self._context)), "asking for the context")
            non_blocking = 1
            check(library().cuStreamCreate(ctypes.byref(self._stream), non_blocking), "creating a stream")

    def write_word(self, address: int, word: int) -> None:
        """Store 64 bits in memory of the GPU, beside kernels that may be running."""
        with self.current():
            error = library().cuStreamWriteValue64_v2(self._stream, ctypes.c_uint64(address), ctypes.c_uint64(word), 0)
            check(error, "writing a word")

    def read_words(self, address: int, count: int) -> list[int]:
        """Return ``count`` signed 64-bit words of the GPU's memory as they are now, beside kernels that may run."""
        words = (ctypes.c_int64 * count)()
        with self.current():
            source, nbytes = ctypes.c_uint64(address), ctypes.c_size_t(ctypes.sizeof(words))
            check(library().cuMemcpyDtoHAsync_v2(words, source, nbytes, self._stream), "reading words")
            check(library().cuStreamSynchronize(self._stream), "reading words")
        return list(words)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context of the GPU current on this thread."""
        check(library().cuCtxPushCurrent_v2(self._context), "making a context current")
        try:
            yield
        finally:
            library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def side_stream(device_index: int) -> SideStream:
    """Return the side stream of a GPU."""
    return SideStream(torch.device("cuda", device_index))


def new_stream(device: torch.device) -> torch.cuda.ExternalStream:
    """Return a stream of the current GPU that nothing else uses, until no object refers to it.

    Those that PyTorch makes come round again after 32. Captures may be under way.
    """
    made, non_blocking = ctypes.c_void_p(), 1
    with relaxed():
        check(library().cuStreamCreate(ctypes.byref(made), non_blocking), "creating a stream")
    handle = made.value
    assert handle is not None
    stream = torch.cuda.ExternalStream(handle, device)
    weakref.finalize(stream, _destroy, handle).atexit = False
    return stream


def _destroy(handle: int) -> None:
    with relaxed():
        library().cuStreamDestroy_v2(ctypes.c_void_p(handle))  # its work goes on


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread make calls that could disturb a capture, if they were ordered with it."""
    mode = ctypes.c_int(2)
    check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "relaxing captures")
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def check(error: int, what: str) -> None:
    """Raise RuntimeError if a function of the driver returned an error; ``what`` names the operation."""
    if error:
        text = ctypes.c_char_p()
        library().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'unknown').decode()} (CUDA error {error})")


def uuid_of(device: torch.device) -> str:
    """Return what identifies a GPU whatever number a process knows it by."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_gpus() -> dict[str, int]:
    """Return the numbers of the GPUs that this process sees, by UUID."""
    return {uuid_of(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
