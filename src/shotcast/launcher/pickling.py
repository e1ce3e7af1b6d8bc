"""Pickle what goes to another process: by reference what it can import, all else by value."""

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
    """Pickle ``value``, with functions and classes that the other process cannot import.

    Those are closures, lambdas, and everything of ``__main__`` in a notebook, an interpreter or ``python -c``.

    Raises ConfigError if the value cannot be pickled, or only by cloudpickle, which is not installed.

    Args:
        what: what errors call the value.
        imports_main: whether the other process imports the ``__main__`` of this one.
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
    """Pickle ``(fn, args)`` as :func:`dumps` does. The ConfigError names the variable that cannot be pickled, if found.

    Variables are the arguments, and those outside ``fn`` that it reads.
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
