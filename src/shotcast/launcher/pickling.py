"""Pickle what goes to another process: by reference what it can import, all else by value."""

from __future__ import annotations

import contextlib
import importlib
import pickle
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
