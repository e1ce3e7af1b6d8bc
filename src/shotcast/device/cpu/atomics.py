"""Atomics and other primitives on plain memory addresses, for CPU kernels.

``load_acquire`` and ``store_release`` are LLVM atomics of 64 bits. Everything a rank wrote before
``store_release(address, value)`` is visible to the rank whose ``load_acquire(address)`` returns that value, and nothing
that rank writes afterward affects what the first rank read before. On x86 both compile to ordinary moves, on aarch64 to
ldar and stlr. All addresses and values are int64.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir

from shotcast.device.cpu.floats import I32, WORD
from shotcast.device.cpu.lazy_numba import cgutils, intrinsic
from shotcast.device.cpu.vectors import call_function, number

_BYTE_POINTER = ir.IntType(8).as_pointer()
_MACHINE = platform.machine().lower()


def _word_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, WORD.as_pointer())


@intrinsic("int64")
def load(builder: Any, address: Any) -> Any:
    """Load the word at ``address``, which no other rank writes at the same time."""
    return builder.load(_word_at(builder, address))


@intrinsic()
def store(builder: Any, address: Any, value: Any) -> None:
    """Store the word at ``address``, which no other rank reads at the same time."""
    builder.store(value, _word_at(builder, address))


@intrinsic("int64")
def load_acquire(builder: Any, address: Any) -> Any:
    """Load the word at ``address``, written by another rank with :func:`store_release`."""
    return builder.load_atomic(_word_at(builder, address), "acquire", 8)


@intrinsic()
def store_release(builder: Any, address: Any, value: Any) -> None:
    """Store the word at ``address`` after everything that this rank has read and written."""
    builder.store_atomic(value, _word_at(builder, address), "release", 8)


@intrinsic()
def pause(builder: Any) -> None:
    """Tell the core that this is a spinning loop."""
    if _MACHINE in ("x86_64", "amd64"):
        call_function(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif _MACHINE in ("aarch64", "arm64"):
        call_function(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))  # yield


@intrinsic()
def copy(builder: Any, destination: Any, source: Any, nbytes: Any) -> None:
    """Copy ``nbytes`` bytes between memory ranges that are disjoint or identical."""
    # Equal addresses are an in-place call, for which memcpy is undefined.
    with builder.if_then(builder.icmp_signed("!=", destination, source)):
        pointers = (builder.inttoptr(address, _BYTE_POINTER) for address in (destination, source))
        cgutils.raw_memcpy(builder, *pointers, nbytes, 1)


@intrinsic()
def call_arithmetic(builder: Any, function: Any, destination: Any, sources: Any, world_size: Any, count: Any) -> None:
    """Call the ``Arithmetic`` (:mod:`shotcast.device.cpu.compilation`) at address ``function``."""
    kind = ir.FunctionType(ir.VoidType(), [WORD] * 4)
    builder.call(builder.inttoptr(function, kind.as_pointer()), [destination, sources, world_size, count])


@intrinsic("int64")
def monotonic_ns(builder: Any) -> Any:
    """Read the clock used for deadlines, in nanoseconds; it continues while a process is stopped."""
    timespec = cgutils.alloca_once(builder, ir.ArrayType(WORD, 2))
    call_function(builder, "clock_gettime", I32, ir.Constant(I32, 1), timespec)  # CLOCK_MONOTONIC
    now = builder.load(timespec)
    seconds = builder.mul(builder.extract_value(now, 0), number(1_000_000_000))
    return builder.add(seconds, builder.extract_value(now, 1))


@intrinsic()
def sleep_ns(builder: Any, duration: Any) -> None:
    """Release the core for ``duration`` nanoseconds (under a second); with 0, yield it to other runnable threads."""
    with builder.if_else(builder.icmp_signed("==", duration, number(0))) as (now, later):
        with now:
            call_function(builder, "sched_yield", I32)
        with later:
            timespec = cgutils.alloca_once_value(builder, cgutils.pack_array(builder, [number(0), duration], WORD))
            call_function(builder, "nanosleep", I32, timespec, ir.Constant(_BYTE_POINTER, None))


@intrinsic("boolean")
def interrupted(builder: Any) -> Any:
    """Run the handlers of pending signals, on the main thread; return whether one of them raised.

    Its exception stays pending in the interpreter until the compiled code returns. This takes the interpreter lock,
    which the caller must not hold.
    """
    state = call_function(builder, "PyGILState_Ensure", I32)
    raised = builder.icmp_signed("!=", call_function(builder, "PyErr_CheckSignals", I32), ir.Constant(I32, 0))
    call_function(builder, "PyGILState_Release", ir.VoidType(), state)
    return raised
