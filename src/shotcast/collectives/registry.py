"""The registered algorithms of this process: built-in and user-defined."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import re
import sys
from pathlib import Path

from shotcast import env, wire
from shotcast.collectives import algorithms as built_in_modules
from shotcast.collectives.algorithm import REDUCING, Algorithm, Algorithms, Form, Reference
from shotcast.errors import ConfigError
from shotcast.transport.registry import fields
from shotcast.wire import NodeShape, Op

logger = logging.getLogger(__name__)

SERVABLE = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BROADCAST)
"""Operations that a registered algorithm may serve."""

_added: list[Algorithm] = []


def _find_built_in() -> tuple[Algorithm, ...]:
    """Return the built-in algorithms: fewest steps first, then the ones between nodes, the library last."""
    found: list[Algorithm] = []
    for file in pkgutil.iter_modules(built_in_modules.__path__):
        module = importlib.import_module(f"{built_in_modules.__name__}.{file.name}")
        found += getattr(module, "ALGORITHMS", None) or (module.ALGORITHM,)

    def steps(algorithm: Algorithm) -> int:
        form = algorithm.forms.get(Op.ALL_REDUCE) or next(iter(algorithm.forms.values()))
        return form.work(1, NodeShape(1, 8), 1).steps

    return tuple(sorted(found, key=lambda one: (one.library, one.between_nodes, steps(one), one.name)))


BUILT_IN = _find_built_in()


def registered() -> Algorithms:
    """Return all algorithms registered so far; their positions are their header codes."""
    return Algorithms((*BUILT_IN, *_added))


def register_algorithm(algorithm: Algorithm) -> Algorithm:
    """Register an algorithm for communicators created from now on.

    Every rank of a job must register the same algorithms in the same order before it creates its communicator, which
    compares them. The communicator then checks each added algorithm once, on random tensors against a plain sum or
    copy. On command lines, SHOTCAST_ALGORITHMS names the modules or files that register algorithms.

    Args:
        algorithm: the algorithm, with a new name; its forms serve all_reduce, reduce_scatter, all_gather, all_to_all or
            broadcast.

    Returns:
        ``algorithm``.

    Raises:
        ConfigError: the name is taken or not usable, the description is incomplete, or headers have no room for more.
    """
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"register_algorithm takes a shotcast.Algorithm, not {type(algorithm).__name__}")
    name = algorithm.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in ("auto", "lossless"):
        raise ConfigError(
            f"{name!r} cannot name an algorithm: lower-case letters, digits and _ can, but not 'auto' or 'lossless'"
        )
    present = registered()
    if name in present:
        raise ConfigError(f"there is an algorithm {name!r} already; the registered ones are {', '.join(present)}")
    if len(present) >= wire.MAX_ALGORITHMS:
        raise ConfigError(
            f"headers tell {wire.MAX_ALGORITHMS} algorithms apart, and as many are registered; not {name}"
        )
    if algorithm.library or not algorithm.forms:
        raise ConfigError(
            f"algorithm {name}: it is no library of the vendor, and its forms serve at least one operation"
        )
    for op, form in algorithm.forms.items():
        if op not in SERVABLE or not isinstance(form, Form):
            accepted = ", ".join(f"Op.{one.name}" for one in SERVABLE)
            raise ConfigError(f"algorithm {name}: forms are Form objects of {accepted}; not {form!r} of {op!r}")
        if not any(map(form.kernel, fields())):
            raise ConfigError(f"algorithm {name}: its form of {op.label} has neither a Triton nor a CPU kernel")
    if algorithm.lossy and not algorithm.error_bound:
        raise ConfigError(f"algorithm {name} is lossy, so its error_bound must say how far off sums may be")
    _added.append(algorithm)
    return algorithm


def import_named() -> None:
    """Import the modules in SHOTCAST_ALGORITHMS once, which registers their algorithms. Raises ConfigError."""
    for name in env.algorithm_modules():
        _import_once(name)


@functools.cache
def _import_once(name: str) -> None:
    try:
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        path = Path(name).resolve()
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        if any(file is not None and Path(file).resolve() == path for file in files):
            return  # the program itself, or what it has imported
        spec = importlib.util.spec_from_file_location(f"shotcast_algorithms_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"SHOTCAST_ALGORITHMS: cannot import {name}: {type(error).__name__}: {error}") from error


def from_environment() -> str:
    """Return the algorithm named by SHOTCAST_ALGORITHM; ``"auto"`` if it is not set."""
    return env.algorithm(("auto", *registered()))


def digest(algorithms: Algorithms) -> str:
    """Return a digest for ranks to compare: the added algorithms in order, with a hash of each description and code."""
    return ", ".join(f"{one.name} #{_fingerprint(one)}" for one in added(algorithms)) or "none added"


def added(algorithms: Algorithms) -> tuple[Algorithm, ...]:
    """Return the algorithms among ``algorithms`` that users registered."""
    return algorithms.members[len(BUILT_IN) :]


def _fingerprint(algorithm: Algorithm) -> str:
    facts: list[object] = [algorithm.name, algorithm.lossy, algorithm.by_name, algorithm.multicast]
    shapes = [NodeShape(nodes, ranks) for nodes in range(1, 9) for ranks in range(1, wire.MAX_WORLD_SIZE + 1)]
    facts += [algorithm.in_contract(shape) for shape in shapes]
    for op, form in sorted(algorithm.forms.items()):
        facts += [op.label, form.divides, form.uneven, form.any_dtype, form.between_nodes]
        if op in REDUCING:
            facts += [form.work(1 << bits, NodeShape(nodes, 4), 2) for nodes in (1, 2) for bits in (0, 12, 24)]
        facts += [_source(form.kernel(field)) for field in fields()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


def _source(reference: Reference) -> str:
    """Return the source text that defines a kernel's binding, or a substitute for it."""
    if isinstance(reference, str):
        return reference
    try:
        return Path(inspect.getsourcefile(reference) or "").read_text()
    except (TypeError, OSError):
        return getattr(reference, "__qualname__", type(reference).__qualname__)
