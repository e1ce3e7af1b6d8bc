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

from shotcast.device.cpu.lazy_numba import cgutils, intrinsic, signature, types

_WORD = ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()
_MACHINE = platform.machine().lower()


def _word_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def load(_context: Any, address: Any) -> Any:
    """Load the word at ``address``, which no other rank writes at the same time."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(_word_at(builder, arguments[0]))

    return signature(types.int64, types.int64), generate


@intrinsic
def store(_context: Any, address: Any, value: Any) -> Any:
    """Store the word at ``address``, which no other rank reads at the same time."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _word_at(builder, arguments[0]))
        return target.get_dummy_value()

    return signature(types.void, types.int64, types.int64), generate


@intrinsic
def load_acquire(_context: Any, address: Any) -> Any:
    """Load the word at ``address``, written by another rank with :func:`store_release`."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word_at(builder, arguments[0]), "acquire", 8)

    return signature(types.int64, types.int64), generate


@intrinsic
def store_release(_context: Any, address: Any, value: Any) -> Any:
    """Store the word at ``address`` after everything that this rank has read and written."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word_at(builder, arguments[0]), "release", 8)
        return target.get_dummy_value()

    return signature(types.void, types.int64, types.int64), generate


@intrinsic
def pause(_context: Any) -> Any:
    """Tell the core that this is a spinning loop."""

    def generate(target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if _MACHINE in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif _MACHINE in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.Constant(ir.IntType(32), 1)])  # yield
        return target.get_dummy_value()

    return signature(types.void), generate


@intrinsic
def copy(_context: Any, destination: Any, source: Any, nbytes: Any) -> Any:
    """Copy ``nbytes`` bytes between memory ranges that are disjoint or identical."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, source, nbytes = arguments
        # Equal addresses are an in-place call, for which memcpy is undefined.
        with builder.if_then(builder.icmp_signed("!=", to, source)):
            cgutils.raw_memcpy(
                builder, builder.inttoptr(to, _BYTE_POINTER), builder.inttoptr(source, _BYTE_POINTER), nbytes, 1
            )
        return target.get_dummy_value()

    return signature(types.void, types.int64, types.int64, types.int64), generate


@intrinsic
def call_arithmetic(_context: Any, function: Any, destination: Any, sources: Any, world_size: Any, count: Any) -> Any:
    """Call the :class:`~shotcast.device.cpu.compilation.Arithmetic` at address ``function`` with the other four
    arguments."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return target.get_dummy_value()

    return signature(types.void, *(types.int64,) * 5), generate


@intrinsic
def monotonic_ns(_context: Any) -> Any:
    """Read the clock used for deadlines, in nanoseconds; it continues while a process is stopped."""

    def generate(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        timespec = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2))
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), timespec.type])
        clock_gettime = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(clock_gettime, [ir.Constant(ir.IntType(32), 1), timespec])  # CLOCK_MONOTONIC
        now = builder.load(timespec)
        seconds = builder.mul(builder.extract_value(now, 0), ir.Constant(_WORD, 1_000_000_000))
        return builder.add(seconds, builder.extract_value(now, 1))

    return signature(types.int64), generate


@intrinsic
def sleep_ns(_context: Any, duration: Any) -> Any:
    """Release the core for ``duration`` nanoseconds (under a second); with 0, yield it to other runnable threads."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        none = ir.Constant(_WORD, 0)
        with builder.if_else(builder.icmp_signed("==", arguments[0], none)) as (now, later):
            with now:
                kind = ir.FunctionType(ir.IntType(32), [])
                builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
            with later:
                timespec = cgutils.alloca_once_value(builder, cgutils.pack_array(builder, [none, arguments[0]], _WORD))
                kind = ir.FunctionType(ir.IntType(32), [timespec.type, _BYTE_POINTER])
                nanosleep = cgutils.get_or_insert_function(builder.module, kind, "nanosleep")
                builder.call(nanosleep, [timespec, ir.Constant(_BYTE_POINTER, None)])
        return target.get_dummy_value()

    return signature(types.void, types.int64), generate


@intrinsic
def interrupted(_context: Any) -> Any:
    """Run the handlers of pending signals, on the main thread; return whether one of them raised.

    Its exception stays pending in the interpreter until the compiled code returns. This takes the interpreter lock,
    which the caller must not hold.
    """

    def generate(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        number = ir.IntType(32)

        def call(name: str, result: Any, *arguments: Any) -> Any:
            kind = ir.FunctionType(result, [argument.type for argument in arguments])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

        state = call("PyGILState_Ensure", number)
        raised = builder.icmp_signed("!=", call("PyErr_CheckSignals", number), ir.Constant(number, 0))
        call("PyGILState_Release", ir.VoidType(), state)
        return raised

    return signature(types.boolean), generate
