"""Fingerprints of a model's files, to tell whether two hosts have the same model without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shotcast.errors import ConfigError
from shotcast.models.source import RANDOM, find_model

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
