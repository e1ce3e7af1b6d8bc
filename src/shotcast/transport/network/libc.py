"""C library calls from compiled code: nonblocking sockets, and waits for any of them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from shotcast.device.cpu.lazy_numba import cgutils, intrinsic, signature, types

_WORD, _INT = ir.IntType(64), ir.IntType(32)
_ADDRESS = ir.IntType(8).as_pointer()

EAGAIN, EINTR, ENOBUFS = 11, 4, 105
POLLIN, POLLOUT = 1, 4
_DONT_WAIT, _NO_SIGNAL = 0x40, 0x4000


def _errno(builder: Any) -> Any:
    kind = ir.FunctionType(_INT.as_pointer(), [])
    return builder.load(builder.call(cgutils.get_or_insert_function(builder.module, kind, "__errno_location"), []))


def _or_errno(builder: Any, result: Any) -> Any:
    """Return ``result``, or minus errno if it is negative."""
    place = cgutils.alloca_once_value(builder, result)
    with builder.if_then(builder.icmp_signed("<", result, ir.Constant(_WORD, 0))):
        builder.store(builder.neg(builder.sext(_errno(builder), _WORD)), place)
    return builder.load(place)


def _message_call(builder: Any, name: str, arguments: Any) -> Any:
    descriptor, message = arguments
    kind = ir.FunctionType(_WORD, [_INT, _ADDRESS, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    flags = ir.Constant(_INT, _DONT_WAIT | _NO_SIGNAL)
    result = builder.call(function, [builder.trunc(descriptor, _INT), builder.inttoptr(message, _ADDRESS), flags])
    return _or_errno(builder, result)


@intrinsic
def send_message(_context: Any, descriptor: Any, message: Any) -> Any:
    """Send as much of the data described by the ``struct msghdr`` at ``message`` as can be sent now.

    Returns the bytes sent, or minus errno.
    """

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _message_call(builder, "sendmsg", arguments)

    return signature(types.int64, types.int64, types.int64), generate


@intrinsic
def receive_message(_context: Any, descriptor: Any, message: Any) -> Any:
    """Receive available data into the buffers described by the ``struct msghdr`` at ``message``.

    Returns the bytes received, 0 after the end of the connection, or minus errno.
    """

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _message_call(builder, "recvmsg", arguments)

    return signature(types.int64, types.int64, types.int64), generate


@intrinsic
def poll(_context: Any, polled: Any, count: Any, timeout_ms: Any) -> Any:
    """Wait until one of ``count`` ``struct pollfd`` at ``polled`` is ready, or the timeout expires."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        polled_at, number, limit = arguments
        kind = ir.FunctionType(_INT, [_ADDRESS, _WORD, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "poll")
        found = builder.call(function, [builder.inttoptr(polled_at, _ADDRESS), number, builder.trunc(limit, _INT)])
        return builder.sext(found, _WORD)

    return signature(types.int64, types.int64, types.int64, types.int64), generate
