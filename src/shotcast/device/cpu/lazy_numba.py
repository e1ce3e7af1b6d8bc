"""numba's names for host code, which import numba when they are first used.

Compiling takes numba, which takes each process that imports it most of a second. Loading machine code that is kept on
disk (:mod:`shotcast.device.cpu.compilation`) does not, so modules with host code import these names instead of numba's.
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


types, cgutils = _Module("numba.types"), _Module("numba.core.cgutils")


def signature(*kinds: Any) -> Any:
    """Return numba's signature of a function: the type of its result, then those of its arguments."""
    return importlib.import_module("numba.core.typing").signature(*kinds)


class HostFunction:
    """A function that compiled host code calls. In Python it is called as it is written.

    ``decorate`` is numba's decorator of it, which is applied when the first caller of it is compiled.
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
    def _numba_type_(self) -> Any:  # the attribute that numba asks the globals of a function for
        context = importlib.import_module("numba.core.registry").cpu_target.typing_context
        decorated = self._decorated
        context.refresh()
        return context.resolve_value_type(decorated)


def njit(**options: Any) -> Callable[[Callable[..., Any]], HostFunction]:
    """Decorate a function that is compiled as a part of those that call it, like ``numba.njit``."""
    return lambda function: HostFunction(function, lambda one: importlib.import_module("numba").njit(**options)(one))


def intrinsic(*functions: Callable[..., Any], **options: Any) -> Any:
    """Decorate a function that returns the signature and the generator of LLVM code, like numba's ``intrinsic``."""

    def decorate(function: Callable[..., Any]) -> Any:
        decorator = importlib.import_module("numba.extending").intrinsic
        return decorator(**options)(function) if options else decorator(function)

    return HostFunction(functions[0], decorate) if functions else lambda function: HostFunction(function, decorate)
