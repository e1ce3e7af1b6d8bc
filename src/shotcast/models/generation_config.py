"""Sampling defaults from a model's ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shotcast.errors import ConfigError
from shotcast.models.checkpoint import read_json
from shotcast.models.source import RANDOM, find_model

FILE = "generation_config.json"

_OPTIONS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_OPTIONS |= {"max_new_tokens": "max_tokens"}
"""Supported fields, each with the sampling parameter it sets. Like vLLM, this ignores ``do_sample``."""


def read_sampling_defaults(model: str, source: str) -> dict[str, Any]:
    """Read the sampling parameters set by a model's files, by our names; the values are not checked. Raises ConfigError
    if the folder has no such file, or it cannot be read.

    Args:
        model: the model, as for :func:`shotcast.models.source.open_checkpoint`.
        source: ``auto`` for the folder of the model, ``none`` for no file, or a folder.
    """
    if source == "none" or (source == "auto" and model.startswith(RANDOM)):
        return {}
    path = (find_model(model) if source == "auto" else Path(source).expanduser()) / FILE
    if not path.is_file():
        if source == "auto":
            return {}
        raise ConfigError(f"generation_config must be auto, none or a folder that has {FILE}, not {source!r}")
    config = read_json(path)
    found = {option: config[field] for field, option in _OPTIONS.items() if config.get(field) is not None}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    return found
