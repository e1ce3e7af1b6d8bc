"""Compilation of CPU kernels, once per machine.

Machine code is cached on disk (in ``NUMBA_CACHE_DIR``, next to the sources, or in the user's cache directory), so other
ranks and later runs load it without importing numba. A schedule also contains code from the files it calls, and numbers
that ranks agree on. The cache key is therefore a digest of all CPU kernels and ``wire.py``, the function, the
processor, the versions of Python, numba and llvmlite, and numba's settings.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from llvmlite import binding, ir

from shotcast.device.cpu.vectors import call_function

logger = logging.getLogger(__name__)

_OPTIONS = {"nopython": True, "error_model": "numpy"}
_ARGUMENTS = 4
_ENTRY = "shotcast_entry"
_PACKAGE = Path(__file__).parents[2]
_DIGEST_BYTES = hashlib.sha256().digest_size
_FASTCALL = 0x80  # METH_FASTCALL of CPython: a function receives its arguments as an array

_SETTINGS = sorted(one for one in os.environ.items() if one[0].startswith("NUMBA_") and one[0] != "NUMBA_CACHE_DIR")
"""numba's settings before it is imported."""
_LOCK = threading.Lock()


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    rooms = ("device/cpu", "kernels/cpu", "transport/cpu", "transport/network")
    folders = [sorted((_PACKAGE / room).glob("*.py")) for room in rooms]
    for path in (*itertools.chain(*folders), _PACKAGE / "wire.py"):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def keep_on_disk(compilable: Any) -> None:
    """Enable numba's cache for ``compilable`` if there is a directory for it."""
    try:
        compilable.enable_caching()
        compilable._cache._cache_file._source_stamp = _sources_digest()
    except (RuntimeError, OSError) as error:
        logger.info("compiled host code of %s is not kept on disk: %s", compilable.__name__, error)


# -- the disk cache ---------------------------------------------------------------------------------------------


@functools.cache
def _machine() -> str:
    """Describe what machine code depends on besides the sources: versions, the processor and numba's settings."""
    file = Path(".numba_config.yaml")
    return repr(
        (
            sys.version,
            metadata.version("numba"),
            metadata.version("llvmlite"),
            binding.get_process_triple(),
            binding.get_host_cpu_name(),
            binding.get_host_cpu_features().flatten(),
            _SETTINGS,
            file.read_text() if file.is_file() else "",
        )
    )


def _file_of(function: Callable[..., Any], kind: str) -> Path | None:
    """Locate the file for the machine code of ``function``, in a folder that exists; None if there is no such folder.

    For code outside this package, the source file is also part of the key.
    """
    source = Path(function.__code__.co_filename)
    try:
        inside = source.is_relative_to(_PACKAGE)
        written = b"" if inside else source.read_bytes()
        cells = pickle.dumps([cell.cell_contents for cell in function.__closure__ or ()])
    except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
        logger.info("compiled host code of %s is not kept on disk: %s", function.__qualname__, error)
        return None
    digest = hashlib.sha256(written)
    for part in (kind, _machine(), _sources_digest(), function.__module__, function.__qualname__):
        digest.update(part.encode() + b"\0")
    digest.update(cells + function.__code__.co_code)
    for folder in _folders(source):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder / f"{function.__module__}.{function.__name__}-{digest.hexdigest()[:32]}.code"
    logger.info("compiled host code of %s is not kept on disk: no folder can be written", function.__qualname__)
    return None


def _folders(source: Path) -> list[Path]:
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    of_user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return [source.parent / "__pycache__", of_user / "shotcast"]


def _read(file: Path) -> bytes | None:
    """Read the machine code in a file; None if there is none or it is damaged."""
    with contextlib.suppress(OSError):
        kept = file.read_bytes()
        if hashlib.sha256(kept[_DIGEST_BYTES:]).digest() == kept[:_DIGEST_BYTES]:
            return kept[_DIGEST_BYTES:]
    return None


def _write(file: Path, code: bytes) -> None:
    new = file.with_suffix(f".{os.getpid()}")
    try:
        new.write_bytes(hashlib.sha256(code).digest() + code)
        new.replace(file)
    except OSError as error:
        logger.info("%s is not kept on disk: %s", file.name, error)


@contextlib.contextmanager
def _one_process_compiles(file: Path) -> Iterator[None]:
    """Let one process on the machine compile a function while the others wait to load the result from disk."""
    with contextlib.ExitStack() as held:
        try:
            lock = held.enter_context(open(file.with_suffix(".lock"), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # the lock ends with the process that holds it
        except OSError as error:
            logger.info("%s is compiled by each process: %s", file.name, error)
        yield


# -- machine code -----------------------------------------------------------------------------------------------------


def compile_function(function: Callable[..., Any], kind: str) -> Any:
    """Compile a function of four int64 arguments with numba.

    ``kind`` is ``schedule`` for a function that returns an int64, and ``arithmetic`` for one that returns nothing.
    """
    from numba import types
    from numba.core.compiler import Flags, compile_extra
    from numba.core.registry import cpu_target

    flags = Flags()
    cpu_target.options.parse_as_flags(flags, _OPTIONS)
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    contexts = cpu_target.typing_context, cpu_target.target_context
    result = types.int64 if kind == "schedule" else types.void
    return compile_extra(*contexts, function, (types.int64,) * _ARGUMENTS, result, flags, {})


def _machine_code(function: Callable[..., Any], kind: str) -> bytes:
    """Compile a function to an object file that contains it and its entry."""
    from numba.core.registry import cpu_target

    made = compile_function(function, kind)
    module = ir.Module("entry")
    module.triple, module.data_layout = binding.get_process_triple(), ""
    add_entry = _add_schedule_entry if kind == "schedule" else _add_arithmetic_entry
    add_entry(module, cpu_target.target_context, made.fndesc)
    linked = binding.parse_assembly(made.library.get_llvm_str())
    entry = str(module).replace('target datalayout = ""', f'target datalayout = "{linked.data_layout}"')
    linked.link_in(binding.parse_assembly(entry.replace(module.triple, linked.triple)))
    linked.verify()
    return bytes(cpu_target.target_context.codegen()._tm.emit_object(linked))


def _add_schedule_entry(module: Any, context: Any, descriptor: Any) -> None:
    """Add ``entry(self, arguments, count)``, a CPython function that runs without the interpreter lock."""
    word, none, pointer = ir.IntType(64), ir.VoidType(), ir.IntType(8).as_pointer()
    entry = ir.Function(module, ir.FunctionType(pointer, [pointer, pointer.as_pointer(), word]), _ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block())
    null = ir.Constant(pointer, None)
    with builder.if_then(builder.icmp_signed("!=", entry.args[2], ir.Constant(word, _ARGUMENTS)), likely=False):
        call_function(builder, "PyErr_BadArgument", ir.IntType(32))
        builder.ret(null)
    words = []
    for place in range(_ARGUMENTS):
        argument = builder.load(builder.gep(entry.args[1], [ir.Constant(word, place)]))
        words.append(call_function(builder, "PyLong_AsLongLong", word, argument))

    def return_if_raised() -> None:
        raised = builder.icmp_unsigned("!=", call_function(builder, "PyErr_Occurred", pointer), null)
        with builder.if_then(raised, likely=False):
            builder.ret(null)

    return_if_raised()
    state = call_function(builder, "PyEval_SaveThread", pointer)
    function = context.declare_function(module, descriptor)
    convention = context.call_conv
    _, status = convention.call_function(builder, function, descriptor.restype, descriptor.argtypes, words)
    call_function(builder, "PyEval_RestoreThread", none, state)
    return_if_raised()  # by a signal handler that ended a wait
    builder.ret(call_function(builder, "PyLong_FromLongLong", pointer, status))


def _add_arithmetic_entry(module: Any, context: Any, descriptor: Any) -> None:
    """Add a C function that takes the four words."""
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * _ARGUMENTS), _ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block())
    function = context.declare_function(module, descriptor)
    context.call_conv.call_function(builder, function, descriptor.restype, descriptor.argtypes, entry.args)
    builder.ret_void()


class _Loaded:
    """Machine code loaded into this process, and the address of its entry."""

    def __init__(self, code: bytes):
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        target = binding.Target.from_triple(binding.get_process_triple())
        machine = target.create_target_machine(jit=True, codemodel="jitdefault")
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.address = self._engine.get_function_address(_ENTRY)


class _Function:
    """A function of four int64 arguments that is compiled or loaded from disk on first use."""

    _kind = ""

    def __init__(self, function: Callable[[int, int, int, int], Any]):
        self._function = function
        self._loaded: _Loaded | None = None

    def _load(self) -> int:
        """Return the address of the entry. The caller holds the lock."""
        if self._loaded is None:
            self._loaded = _Loaded(self._code())
        return self._loaded.address

    def _code(self) -> bytes:
        file = _file_of(self._function, self._kind)
        if file is None:
            return _machine_code(self._function, self._kind)
        if (code := _read(file)) is not None:
            return code
        with _one_process_compiles(file):
            if (code := _read(file)) is None:
                code = _machine_code(self._function, self._kind)
                _write(file, code)
        return code


class _MethodDefinition(ctypes.Structure):
    """CPython's ``PyMethodDef``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("documentation", ctypes.c_char_p),
    )


class CompiledSchedule(_Function):
    """A collective as a compiled function of addresses, ``function(context, plan, x, out)``, that returns a status."""

    _kind = "schedule"
    _callable: Callable[[int, int, int, int], int] | None = None

    def get(self) -> Callable[[int, int, int, int], int]:
        """Return the machine code, compiled or loaded on first use; it raises exceptions of signal handlers during
        waits.
        """
        with _LOCK:
            if self._callable is None:
                definition = _MethodDefinition(self._function.__name__.encode(), self._load(), _FASTCALL, None)
                new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
                kept = self._loaded, definition  # for the lifetime of the function
                self._callable = new(("PyCFunction_NewEx", ctypes.pythonapi))(ctypes.addressof(definition), kept, None)
            assert self._callable is not None
            return self._callable


class Arithmetic(_Function):
    """Compiled arithmetic ``function(destination, sources, world_size, count)``, called by its address.

    A schedule thus compiles once for all dtypes, and the arithmetic once for all schedules.
    """

    _kind = "arithmetic"

    def address(self) -> int:
        """Return the address of the machine code, compiled or loaded on first use."""
        with _LOCK:
            return self._load()
