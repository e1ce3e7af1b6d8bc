"""The kernels behind results, and their fingerprints, which results carry.

A result names a collective's kernel by operation and algorithm (``all_reduce/one_shot``), and other kernels by module
(``kernels.triton.gemv``).
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterable, Sequence

from shotcast.bench import implementations
from shotcast.bench.engine_report import EngineRow
from shotcast.bench.report import Row
from shotcast.collectives import fingerprints
from shotcast.collectives.algorithm import LIBRARY
from shotcast.device import fingerprint
from shotcast.transport.registry import usual
from shotcast.transport.transport import Transport
from shotcast.wire import NodeShape, Op

_ENGINE_OPS = tuple(op for op in Op if op is not Op.ALL_TO_ALL)
_MODULES = {"cuda": "kernels/triton", "cpu": "kernels/cpu"}


def of_rows(rows: Sequence[Row]) -> dict[str, str]:
    """Return the fingerprints of our kernels behind the rows of a collective."""
    names = dict.fromkeys(name for row in rows for name in _behind(row))
    return now(names, usual(rows[0].device, rows[0].nodes)) if rows else {}


def of_engine(rows: Sequence[EngineRow]) -> dict[str, str]:
    """Return the fingerprints of our kernels behind the rows of an engine: model kernels and collectives."""
    if not rows:
        return {}
    device = rows[0].device
    names = dict.fromkeys(_modules(device))
    for row in rows:
        tensor, pipeline = (int(part) for part in row.layout.split("x"))
        if tensor * pipeline == 1:
            continue
        for op in _ENGINE_OPS:
            names |= dict.fromkeys(of_call(op, row.algorithm, NodeShape(1, tensor * pipeline)))
    return now(names, usual(device))


def of_layout(device: str, ranks: int) -> dict[str, str]:
    """Return the fingerprints of all kernels that an engine with ``ranks`` ranks on one node may choose."""
    names = dict.fromkeys(_modules(device))
    for op in _ENGINE_OPS if ranks > 1 else ():
        names |= dict.fromkeys(of_call(op, implementations.AUTO, NodeShape(1, ranks)))
    return now(names, usual(device))


def of_modules(*modules: str) -> dict[str, str]:
    """Return the fingerprints of kernel modules such as ``kernels.triton.gemv``."""
    return now(modules, usual("cuda"))


def of_collectives(device: str, nodes: int = 1) -> dict[str, str]:
    serving = implementations.algorithms().serving
    return now([f"{op.label}/{one.name}" for op in Op for one in serving(op)], usual(device, nodes))


def _behind(row: Row) -> tuple[str, ...]:
    """Return the names of our kernels that produced a row; none if a library did."""
    return of_call(Op[row.op.upper()], row.algorithm, row.shape) if implementations.is_own(row.algorithm) else ()


def of_call(op: Op, name: str, shape: NodeShape) -> tuple[str, ...]:
    """Return the names of the kernels that an algorithm may run; for ``auto``, of its candidates.

    An engine runs a named algorithm for the operations it serves, and ``auto`` for the others.
    """
    serving = {algorithm.name: algorithm for algorithm in implementations.algorithms().serving(op)}
    name = LIBRARY if name == "nccl" else name
    if name in serving:
        return (f"{op.label}/{name}",)
    chosen = [
        one.name
        for one in serving.values()
        if one.library
        or (
            one.keeps_bits(op, shape)
            and (shape.nodes > 1 or not one.forms[op].between_nodes)
            and not one.forms[op].keeps_to_sms
            and not one.forms[op].shared_from  # communicators that are measured are exclusive, and name nothing
        )
    ]
    return tuple(f"{op.label}/{one}" for one in chosen)


@functools.cache
def _modules(device: str) -> tuple[str, ...]:
    folder = importlib.resources.files("shotcast").joinpath(*_MODULES[device].split("/"))
    names = sorted(file.name.removesuffix(".py") for file in folder.iterdir() if file.name.endswith(".py"))
    modules = tuple(f"{_MODULES[device].replace('/', '.')}.{name}" for name in names if name != "__init__")
    return modules if device == "cuda" else (*modules, "transport.cpu.norm_rows")


def now(names: Iterable[str], transport: Transport) -> dict[str, str]:
    """Return the current fingerprints of kernels, without names that no longer exist."""
    found = {name: _of(name, transport) for name in names}
    return {name: digest for name, digest in found.items() if digest}


@functools.cache
def _of(name: str, transport: Transport) -> str:
    op, _, algorithm = name.partition("/")
    if not algorithm:
        try:
            return fingerprint.of_module(fingerprint.installed(), f"shotcast.{name}")
        except ValueError:
            return ""
    if op.upper() not in Op.__members__:
        return ""
    return fingerprints.of_operation(implementations.algorithms(), Op[op.upper()], transport).get(algorithm, "")
