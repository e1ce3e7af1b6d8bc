"""A kernel launched again and again with the same arguments but for a few addresses.

Triton's launcher binds, specialises and hashes all arguments at every call, tens of microseconds of host time. Here
that is done once; a launch fills in addresses and calls what Triton's launcher calls at its end. The only file that
knows Triton's launch interface; ``tests/kernels/test_launch.py`` holds it against the public launcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton

from shotcast.kernels.target import INTERPRETED


class Launch:
    """One kernel on one grid, bound but for some arguments.

    Args:
        kernel: a Triton kernel none of whose runtime arguments is specialised.
        programs: of the grid.
        arguments: every argument by name. Integers that stand for addresses are large enough to be 64-bit.
        open_names: arguments that each call gives, in this order.
        options: of the compilation, such as ``num_warps``.
    """

    __slots__ = ("_arguments", "_compiled", "_kernel", "_open_names", "_options", "_places", "_programs", "_values")

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
        self._places = tuple(kernel.arg_names.index(name) for name in open_names)
        self._values = [arguments[name] for name in kernel.arg_names]
        self._compiled: Any = None

    def load(self) -> None:
        """Compile the kernel and load it on the current device, if that has not been done."""
        if not INTERPRETED:
            self._compiled = self._kernel.warmup(**self._arguments, **self._options, grid=(self._programs,))
            self._compiled._init_handles()

    def __call__(self, stream: int, given: Sequence[Any]) -> None:
        """Enqueue on the CUDA stream with this handle, of the current device."""
        if INTERPRETED or triton.knobs.runtime.launch_enter_hook.calls:  # a profiler's, which wants to know
            arguments = self._arguments | dict(zip(self._open_names, given, strict=True))
            self._kernel[(self._programs,)](**arguments, **self._options)
            return
        if self._compiled is None:
            self.load()
        compiled, values = self._compiled, self._values
        for place, value in zip(self._places, given, strict=True):
            values[place] = value
        compiled.run(
            self._programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *values
        )
