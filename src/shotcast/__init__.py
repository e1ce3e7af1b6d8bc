"""shotcast: collectives for the GPUs or CPU processes of one job, and an LLM inference engine on top of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shotcast import extras
from shotcast.errors import ClosedError as ClosedError
from shotcast.errors import CollectiveMismatch as CollectiveMismatch
from shotcast.errors import CollectiveTimeout as CollectiveTimeout
from shotcast.errors import ConfigError as ConfigError
from shotcast.errors import RankFailed as RankFailed
from shotcast.errors import ShotcastError as ShotcastError
from shotcast.errors import UnsupportedError as UnsupportedError

if TYPE_CHECKING:
    from shotcast.collectives.algorithm import Algorithm as Algorithm
    from shotcast.collectives.algorithm import Algorithms as Algorithms
    from shotcast.collectives.algorithm import CollectiveProblem as CollectiveProblem
    from shotcast.collectives.algorithm import Form as Form
    from shotcast.collectives.algorithm import Workspace as Workspace
    from shotcast.collectives.communicator import Communicator as Communicator
    from shotcast.collectives.registry import register_algorithm as register_algorithm
    from shotcast.collectives.registry import registered as registered
    from shotcast.cost.collective import Work as Work
    from shotcast.engine.async_llm import AsyncLLM as AsyncLLM
    from shotcast.engine.grammar import Grammar as Grammar
    from shotcast.engine.llm import LLM as LLM
    from shotcast.engine.sampling_params import SamplingParams as SamplingParams
    from shotcast.launcher.spawn import spawn as spawn
    from shotcast.wire import NodeShape as NodeShape

__version__ = "0.1.0"

_LAZY = {
    "Algorithm": "shotcast.collectives.algorithm",
    "Algorithms": "shotcast.collectives.algorithm",
    "AsyncLLM": "shotcast.engine.async_llm",
    "CollectiveProblem": "shotcast.collectives.algorithm",
    "Communicator": "shotcast.collectives.communicator",
    "Form": "shotcast.collectives.algorithm",
    "Grammar": "shotcast.engine.grammar",
    "LLM": "shotcast.engine.llm",
    "NodeShape": "shotcast.wire",
    "SamplingParams": "shotcast.engine.sampling_params",
    "Work": "shotcast.cost.collective",
    "Workspace": "shotcast.collectives.algorithm",
    "register_algorithm": "shotcast.collectives.registry",
    "registered": "shotcast.collectives.registry",
    "spawn": "shotcast.launcher.spawn",
}
"""Public names and their modules, most of which import torch. They are imported on first use."""

__all__ = [
    *("ClosedError", "CollectiveMismatch", "CollectiveTimeout", "ConfigError", "RankFailed", "ShotcastError"),
    *("UnsupportedError", "__version__", *_LAZY),
]

_PACKAGES = ("functional", "overlap", "process_group")
"""Public modules, imported on first use because they import torch too."""

_NEEDS_ENGINE_EXTRA = ("AsyncLLM", "LLM")


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    Raises:
        ImportError: the name needs the optional dependency ``engine``, which is not installed.
    """
    if name in _PACKAGES:
        return importlib.import_module(f"shotcast.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NEEDS_ENGINE_EXTRA:
        try:
            extras.require("engine", f"shotcast.{name}")
        except ConfigError as error:
            raise ImportError(str(error)) from None
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
