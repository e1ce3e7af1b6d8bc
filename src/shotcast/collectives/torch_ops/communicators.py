"""Communicators by name, as an operator in a graph holds a string and not an object."""

from __future__ import annotations

import weakref

from shotcast.collectives.interface import Collectives
from shotcast.errors import ConfigError

_communicators: weakref.WeakValueDictionary[str, Collectives] = weakref.WeakValueDictionary()


def register(comm: Collectives) -> None:
    """Register ``comm`` by its name for as long as it lives."""
    _communicators[comm.name] = comm


def named(name: str) -> Collectives:
    """Return the communicator called ``name``. Raises ConfigError if this process has none."""
    comm = _communicators.get(name)
    if comm is None:
        known = ", ".join(sorted(_communicators)) or "none"
        raise ConfigError(
            f"no communicator of this process is called {name!r} (there are: {known}); the one that a graph was "
            f"compiled with must live as long as the graph is used"
        )
    return comm
