"""NCCL's functions, called directly: PyTorch's process groups abort the whole job when a call times out."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 4, 5, 6, 7
"""Values of ncclResult_t."""

_FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
DTYPES = {name: code for code, name in enumerate(("int8", "uint8", "int32", "uint32", "int64", "uint64", *_FLOATS))}
"""ncclDataType_t by dtype: the dtypes that NCCL reduces (FP8 since 2.24, from compute capability 9.0 on)."""
REDUCTIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
"""ncclRedOp_t by reduction."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId: identifies the group that ranks create."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_POINTER), _INT, UniqueId, _INT),
    "ncclCommGetAsyncError": (_POINTER, ctypes.POINTER(_INT)),
    "ncclCommAbort": (_POINTER,),
    "ncclCommDestroy": (_POINTER,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # sent, received, count, type, [reduction,] [root,] communicator, stream
    "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclReduceScatter": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _POINTER, _POINTER),
    "ncclBroadcast": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
}
"""Arguments of the functions, from nccl.h; each returns an ncclResult_t."""


def keep_graphs_from_registering() -> None:
    """Make NCCL stage the tensors of captured calls in its own buffers, unless the user overrides this.

    By default NCCL lets peers map the tensors of a captured call by address until shortly after the graph is destroyed.
    In 3 of 21 runs of a test, first replays then returned previously sent data (NCCL 2.28.9;
    docs/reference/hardware.md). Call this before the first capture.
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


@functools.cache
def library() -> Any:
    """Load the NCCL that PyTorch was installed with. Raises OSError if there is none."""
    keep_graphs_from_registering()
    found = ctypes.CDLL("libnccl.so.2")
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    found.ncclGetErrorString.restype = ctypes.c_char_p
    found.ncclGetLastError.argtypes, found.ncclGetLastError.restype = (ctypes.c_void_p,), ctypes.c_char_p
    return found


def error_text(result: int) -> str:
    """Return the message for a result other than SUCCESS."""
    last = (library().ncclGetLastError(None) or b"").decode().strip()
    return f"{library().ncclGetErrorString(result).decode()}{f' ({last})' if last else ''}"
