"""numba's names for host code, which import numba on first use.

Compiling needs numba, and importing it takes each process most of a second. Loading machine code from disk
(:mod:`shotcast.device.cpu.compilation`) does not need it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import Any


class _Module:
    """A module that is imported when one of its names is used."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


cgutils = _Module("numba.core.cgutils")
_types, _typing = _Module("numba.types"), _Module("numba.core.typing")


class HostFunction:
    """A function that compiled host code calls. Called from Python, it runs as plain Python.

    ``decorate`` is its numba decorator, applied when its first caller is compiled.
    """

    def __init__(self, function: Callable[..., Any], decorate: Callable[[Callable[..., Any]], Any]):
        self._function, self._decorate = function, decorate
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    @cached_property
    def _decorated(self) -> Any:  # numba's types do not keep it alive
        return self._decorate(self._function)

    @property
    def _numba_type_(self) -> Any:  # numba looks for this attribute on a function's globals
        context = importlib.import_module("numba.core.registry").cpu_target.typing_context
        decorated = self._decorated
        context.refresh()
        return context.resolve_value_type(decorated)


def njit(**options: Any) -> Callable[[Callable[..., Any]], HostFunction]:
    """Decorate a function that is compiled as part of its callers, like ``numba.njit``."""
    return lambda function: HostFunction(function, lambda one: importlib.import_module("numba").njit(**options)(one))


def intrinsic(result: str = "void", literals: int = 0) -> Any:
    """Decorate ``generate(builder, *arguments)``, which writes the LLVM code of a function of 64-bit words.

    Args:
        result: numba's name of the result's type; ``generate`` returns the result unless it is ``void``.
        literals: the number of leading arguments that are constants of the caller, which ``generate`` gets as values.
    """

    def decorate(generate: Callable[..., Any]) -> HostFunction:
        def define(_context: Any, *kinds: Any) -> Any:
            constants = [kind.literal_value for kind in kinds[:literals]]

            def lower(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                value = generate(builder, *constants, *arguments[literals:])
                return target.get_dummy_value() if result == "void" else value

            words = (_types.int64,) * (len(kinds) - literals)
            return _typing.signature(getattr(_types, result), *kinds[:literals], *words), lower

        def declare(function: Callable[..., Any]) -> Any:
            return importlib.import_module("numba.extending").intrinsic(prefer_literal=literals > 0)(function)

        return HostFunction(update_wrapper(define, generate), declare)

    return decorate
