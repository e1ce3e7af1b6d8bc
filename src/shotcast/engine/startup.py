"""Checks before ranks start: the device, a draft model, and facts that ranks from another launcher must share."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import platform
from dataclasses import asdict, replace
from pathlib import Path

from shotcast import __version__, env
from shotcast.engine.config import EngineConfig, max_model_len_of
from shotcast.engine.tokenizer import Tokenizer
from shotcast.errors import ConfigError
from shotcast.hardware import detect
from shotcast.models.config import ModelConfig
from shotcast.models.memory_estimate import require_division
from shotcast.models.source import RANDOM, find_model, open_checkpoint
from shotcast.units import about_size

logger = logging.getLogger(__name__)


def select_device(config: EngineConfig) -> EngineConfig:
    """Resolve device "auto" in ``config``: CUDA if each rank of this machine can have a GPU.

    A planned layout has as many ranks as there are GPUs, so it selects CUDA if there is any GPU.

    Raises ConfigError if the device is "cuda", or the layout is planned, and there are too few GPUs (a launcher may
    show one to each rank), or the device does not support the dtype.
    """
    if config.device == "cpu":
        return config
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", config.asked_ranks or env.local_world_size()))
    visible = _visible_gpus()
    enough = visible >= (1 if env.share_gpus() else needed)
    one_each = visible == 1 and "LOCAL_WORLD_SIZE" in os.environ  # a communicator refuses ranks with the same one
    if config.device == "cuda":
        if not visible:
            raise ConfigError("device is cuda, but PyTorch finds no usable GPU")
        if not enough and not one_each:
            raise ConfigError(
                f"{needed} ranks on CUDA need as many GPUs, and {visible} are visible; SHOTCAST_SHARE_GPUS=1 lets them "
                "take turns"
            )
    if config.device != "auto":
        return config
    if visible and config.plans_layout:
        if not enough and not one_each:
            raise ConfigError(
                f"layout {config.layout} is of {needed} ranks on this machine, and {visible} GPUs are visible: take as "
                "many ranks as GPUs, or device cpu"
            )
        return replace(config, device="cuda")
    if visible and not enough:
        logger.warning(
            "%d ranks need as many GPUs, and %d are visible: they run on the CPU; device cuda takes the one that each "
            "rank sees where a launcher shows each its own",
            needed,
            visible,
        )
    return replace(config, device="cuda" if enough else "cpu")


def _visible_gpus() -> int:
    if not detect.has_cuda_driver():
        return 0  # which takes no PyTorch
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def require_draft(config: EngineConfig, model: ModelConfig) -> None:
    """Check that a configuration's draft model can propose tokens for a model. Raises ConfigError if it has another
    tokenizer or vocabulary, fewer positions, or cannot be divided among the ranks.
    """
    assert config.speculation is not None
    name = config.speculation.model
    with contextlib.closing(open_checkpoint(name)) as checkpoint:
        draft = checkpoint.config
    require_division(draft, config.tensor_parallel, 1)
    length = max_model_len_of(config, model)
    if draft.max_position < length:
        raise ConfigError(
            f"the draft model {name} was made for {draft.max_position} tokens, fewer than max_model_len ({length})"
        )
    vocabularies = [_vocabulary(each) for each in (config.model, name)]
    if vocabularies[0] != vocabularies[1] or (vocabularies[0] is None and draft.vocab != model.vocab):
        raise ConfigError(f"the draft model {name} must have the tokenizer of {config.model}, and it has another one")


def _vocabulary(model: str) -> dict[str, int] | None:
    try:
        return Tokenizer.load(model).vocabulary()
    except ConfigError:
        return None


_OWN = ("model", "progress", "generation_config")
"""Options that may differ between ranks: where a host keeps the model, and options that only rank 0 uses."""


_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
"""The number of further samples, evenly spaced, and their length."""
_SETTINGS = ("config.json", "generation_config.json", "model.safetensors.index.json")


def fingerprints(model: str) -> dict[str, str]:
    """Return the size and a digest of each file of a model, by name; ``model`` for random weights.

    The digest covers the whole file up to 1 MiB; beyond that it covers the beginning (where formats list their
    tensors), the end and samples in between.

    Raises ConfigError if there is no such model, or a file cannot be read.
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
    """Return the facts this rank was started with, by name and in words: versions, options and model files."""
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
