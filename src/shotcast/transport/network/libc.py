"""C library calls from compiled code: nonblocking sockets, and waits for any of them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from shotcast.device.cpu.floats import I32, WORD
from shotcast.device.cpu.lazy_numba import cgutils, intrinsic
from shotcast.device.cpu.vectors import call_function, number

_ADDRESS = ir.IntType(8).as_pointer()

EAGAIN, EINTR, ENOBUFS = 11, 4, 105
POLLIN, POLLOUT = 1, 4
_DONT_WAIT, _NO_SIGNAL = 0x40, 0x4000


def _message_call(builder: Any, name: str, descriptor: Any, message: Any) -> Any:
    """Call a function of a socket and a ``struct msghdr``; return its result, or minus errno if that is negative."""
    flags = ir.Constant(I32, _DONT_WAIT | _NO_SIGNAL)
    socket, described = builder.trunc(descriptor, I32), builder.inttoptr(message, _ADDRESS)
    result = call_function(builder, name, WORD, socket, described, flags)
    place = cgutils.alloca_once_value(builder, result)
    with builder.if_then(builder.icmp_signed("<", result, number(0))):
        errno = builder.load(call_function(builder, "__errno_location", I32.as_pointer()))
        builder.store(builder.neg(builder.sext(errno, WORD)), place)
    return builder.load(place)


@intrinsic("int64")
def send_message(builder: Any, descriptor: Any, message: Any) -> Any:
    """Send as much of the data described by the ``struct msghdr`` at ``message`` as can be sent now.

    Returns the bytes sent, or minus errno.
    """
    return _message_call(builder, "sendmsg", descriptor, message)


@intrinsic("int64")
def receive_message(builder: Any, descriptor: Any, message: Any) -> Any:
    """Receive available data into the buffers described by the ``struct msghdr`` at ``message``.

    Returns the bytes received, 0 after the end of the connection, or minus errno.
    """
    return _message_call(builder, "recvmsg", descriptor, message)


@intrinsic("int64")
def poll(builder: Any, polled: Any, count: Any, timeout_ms: Any) -> Any:
    """Wait until one of ``count`` ``struct pollfd`` at ``polled`` is ready, or the timeout expires."""
    limit = builder.trunc(timeout_ms, I32)
    return builder.sext(call_function(builder, "poll", I32, builder.inttoptr(polled, _ADDRESS), count, limit), WORD)
