"""Models on the Hugging Face Hub by name: cached on this machine, or downloaded into the cache."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from shotcast import env
from shotcast.errors import ConfigError
from shotcast.models.checkpoint import read_json
from shotcast.models.hf_config import family_of
from shotcast.models.safetensors_folder import weight_files

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@\w[\w./-]*)?", re.ASCII)
_CONFIG = "config.json"
_FILES = ["*.safetensors", "*.json", "tokenizer*", "merges.txt", "*.jinja"]
_SECOND_COPIES = ["*/*", "consolidated*"]
"""Files in other formats: in subfolders of the repository, or Mistral's."""


def is_hub_name(model: str) -> bool:
    """Return whether a model has a Hub name: ``org/name``, or ``org/name@revision``."""
    return _NAME.fullmatch(model) is not None


def snapshot(model: str) -> Path:
    """Return a model's folder, from the cache if it is complete, otherwise after downloading. Raises ConfigError if it
    is not in the cache and cannot be downloaded. Raises UnsupportedError if its architecture is not implemented, before
    downloading its weights.
    """
    folder = _cached(model)
    if folder is None or _missing(folder):
        family_of(read_json(config_file(model)))
        folder = _download(model, _FILES)
        if reason := _missing(folder):
            raise ConfigError(f"{model} is incomplete: {reason}; to complete it: {_remedy(model)}")
    return folder


def config_file(model: str) -> Path:
    """Return a model's ``config.json``, cached or downloaded. Raises ConfigError on failure."""
    folder = _cached(model)
    if folder is None or not (folder / _CONFIG).is_file():
        folder = _download(model, [_CONFIG])
    return folder / _CONFIG


def _cached(model: str) -> Path | None:
    """Return the cached snapshot of a model, for its branch, tag or commit."""
    name, _, revision = model.partition("@")
    cached = Path(env.hub_cache(), f"models--{name.replace('/', '--')}")
    reference = cached / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = cached / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def _missing(folder: Path) -> str:
    """Return what a snapshot lacks; "" if it is complete."""
    if not (folder / _CONFIG).is_file():
        return f"{folder} has no {_CONFIG}"
    try:
        weight_files(folder)
    except ConfigError as error:
        return str(error)
    return ""


def _download(model: str, files: list[str]) -> Path:
    cache = env.hub_cache()
    sought = f"{model} is no folder, and the cache of the Hugging Face Hub ({cache}) does not have all of it"
    if env.hub_offline():
        raise ConfigError(f"{sought}; HF_HUB_OFFLINE forbids to download it; with a network: {_remedy(model)}")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(f"{sought}; to download it: pip install huggingface_hub, then {_remedy(model)}")
    import huggingface_hub

    name, _, revision = model.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision or None, cache_dir=cache, allow_patterns=files, ignore_patterns=_SECOND_COPIES
        )
    except Exception as error:  # the library raises errors of its own, of its HTTP client, and of the system
        is_unreachable = isinstance(error, huggingface_hub.utils.LocalEntryNotFoundError)  # advice follows its cause
        reason = str(error).partition("\n")[0] if is_unreachable else " ".join(str(error).split())
        raise ConfigError(f"{sought}; it cannot be downloaded ({reason}); by hand: {_remedy(model)}") from error
    return Path(folder)


def _remedy(model: str) -> str:
    name, _, revision = model.partition("@")
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    return f"{command} (gated models: first hf auth login, or set HF_TOKEN)"
