"""Pickling for other processes: by reference if they can import the object, otherwise by value."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from shotcast.errors import ConfigError

_ADVICE = "Put it into a file, and import it from there:  from my_file import my_function\nOr:  pip install cloudpickle"


def dumps(value: Any, what: str, imports_main: bool = True) -> bytes:
    """Pickle ``value``, including functions and classes that the other process cannot import.

    These are closures, lambdas, and everything in ``__main__`` of a notebook, an interpreter or ``python -c``.

    Raises ConfigError if the value cannot be pickled, or only by cloudpickle, which is not installed.

    Args:
        what: the name of the value in error messages.
        imports_main: whether the other process imports this one's ``__main__``.
    """
    try:
        data = pickle.dumps(value)
        if imports_main or b"__main__" not in data:
            return data
        reason = "is not defined in a file that other processes can import"
    except Exception as error:
        reason = f"cannot be pickled: {error}"
    for name in ("cloudpickle", "numba.cloudpickle"):  # numba brings a copy
        with contextlib.suppress(ImportError):
            cloudpickle = importlib.import_module(name)
            break
    else:
        raise ConfigError(f"{what} {reason}.\n{_ADVICE}")
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise ConfigError(f"{what} cannot be pickled: {error}") from error


def dumps_call(fn: Callable[..., Any], args: tuple[Any, ...], imports_main: bool) -> bytes:
    """Pickle ``(fn, args)`` like :func:`dumps`. The ConfigError names the variable that cannot be pickled, if found.

    Variables are the arguments, and outer variables that ``fn`` reads.
    """
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        return dumps((fn, args), f"{name} with its arguments", imports_main)
    except ConfigError:
        for what, value in _variables(fn, args):
            dumps(value, f"{what} of {name}", imports_main)
        raise


def _variables(fn: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    with contextlib.suppress(TypeError, ValueError):  # not a Python function of these arguments, or an empty cell
        for name, value in inspect.signature(fn).bind(*args).arguments.items():
            yield f"argument {name!r}", value
        outer = inspect.getclosurevars(fn)
        for name, value in {**outer.globals, **outer.nonlocals}.items():
            yield f"variable {name!r}", value
