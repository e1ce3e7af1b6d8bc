"""shotcast: the GPUs (or processes) of one job exchange tensors, in two steps where a ring takes 2N-2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shotcast.errors import (
    ClosedError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    RankFailed,
    ShotcastError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from shotcast.collectives.communicator import Communicator
    from shotcast.launcher.spawn import spawn

__version__ = "0.1.0"

__all__ = [
    "ClosedError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "ConfigError",
    "RankFailed",
    "ShotcastError",
    "UnsupportedError",
    "__version__",
    "spawn",
]


def __getattr__(name: str) -> Any:
    """Import torch only when a communicator is asked for."""
    if name == "Communicator":
        from shotcast.collectives.communicator import Communicator

        return Communicator
    if name == "spawn":
        from shotcast.launcher.spawn import spawn

        return spawn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
