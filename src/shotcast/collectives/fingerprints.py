"""Fingerprints of the kernels behind algorithms, and changes since they were recorded."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path

from shotcast.collectives.algorithm import Algorithms, Form
from shotcast.collectives.choice.table import Key, Table, operation_and_sms
from shotcast.device import fingerprint
from shotcast.transport.transport import Transport
from shotcast.wire import Op

_SHARED_ROOMS = ("collectives", "device", "kernels", "memory", "transport")
_SHARED_SOURCES = ("wire.py", *(f"{room}/**/*.py" for room in _SHARED_ROOMS))


def of_operation(algorithms: Algorithms, op: Op, transport: Transport) -> dict[str, str]:
    """Return the fingerprints of the kernels that serve an operation, keyed by algorithm.

    Algorithms without such a kernel or without readable source are absent.
    """
    found = {algorithm.name: of_form(algorithm.forms[op], transport) for algorithm in algorithms.serving(op)}
    return {name: digest for name, digest in found.items() if digest}


def of_form(form: Form, transport: Transport) -> str:
    """Return the fingerprint of a form's kernel; empty if it has none or its source cannot be read."""
    reference = form.kernel(transport.field)
    if inspect.isfunction(reference):
        file = inspect.getsourcefile(reference)
        return _of(transport, f"{reference.__module__}:{reference.__qualname__}", file) if file else ""
    return _of(transport, reference) if isinstance(reference, str) and reference else ""


@functools.cache
def _of(transport: Transport, reference: str, file: str = "") -> str:
    tree = fingerprint.installed()
    if file:
        tree = tree.with_module(reference.partition(":")[0], Path(file))
    try:
        return transport.fingerprint(tree, reference)
    except (ValueError, OSError, SyntaxError):
        return ""


@functools.cache
def of_package() -> str:
    """Return a fingerprint of the sources that ranks must share: what they compute, and how they communicate."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(file for part in _SHARED_SOURCES for file in folder.glob(part)):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def of_table(table: Table, key: Key, algorithms: Algorithms, transport: Transport) -> str:
    """Say that other kernels made the rows of a table under ``key``; empty if the current ones did."""
    recorded = table.kernels.get(key, {})
    words = f"; {table.earlier_kernels}" if table.earlier_kernels else ""
    if not recorded:
        return f"the fingerprints of the kernels that made it were not recorded{words}"
    other = changed(recorded, of_operation(algorithms, Op[operation_and_sms(key[1])[0].upper()], transport))
    return f"made by earlier kernels ({', '.join(other)}){words}" if other else ""


def changed(recorded: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the kernels that differ from the recorded ones."""
    return tuple(name for name, digest in recorded.items() if now.get(name) != digest)
