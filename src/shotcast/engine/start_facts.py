"""The facts that the ranks of a job must share where something else than this package started them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from dataclasses import asdict, replace
from pathlib import Path

from shotcast import __version__, env
from shotcast.engine.config import EngineConfig
from shotcast.errors import ConfigError
from shotcast.hardware import detect
from shotcast.models.source import RANDOM, find_model
from shotcast.units import about_size

_OWN = ("model", "progress", "generation_config")
"""Options that may differ: where a host keeps the model, and what rank 0 alone uses."""


_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
"""Beside the first samples, this many more, evenly spaced, and so long."""
_SETTINGS = ("config.json", "generation_config.json", "model.safetensors.index.json")


def fingerprints(model: str) -> dict[str, str]:
    """Return the size and a digest of each file that a model is read from, by its name; ``model`` for random weights.

    The digest is of the whole file where it has up to 1 MiB, and else of its beginning (where formats list their
    tensors), its end and samples between them.

    Raises:
        ConfigError: there is no such model, or a file cannot be read.
    """
    if model.startswith(RANDOM):
        return {"model": model}
    path = find_model(model)
    files = [path] if path.is_file() else sorted({*path.glob("*.safetensors"), *(path / name for name in _SETTINGS)})
    return {file.name: _fingerprint(file) for file in files if file.is_file()}


def _fingerprint(file: Path) -> str:
    whole = _SAMPLES * _SAMPLE_BYTES
    digest = hashlib.blake2b(digest_size=8)
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            digest.update(opened.read(whole))
            for sample in range(1, _SAMPLES + 1) if size > whole else ():
                opened.seek(whole + (size - whole - _SAMPLE_BYTES) * sample // _SAMPLES)
                digest.update(opened.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return f"of {size} bytes, digest {digest.hexdigest()}"


def start_facts(config: EngineConfig) -> dict[str, str]:
    """Return what this rank was started with, in words, by name: versions, options and the files of the model.

    Args:
        config: the configuration, with the selected device.

    Raises:
        ConfigError: there is no such model on this host.
    """
    options = {name: repr(value) for name, value in asdict(config).items() if name not in _OWN}
    draft = {}
    if config.speculation is not None and config.speculation.model:
        options["speculative_config"] = repr(replace(config.speculation, method="draft_model", model="a model"))
        draft = {f"{name} of the draft model": fact for name, fact in fingerprints(config.speculation.model).items()}
    if config.plans_layout:  # rank 0 plans for machines such as its own
        options["the number of ranks on a host"] = str(env.local_world_size())
        if config.device == "cuda":
            gpu = detect.visible_gpus()[0]
            options["the GPU"] = f"{gpu.name}, {about_size(gpu.memory_bytes)}"
    versions = {
        "the version of shotcast": __version__,
        "the version of torch": importlib.metadata.version("torch"),
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
    }
    return versions | options | fingerprints(config.model) | draft


def require_ranks(config: EngineConfig, world_size: int) -> None:
    """Raise ConfigError unless the layout has as many ranks as the job."""
    if config.ranks != world_size:
        raise ConfigError(
            f"tensor_parallel x pipeline_parallel is {config.tensor_parallel} x {config.pipeline_parallel}, but the "
            f"job has {world_size} ranks: they have to be equal (torchrun: nnodes x nproc-per-node)"
        )
