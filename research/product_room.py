"""The room that matrix products leave on a GPU, and products on SMs that the driver sets aside.

A carve-out is a request: the vendor library's kernel for a product may not heed it. So the room beside a product of the
library is that of the kernel which it is seen to launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import operator
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from large_gemm import Gemm
from matmuls import LibraryProduct, ShapedProduct, sms_of
from occupancy import Kernel, Multiprocessor, Room, multiprocessor, resident_blocks

from shotcast.device.triton.launch import Launch
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.memory import driver

_STATIC_SHARED_BYTES, _REGISTERS = 1, 4
"""Attributes of functions, by the driver's numbers."""
_GREEN_UNIT = 8
"""SMs of a green context come in multiples of this many from compute capability 9 on (CUDA Driver API)."""
_SIZE_OF_ROOM = operator.attrgetter("free_sms", "beside.registers", "beside.shared_bytes")


@functools.cache
def multiprocessor_of(device: torch.device) -> Multiprocessor:
    """Return the limits of an SM of a GPU."""
    return multiprocessor(torch.cuda.get_device_capability(device))


@dataclass(frozen=True, slots=True)
class GreenProduct(LibraryProduct):
    """Products of the vendor's library in a green context, whose blocks the driver keeps on other SMs.

    SMs of green contexts come in groups, so up to seven more are left. Such a product cannot be captured in a graph.
    """

    @contextlib.contextmanager
    def scope(self, device: torch.device) -> Iterator[None]:
        """Run what this thread launches on the SMs of a green context, until the scope ends.

        Meanwhile a stream of the context is current. It waits for the stream that was current at the beginning, which
        waits for it at the end.

        Raises:
            UnsupportedError: PyTorch or the GPU has no green contexts, or the stream is captured in a graph.
            ConfigError: the GPU does not have so many SMs.
        """
        context = _green_context(self.used_sms(device), device)
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("products in green contexts cannot be captured in a graph")
        stream = torch.cuda.current_stream(device)
        context.set_context()
        try:
            yield
        finally:
            context.pop_context()
            torch.cuda.set_stream(stream)

    def used_sms(self, device: torch.device) -> int:
        """Return the number of SMs that are not left."""
        used = (sms_of(device) - self.left_sms) // _GREEN_UNIT * _GREEN_UNIT
        if used < 1:
            raise ConfigError(f"left_sms is {self.left_sms}; {device} has {sms_of(device)} SMs, and some must remain")
        return used


@functools.lru_cache(maxsize=32)
def _green_context(sms: int, device: torch.device) -> Any:
    """Return the green context of so many SMs; it lasts as long as the process, as its stream may have work."""
    return new_green_context(sms, device)


def new_green_context(sms: int, device: torch.device) -> Any:
    """Make a green context of at least ``sms`` SMs: the driver rounds up to whole groups.

    Raises:
        UnsupportedError: PyTorch, CUDA or the GPU has none.
    """
    from torch.cuda import green_contexts

    if not green_contexts.SUPPORTED:
        raise UnsupportedError("this PyTorch was built without green contexts; CUDA 12.8 and later have them")
    try:
        return green_contexts.GreenContext.create(num_sms=sms, device_id=device.index or 0)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(f"{device} cannot set {sms} SMs aside as a green context: {reason}") from error


def room_beside_product(product: Any, a: torch.Tensor, b: torch.Tensor) -> Room:
    """Return what is left of the GPU while a product computes ``a @ b``: compiles ours, and runs the library's.

    Where the library takes several kernels, it is the room beside the one that leaves least. Where the profiler sees
    none, and on SMs of a green context, which its other users may fill, nothing counts as left.

    Raises:
        UnsupportedError: the kernel is interpreted.
    """
    sms, sm = sms_of(a.device), multiprocessor_of(a.device)
    if isinstance(product, ShapedProduct):
        bound = product.bound(a, b)
        return _room_of(kernel_of(bound), bound.programs, sms, sm)
    if isinstance(product, GreenProduct):
        used = product.used_sms(a.device)
        return Room(sm, sms - used, used, None)
    assert isinstance(product, LibraryProduct)
    product(a, b)  # the library sets itself up
    rooms = [
        _room_of(Kernel(seen.registers, seen.threads, seen.shared_bytes), seen.blocks, sms, sm)
        for seen in seen_kernels(lambda: product(a, b))
    ]
    return min(rooms, key=_SIZE_OF_ROOM, default=Room(sm, 0, sms, None))


def kernel_of(bound: Gemm) -> Kernel:
    """Return the needs of a launch of our product. Raises UnsupportedError if the kernel is interpreted."""
    with bound._lock, bound._on_device():
        return needs_of(bound._run)


def needs_of(launch: Launch) -> Kernel:
    """Return what a block takes of an SM. Raises UnsupportedError if the kernel is interpreted."""
    config, function = _loaded(launch)

    def attribute(number: int) -> int:
        value = ctypes.c_int(0)
        driver.check(driver.library().cuFuncGetAttribute(ctypes.byref(value), number, function), "asking a function")
        return value.value

    return Kernel(attribute(_REGISTERS), config.block[0], attribute(_STATIC_SHARED_BYTES) + config.shared_bytes)


def blocks_per_sm(launch: Launch) -> int:
    """Return how many blocks an SM holds at once, as the driver says."""
    (config, function), blocks = _loaded(launch), ctypes.c_int(0)
    error = driver.library().cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks), function, ctypes.c_int(config.block[0]), ctypes.c_size_t(config.shared_bytes)
    )
    driver.check(error, "asking how many blocks fit")
    return blocks.value


def _loaded(launch: Launch) -> tuple[Any, ctypes.c_void_p]:
    """Return the configuration of a launch on the current device, and its function."""
    launch.load()
    if launch._prepared is None:
        raise UnsupportedError("an interpreted kernel takes nothing of a GPU")
    return launch._prepared.config, launch._prepared.arguments[1]


def _room_of(kernel: Kernel, blocks: int, sms: int, sm: Multiprocessor) -> Room:
    """Return what ``blocks`` leave of a GPU of ``sms`` SMs, which gives each SM a block before any gets another."""
    busy = min(sms, blocks)
    return Room(sm, sms - busy, busy, ((kernel, min(resident_blocks(kernel, sm), -(-blocks // sms))),))


class SeenKernel(NamedTuple):
    """A launch that the profiler saw: its blocks, and what each takes of an SM."""

    name: str
    blocks: int
    threads: int
    registers: int
    shared_bytes: int


def seen_kernels(call: Callable[[], Any]) -> list[SeenKernel]:
    """Return the kernels that ``call`` launches on GPUs, in their order, as PyTorch's profiler sees them."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return [
        SeenKernel(
            event["name"],
            math.prod(event["args"]["grid"]),
            math.prod(event["args"]["block"]),
            event["args"]["registers per thread"],
            event["args"]["shared memory"],
        )
        for event in sorted(events, key=lambda event: event.get("ts", 0))
        if event.get("cat") == "kernel"
    ]
