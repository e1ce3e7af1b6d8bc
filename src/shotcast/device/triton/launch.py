"""Repeated launches of a kernel whose arguments are the same but for a few addresses.

Triton's launcher binds, specialises and hashes all arguments at every call, which takes tens of microseconds on the
host. Here that is done once: the arguments are in memory in the form that the kernel takes, and a launch writes its
addresses there and calls the driver. This is the only file that uses Triton's launch interface;
``tests/device/test_launch.py`` compares it with the public launcher.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton

from shotcast.device.triton.intrinsics import INTERPRETED
from shotcast.memory import driver, nvshmem_library

_TYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
}
"""Types of arguments, by Triton's names."""
_SCRATCH = 2
"""The number of arguments that Triton adds to every kernel, for scratch memory that these kernels do not use."""
_PROGRAMMATIC_STREAM_SERIALIZATION, _COOPERATIVE = 6, 2


_JOINED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The compiled kernels whose modules have the state of NVSHMEM."""


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
    """The arguments of the driver's launch function; ``open_cells`` hold the values that differ from call to call."""

    open_cells: tuple[Any, ...]
    config: _Config
    arguments: tuple[Any, ...]
    enqueue: Any
    owners: tuple[Any, ...]
    """Objects that must outlive ``arguments``, which point to them."""


class Launch:
    """One kernel on one grid, with all arguments bound but for some.

    Args:
        kernel: a Triton kernel none of whose runtime arguments is specialised.
        programs: the number of programs of the grid.
        arguments: every argument by name. Integers in place of addresses must be large enough to be 64-bit.
        open_names: the arguments that each call gives, in this order.
        options: compiler options, such as ``num_warps``. With NVSHMEM's device functions among ``extern_libs``, this
            process is one of NVSHMEM's PEs.
    """

    __slots__ = ("_arguments", "_kernel", "_open_names", "_options", "_prepared", "_programs")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        arguments: dict[str, Any],
        open_names: Sequence[str],
        options: dict[str, Any],
    ):
        self._kernel, self._programs, self._arguments, self._options = kernel, programs, arguments, options
        self._open_names = tuple(open_names)
        self._prepared: _Prepared | None = None

    def load(self) -> None:
        """Compile the kernel and load it on the current device, unless that has been done."""
        if INTERPRETED or self._prepared is not None:
            return
        compiled = self._kernel.warmup(**self._arguments, **self._options, grid=(self._programs,))
        compiled._init_handles()
        if self._calls_nvshmem and compiled not in _JOINED:  # once, as it waits for the GPU
            nvshmem_library.library().initialise_module(compiled.module)
            _JOINED.add(compiled)
        metadata = compiled.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
            raise RuntimeError(
                f"{compiled.name} needs scratch memory or clusters, which this launcher does not provide"
            )
        values = {
            name: _TYPES[kind](self._arguments[name])
            for name, kind in compiled.src.signature.items()
            if kind != "constexpr"
        }
        cells = [*values.values(), *(ctypes.c_void_p(None) for _ in range(_SCRATCH))]
        attributes = [_PROGRAMMATIC_STREAM_SERIALIZATION] if metadata.launch_pdl else []
        attributes += [_COOPERATIVE] if metadata.launch_cooperative_grid else []
        config = _Config(
            (self._programs, 1, 1),
            (32 * metadata.num_warps, 1, 1),
            metadata.shared,
            None,
            (_Attribute * max(1, len(attributes)))(*(_Attribute(kind, 0, 1) for kind in attributes)),
            len(attributes),
        )
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        arguments = (ctypes.byref(config), ctypes.c_void_p(compiled.function), pointers, None)
        open_cells = tuple(values[name] for name in self._open_names)
        self._prepared = _Prepared(open_cells, config, arguments, driver.library().cuLaunchKernelEx, (cells, compiled))

    @property
    def _calls_nvshmem(self) -> bool:
        return nvshmem_library.EXTERN_LIBRARY in self._options.get("extern_libs", ())

    def __call__(self, stream: int, call_values: Sequence[Any]) -> None:
        """Enqueue the kernel on the CUDA stream with this handle, of the current device."""
        if INTERPRETED or triton.knobs.runtime.launch_enter_hook.calls:  # a profiler hooks into Triton's own launcher
            if self._calls_nvshmem:
                self.load()
            arguments = self._arguments | dict(zip(self._open_names, call_values, strict=True))
            self._kernel[(self._programs,)](**arguments, **self._options)
            return
        if self._prepared is None:
            self.load()
            assert self._prepared is not None
        open_cells, config, arguments, enqueue, _ = self._prepared
        for cell, value in zip(open_cells, call_values, strict=True):
            cell.value = value
        config.stream = stream
        if error := enqueue(*arguments):
            driver.check(error, "launching a kernel")
