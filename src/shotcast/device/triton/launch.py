"""Repeated launches of a kernel with the same arguments except for a few addresses.

Triton's launcher binds, specializes and hashes all arguments at every call, which takes tens of microseconds. Here the
arguments stay in memory in the form that the kernel takes, and a launch writes its addresses there and calls the
driver. This is the only file that uses Triton's launch interface; ``tests/device/test_launch.py`` compares it with the
public launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton

from shotcast.device.triton.intrinsics import INTERPRETED
from shotcast.hardware.detect import available_cores
from shotcast.memory import driver, nvshmem_library

_TYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
}
"""Argument types, by Triton's names."""
_SCRATCH = 2
"""The number of arguments that Triton adds to every kernel, for scratch memory that these kernels do not use."""
_PROGRAMMATIC_STREAM_SERIALIZATION, _COOPERATIVE = 6, 2
_MOST_DYNAMIC_SHARED_BYTES, _SHARED_MEMORY_CARVEOUT = 8, 9
"""Function attributes, by the driver's numbers."""
_ALL_SHARED_MEMORY = 100
"""The percentage of an SM's cache and shared memory to use as shared memory."""

_JOINED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Compiled kernels whose modules have NVSHMEM's state."""


class Wide(int):
    """An integer in a tuple that kernels take as 64 bits, however small it is."""


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 60),
    )


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attributes_count", ctypes.c_uint),
    )


class _Prepared(NamedTuple):
    """The arguments of the driver's launch function; ``open_cells`` hold the values that change from call to call."""

    open_cells: tuple[Any, ...]
    config: _Config
    arguments: tuple[Any, ...]
    enqueue: Any
    owners: tuple[Any, ...]
    """Objects that must outlive ``arguments``, which points to them."""


class Launch:
    """One kernel on one grid, with all but a few arguments bound.

    Args:
        kernel: a Triton kernel none of whose runtime arguments is specialized.
        programs: the number of programs in the grid.
        arguments: every argument by name, some of them tuples. Integers that stand for addresses must be large enough
            to be 64-bit, or :class:`Wide`.
        open_names: the arguments that each call supplies, in this order, tuples as their elements.
        options: compiler options, such as ``num_warps``. If ``extern_libs`` includes NVSHMEM's device functions, this
            process must be one of NVSHMEM's PEs.
        padding_bytes: shared memory of a block beyond what the kernel uses. Any number, even 0, gives an SM that runs
            the kernel as much shared memory and as little cache as it can have, for blocks of other kernels.
    """

    __slots__ = ("_kernel", "_open_names", "_padding_bytes", "_prepared", "arguments", "options", "programs")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        arguments: dict[str, Any],
        open_names: Sequence[str],
        options: dict[str, Any],
        padding_bytes: int | None = None,
    ):
        self._kernel, self.programs, self.arguments, self.options = kernel, programs, arguments, options
        self._open_names = tuple(open_names)
        self._padding_bytes = padding_bytes
        self._prepared: _Prepared | None = None

    @property
    def launches(self) -> tuple[Launch]:
        """This launch, as other calls have several."""
        return (self,)

    def load(self) -> None:
        """Compile the kernel and load it on the current device, unless that is already done."""
        if INTERPRETED or self._prepared is not None:
            return
        compiled = self._compile()
        compiled._init_handles()
        if self._calls_nvshmem and compiled not in _JOINED:  # once, as it waits for the GPU
            nvshmem_library.library().initialise_module(compiled.module)
            _JOINED.add(compiled)
        metadata = compiled.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
            raise RuntimeError(
                f"{compiled.name} needs scratch memory or clusters, which this launcher does not provide"
            )
        opened, cells = self._argument_cells(compiled)
        cells += [ctypes.c_void_p(None) for _ in range(_SCRATCH)]
        shared_bytes = metadata.shared + (self._padding_bytes or 0)
        if self._padding_bytes is not None:
            _allow_shared_memory(compiled.function, shared_bytes)
        attributes = [_PROGRAMMATIC_STREAM_SERIALIZATION] if metadata.launch_pdl else []
        attributes += [_COOPERATIVE] if metadata.launch_cooperative_grid else []
        config = _Config(
            (self.programs, 1, 1),
            (32 * metadata.num_warps, 1, 1),
            shared_bytes,
            None,
            (_Attribute * max(1, len(attributes)))(*(_Attribute(kind, 0, 1) for kind in attributes)),
            len(attributes),
        )
        pointers = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        arguments = (ctypes.byref(config), ctypes.c_void_p(compiled.function), pointers, None)
        open_cells = tuple(cell for name in self._open_names for cell in opened[name])
        self._prepared = _Prepared(open_cells, config, arguments, driver.library().cuLaunchKernelEx, (cells, compiled))

    def _argument_cells(self, compiled: Any) -> tuple[dict[str, list[Any]], list[Any]]:
        """Return the values of each argument, which calls may change, and all that the kernel takes, in its order."""
        opened = {name: list(_cells(kind, self.arguments[name])) for name, kind in compiled.src.signature.items()}
        return opened, [cell for cells in opened.values() for cell in cells]

    def _compile(self) -> Any:
        plain = {name: unspecialized(value) for name, value in self.arguments.items()}
        return self._kernel.warmup(**plain, **self.options, grid=(self.programs,))

    @property
    def _constants(self) -> tuple[Any, ...]:
        """Return what the kernel is compiled for, if SHAPE is its only constant."""
        return self._kernel, str(self.arguments["SHAPE"]), str(sorted(self.options.items()))

    @property
    def _calls_nvshmem(self) -> bool:
        return nvshmem_library.EXTERN_LIBRARY in self.options.get("extern_libs", ())

    def _filled(self, call_values: Sequence[Any]) -> dict[str, Any]:
        """Return all arguments, with the values of a call for the open ones."""
        values = iter(call_values)
        filled = {name: _mapped(lambda _: next(values), self.arguments[name]) for name in self._open_names}
        return self.arguments | filled

    def __call__(self, stream: int, call_values: Sequence[Any]) -> None:
        """Enqueue the kernel on a CUDA stream of the current device, given by its handle."""
        if INTERPRETED:
            self._kernel[(self.programs,)](**self._filled(call_values), **self.options)
            return
        if self._prepared is None:
            self.load()
            assert self._prepared is not None
        if triton.knobs.runtime.launch_enter_hook.calls:  # a profiler hooks into Triton's own launcher
            _, compiled = self._prepared.owners
            given = self._filled(call_values)
            compiled[(self.programs, 1, 1)](*(given[name] for name in compiled.src.signature), stream=stream)
            return
        open_cells, config, arguments, enqueue, _ = self._prepared
        for cell, value in zip(open_cells, call_values, strict=True):
            cell.value = value
        config.stream = stream
        if error := enqueue(*arguments):
            driver.check(error, "launching a kernel")


def load_all(launches: Sequence[Launch], rank: int, ranks: int) -> None:
    """Compile and load kernels whose only constant is SHAPE on the current device, several at a time.

    ``rank`` is one of ``ranks`` of this host that load the same kernels at this time. They divide the cores and the
    kernels, which Triton keeps on disk: a rank first compiles its share, and then what others have not compiled yet.
    """
    if INTERPRETED:
        return
    missing = list({launch._constants: launch for launch in launches if launch._prepared is None}.values())
    device = triton.runtime.driver.active.get_current_device()  # which makes the driver before threads need it
    for launch in missing:  # nor do threads hash sources, or make a kernel's table of compiled forms
        _ = launch._kernel.cache_key, launch._kernel.device_caches[device]

    def compile_one(launch: Launch) -> None:
        # Python 3.11 may fail to parse on several threads (github.com/python/cpython/issues/106905). Loading compiles
        # again what failed here, and raises the error if there is a lasting one.
        with torch.cuda.device(device), contextlib.suppress(Exception):
            launch._compile()

    start, end = (len(missing) * each // ranks for each in (rank, rank + 1))
    with ThreadPoolExecutor(max(1, available_cores() // ranks), "shotcast-compile") as threads:
        for share in (missing[start:end], missing[end:] + missing[:start]):
            list(threads.map(compile_one, share))
    for launch in launches:
        launch.load()


def unspecialized(argument: Any) -> Any:
    """Return an argument of the same type whose value Triton does not specialize on.

    ``do_not_specialize`` has no effect inside a tuple: Triton compiles in values of 1, and divisibility by 16.
    """

    def plain(element: Any) -> Any:
        return element | 3 | isinstance(element, Wide) << 40 if isinstance(element, int) else element

    return _mapped(plain, argument) if isinstance(argument, tuple) else argument


def _cells(kind: Any, given: Any) -> Iterator[Any]:
    """Yield the values that a kernel takes for an argument of a Triton type: one for each element of a tuple."""
    if isinstance(kind, tuple):
        for inner, value in zip(kind, given, strict=True):
            yield from _cells(inner, value)
    elif kind != "constexpr":
        yield _TYPES[kind](given)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to all elements of a tuple."""
    if not isinstance(value, tuple):
        return function(value)
    elements = (_mapped(function, element) for element in value)
    return type(value)(*elements) if hasattr(value, "_fields") else tuple(elements)


def _allow_shared_memory(function: int, nbytes: int) -> None:
    """Allow a function ``nbytes`` of dynamic shared memory, unless it may already use as much."""
    handle, most = ctypes.c_void_p(function), ctypes.c_int(0)
    driver.call("cuFuncGetAttribute", "asking a function", ctypes.byref(most), _MOST_DYNAMIC_SHARED_BYTES, handle)
    if most.value < nbytes:
        what = f"asking for {nbytes} bytes of shared memory"
        driver.call("cuFuncSetAttribute", what, handle, _MOST_DYNAMIC_SHARED_BYTES, ctypes.c_int(nbytes))
    what = "asking for shared memory in place of cache"
    driver.call("cuFuncSetAttribute", what, handle, _SHARED_MEMORY_CARVEOUT, ctypes.c_int(_ALL_SHARED_MEMORY))
