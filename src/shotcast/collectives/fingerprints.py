"""Fingerprints of the kernels behind the forms of algorithms, and what has changed since they were recorded."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path

from shotcast.collectives.algorithm import Algorithms, Form
from shotcast.collectives.choice.table import Key, Table, operation_and_sms
from shotcast.device import fingerprint
from shotcast.wire import Op

_SHARED_ROOMS = ("collectives", "device", "kernels", "memory", "transport")
_SHARED_SOURCES = ("wire.py", *(f"{room}/**/*.py" for room in _SHARED_ROOMS))
_TRITON_OPTIONS = ("shotcast.transport.triton.binding:COMPILE_OPTIONS",)
_CPU_OPTIONS = tuple(f"shotcast.device.cpu.compilation:{kind}_OPTIONS" for kind in ("SCHEDULE", "ARITHMETIC"))


def of_operation(algorithms: Algorithms, op: Op, kernels: str) -> dict[str, str]:
    """Return the fingerprints of the kernels that serve an operation, by the names of the algorithms.

    An algorithm without a kernel of this kind, or whose source cannot be read, is absent.

    Args:
        kernels: what runs them: ``"compiled"`` for host code of one node, ``"hosts"`` for that of several, otherwise
            Triton.
    """
    found = {algorithm.name: of_form(algorithm.forms[op], kernels) for algorithm in algorithms.serving(op)}
    return {name: digest for name, digest in found.items() if digest}


def of_form(form: Form, kernels: str) -> str:
    """Return the fingerprint of the kernel of a form; empty if it has none, or none whose source can be read."""
    reference = {"compiled": form.cpu, "hosts": form.hosts}.get(kernels, form.triton)
    if callable(reference) and inspect.isfunction(reference):
        file = inspect.getsourcefile(reference)
        return _of_function(reference.__module__, reference.__qualname__, file) if file else ""
    return _of_reference(reference, kernels) if isinstance(reference, str) and reference else ""


@functools.cache
def _of_reference(reference: str, kernels: str) -> str:
    tree = fingerprint.installed()
    try:
        if kernels in ("compiled", "hosts"):
            return fingerprint.of_host_call(tree, reference, *_CPU_OPTIONS)
        return fingerprint.of_launch(tree, reference, *_TRITON_OPTIONS)
    except (ValueError, OSError, SyntaxError):
        return ""


@functools.cache
def _of_function(module: str, name: str, file: str) -> str:
    tree = fingerprint.installed().with_module(module, Path(file))
    try:
        return fingerprint.of_launch(tree, f"{module}:{name}", *_TRITON_OPTIONS)
    except (ValueError, OSError, SyntaxError):
        return ""


@functools.cache
def of_package() -> str:
    """Return what stands for the sources that ranks must share: what they compute, and how they talk to each other."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(file for part in _SHARED_SOURCES for file in folder.glob(part)):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def of_table(table: Table, key: Key, algorithms: Algorithms, kernels: str) -> str:
    """Return in words that other kernels made the rows of a table under ``key``; empty if the kernels of today did.

    Args:
        kernels: as for :func:`of_operation`.
    """
    recorded = table.kernels.get(key, {})
    words = f"; {table.earlier_kernels}" if table.earlier_kernels else ""
    if not recorded:
        return f"the fingerprints of the kernels that made it were not recorded{words}"
    other = changed(recorded, of_operation(algorithms, Op[operation_and_sms(key[1])[0].upper()], kernels))
    return f"made by earlier kernels ({', '.join(other)}){words}" if other else ""


def changed(recorded: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the kernels that are not any more what was recorded."""
    return tuple(name for name, digest in recorded.items() if now.get(name) != digest)
