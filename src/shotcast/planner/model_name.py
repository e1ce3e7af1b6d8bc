"""The model configuration for a plan: from a preset, or from a ``config.json`` without weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from shotcast.errors import ConfigError, similar
from shotcast.models.checkpoint import read_json
from shotcast.models.config import ModelConfig
from shotcast.models.hf_config import read_hf_config
from shotcast.models.hub import config_file, is_hub_name
from shotcast.models.presets import PRESETS, preset
from shotcast.models.source import PACKAGED, PACKAGED_PRESET, RANDOM

_CONFIG = "config.json"


class NamedModel(NamedTuple):
    """A configuration, and the model's name in other commands."""

    config: ModelConfig
    name: str


def named_model(model: str) -> NamedModel:
    """Return the configuration of a preset, a folder with ``config.json``, such a file, or a Hub model. Raises
    ConfigError if there is no such model, or its configuration is invalid. Raises UnsupportedError if the engine does
    not support its kind.
    """
    if not model.strip():
        raise ConfigError("the model is empty; give a preset, or a folder with config.json")
    if model.lower() in PACKAGED:
        return NamedModel(preset(PACKAGED_PRESET), model)
    name = model.removeprefix(RANDOM)
    if name.partition(":")[0] in PRESETS:
        return NamedModel(preset(name), RANDOM + name)
    path = Path(os.path.expanduser(model))  # like the checks below, it raises no error for names that cannot be
    is_folder = os.path.isdir(path)
    file = path / _CONFIG if is_folder else path
    if file.name == _CONFIG and os.path.isfile(file):
        return NamedModel(read_hf_config(read_json(file)), str(file.parent))
    if is_folder:
        raise ConfigError(f"{model} has no {_CONFIG}, which says what the model is")
    if os.path.isfile(path):
        raise ConfigError(f"plans read a file that is called {_CONFIG}, as the engine does, not {path.name}")
    if is_hub_name(model):
        return NamedModel(read_hf_config(read_json(config_file(model))), model)
    hint = similar("similar presets: {}; ", name.lower(), PRESETS, 3, 0.5)
    raise ConfigError(
        f"there is no model {model!r}; {hint}accepted: a preset ({', '.join(PRESETS)}), a folder with config.json, "
        "that file, or a name of the Hugging Face Hub"
    )
