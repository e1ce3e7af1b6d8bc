"""A kernel launched again and again with the same arguments but for a few addresses.

Triton's launcher binds, specialises and hashes all arguments at every call, tens of microseconds of host time. Here
that is done once: the arguments lie in memory as the kernel takes them, a launch writes its addresses there and calls
the driver. The only file that knows Triton's launch interface; ``tests/device/test_launch.py`` holds it against the
public launcher.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton

from shotcast.device.triton.intrinsics import INTERPRETED
from shotcast.memory import driver

_TYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
}
"""Types of arguments, as Triton calls them."""
_SCRATCH = 2
"""Arguments that Triton adds to every kernel: memory for itself, which these kernels do not ask for."""
_PROGRAMMATIC_STREAM_SERIALIZATION, _COOPERATIVE = 6, 2


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attributes_count", ctypes.c_uint),
    )


class _Ready(NamedTuple):
    """What the driver is called with; ``opened`` are the values that each call gives."""

    opened: tuple[Any, ...]
    config: _Config
    arguments: tuple[Any, ...]
    enqueue: Any
    kept: tuple[Any, ...]
    """What ``arguments`` point to."""


class Launch:
    """One kernel on one grid, bound but for some arguments.

    Args:
        kernel: a Triton kernel none of whose runtime arguments is specialised.
        programs: of the grid.
        arguments: every argument by name. Integers that stand for addresses are large enough to be 64-bit.
        open_names: arguments that each call gives, in this order.
        options: of the compilation, such as ``num_warps``.
    """

    __slots__ = ("_arguments", "_kernel", "_open_names", "_options", "_programs", "_ready")

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
        self._ready: _Ready | None = None

    def load(self) -> None:
        """Compile the kernel and load it on the current device, if that has not been done."""
        if INTERPRETED or self._ready is not None:
            return
        compiled = self._kernel.warmup(**self._arguments, **self._options, grid=(self._programs,))
        compiled._init_handles()
        metadata = compiled.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
            raise RuntimeError(f"{compiled.name} wants memory or clusters, which a launch here does not give it")
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
        opened = tuple(values[name] for name in self._open_names)
        self._ready = _Ready(opened, config, arguments, driver.library().cuLaunchKernelEx, (cells, compiled))

    def __call__(self, stream: int, given: Sequence[Any]) -> None:
        """Enqueue on the CUDA stream with this handle, of the current device."""
        if INTERPRETED or triton.knobs.runtime.launch_enter_hook.calls:  # a profiler's, which wants to know
            arguments = self._arguments | dict(zip(self._open_names, given, strict=True))
            self._kernel[(self._programs,)](**arguments, **self._options)
            return
        if self._ready is None:
            self.load()
            assert self._ready is not None
        opened, config, arguments, enqueue, _ = self._ready
        for cell, value in zip(opened, given, strict=True):
            cell.value = value
        config.stream = stream
        if error := enqueue(*arguments):
            driver.check(error, "launching a kernel")
