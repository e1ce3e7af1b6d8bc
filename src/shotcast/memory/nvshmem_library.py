"""NVSHMEM's host functions, called through ctypes in its wheel's library. The only file that calls them.

The structures are version 1 of its initialization, which every NVSHMEM 3 accepts.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

from shotcast import env
from shotcast.errors import ConfigError

EXTERN_LIBRARY = "libnvshmem_device"
"""The name of the device functions' library when linking a kernel."""
_HOST, _DEVICE = "libnvshmem_host.so.3", f"{EXTERN_LIBRARY}.bc"
_WITH_UNIQUE_ID = 1 << 3
_INITIALISED = 2
"""The status from which the library counts as initialized."""
_UNIQUE_ID_BYTES = 128
_DEFAULTS = {
    "NVSHMEM_SYMMETRIC_SIZE": str(512 << 20),
    "NVSHMEM_CUMEM_GRANULARITY": str(64 << 20),
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_DISABLE_NCCL": "1",
}
"""Defaults for NVSHMEM's variables if the user has not set them.

The first is the heap size if the heap cannot grow, since some networks cannot reach memory that is mapped in steps. The
second is the growth step otherwise, which is 512 MiB by default. This package uses neither multicast nor the NCCL
connections that NVSHMEM would create for its collectives.
"""


def _version_of(structure: Any) -> int:
    return (1 << 16) + ctypes.sizeof(structure)


class _UniqueId(ctypes.Structure):
    """The library's nvshmemx_uniqueid_v1."""

    _fields_ = (("version", ctypes.c_int), ("internal", ctypes.c_ubyte * (_UNIQUE_ID_BYTES - 4)))


class _UniqueIdArguments(ctypes.Structure):
    """The library's nvshmemx_uniqueid_args_v1."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.POINTER(_UniqueId)),
        ("my_rank", ctypes.c_int),
        ("ranks", ctypes.c_int),
    )


class _Arguments(ctypes.Structure):
    """The library's nvshmemx_init_args_v1."""

    _fields_ = (("version", ctypes.c_int), ("unique_id", _UniqueIdArguments), ("content", ctypes.c_ubyte * 96))


class _Attributes(ctypes.Structure):
    """The library's nvshmemx_init_attr_v1."""

    _fields_ = (("version", ctypes.c_int), ("mpi_communicator", ctypes.c_void_p), ("arguments", _Arguments))


def folder() -> Path:
    """Return the folder of the library: NVSHMEM_LIB_DIR, or the folder in the package ``nvidia.nvshmem``. Raises
    ConfigError if it is missing or incomplete.
    """
    given = env.nvshmem_lib_dir()
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # there is no package `nvidia` at all
        spec = None
    packages = (spec.submodule_search_locations if spec else None) or ()
    places = [given] if given else [str(Path(package, "lib")) for package in packages]
    for place in places:
        if all(Path(place, name).is_file() for name in (_HOST, _DEVICE)):
            return Path(place)
    found = f"{', '.join(places)} lacks {_HOST} or {_DEVICE}" if places else "nvidia.nvshmem is not installed"
    raise ConfigError(
        f"NVSHMEM, which carries data between GPUs of several nodes, was not found: {found}. Install "
        "nvidia-nvshmem-cu13 (or -cu12, as PyTorch's CUDA), or set NVSHMEM_LIB_DIR"
    )


def extern_libs() -> dict[str, str]:
    """Return the device functions' library by name, in the form that Triton's compiler expects."""
    return {EXTERN_LIBRARY: str(folder() / _DEVICE)}


class Library:
    """NVSHMEM in this process. Functions raise RuntimeError if NVSHMEM reports an error, or end the process."""

    def __init__(self) -> None:
        # read once, when a unique ID is made or this process becomes a PE; ranks that differ could not map each other
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        if interface := env.socket_ifname():
            os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", interface)
        self._functions = ctypes.CDLL(str(folder() / _HOST), mode=ctypes.RTLD_GLOBAL)
        for name in ("nvshmem_malloc", "nvshmem_ptr"):
            getattr(self._functions, name).restype = ctypes.c_void_p

    @property
    def initialised(self) -> bool:
        """True if this process is a PE, through :meth:`initialise` or another user of the library."""
        return bool(self._functions.nvshmemx_init_status() >= _INITIALISED)

    def unique_id(self) -> bytes:
        """Create the id with which all PEs initialize; this process then hosts their rendezvous."""
        unique = _UniqueId(version=_version_of(_UniqueId))
        _check(self._functions.nvshmemx_get_uniqueid(ctypes.byref(unique)), "asking for a unique ID")
        return bytes(unique)

    def initialise(self, pe: int, pes: int, unique_id: bytes) -> None:
        """Make this process a PE, on the current GPU. Collective."""
        unique = _UniqueId.from_buffer_copy(unique_id)
        attributes = _Attributes(version=_version_of(_Attributes))
        attributes.arguments.version = _version_of(_Arguments)
        attributes.arguments.unique_id.version = _version_of(_UniqueIdArguments)
        functions, given = self._functions, ctypes.byref(attributes)
        _check(functions.nvshmemx_set_attr_uniqueid_args(pe, pes, ctypes.byref(unique), given), "naming the PEs")
        _check(functions.nvshmemx_hostlib_init_attr(_WITH_UNIQUE_ID, given), "initialising NVSHMEM")
        if not self.initialised:  # it returns success after some failures
            raise RuntimeError("initialising NVSHMEM failed; NVSHMEM_DEBUG=INFO makes it say why")

    @property
    def pe(self) -> int:
        """The PE number of this process."""
        return int(self._functions.nvshmem_my_pe())

    @property
    def pes(self) -> int:
        return int(self._functions.nvshmem_n_pes())

    def allocate(self, nbytes: int) -> int:
        """Allocate memory on every PE and return its address. Collective; all PEs must request the same size."""
        if address := self._functions.nvshmem_malloc(ctypes.c_size_t(nbytes)):
            return int(address)
        raise RuntimeError(f"NVSHMEM has no {nbytes} bytes more (NVSHMEM_SYMMETRIC_SIZE, NVSHMEM_MAX_MEMORY_PER_GPU)")

    def mapped(self, address: int, pe: int) -> int:
        """Return this GPU's address for the memory of ``pe`` at local ``address``; 0 if only puts reach it."""
        return int(self._functions.nvshmem_ptr(ctypes.c_void_p(address), pe) or 0)

    def complete_puts(self, stream: int) -> None:
        """Make a CUDA stream wait until all puts by this GPU's kernels are complete."""
        self._functions.nvshmemx_quiet_on_stream(ctypes.c_void_p(stream))

    def initialise_module(self, module: int) -> None:
        """Pass the library's state to a loaded CUDA module whose kernels call device functions."""
        _check(self._functions.nvshmemx_cumodule_init(ctypes.c_void_p(module)), "initialising a CUDA module")


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} failed (NVSHMEM status {status}); NVSHMEM_DEBUG=INFO makes it say why")


@functools.cache
def library() -> Library:
    """Load NVSHMEM in this process. Raises ConfigError if it is not installed."""
    return Library()
