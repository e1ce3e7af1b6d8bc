"""Dimensions of published models, for measurements with random weights.

Each comes from the config.json of the huggingface.co repository named next to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from shotcast.errors import ConfigError, similar
from shotcast.layers.rope import Rope
from shotcast.models.config import MAX_LAYERS, ModelConfig


def _model(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int | None = None, **facts: Any
) -> ModelConfig:
    """Build a model configuration from its dimensions and other facts."""
    return ModelConfig(hidden, intermediate, layers, heads, kv_heads, head_dim or hidden // heads, **facts)


def _family(**facts: Any) -> Callable[..., ModelConfig]:
    """Return a constructor for the models of a family that share these facts."""
    return partial(_model, **facts)


_ROPE3 = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
_SMALL3 = replace(_ROPE3, factor=32.0)
_LLAMA_TOKENS: dict[str, Any] = {"norm_eps": 1e-5, "eos": (2,)}
_QWEN_TOKENS: dict[str, Any] = {"norm_eps": 1e-6, "rope": Rope(1000000.0), "eos": (151645, 151643)}
_llama2 = _family(vocab=32000, rope=Rope(10000.0), max_position=4096, tied=False, dtype="float16", **_LLAMA_TOKENS)
_llama3 = _family(kv_heads=8, vocab=128256, norm_eps=1e-5, rope=_ROPE3, max_position=131072, tied=False, eos=(128001,))
_mistral = _family(vocab=32768, rope=Rope(1000000.0), max_position=32768, tied=False, family="mistral", **_LLAMA_TOKENS)
_qwen2 = _family(vocab=152064, max_position=32768, tied=False, attention_bias=True, family="qwen2", **_QWEN_TOKENS)
_qwen3 = _family(
    kv_heads=8, head_dim=128, vocab=151936, max_position=40960, qk_norm="head", family="qwen3", **_QWEN_TOKENS
)
_smollm2 = _family(vocab=49152, rope=Rope(100000.0), max_position=8192, tied=True, **_LLAMA_TOKENS)

PRESETS: dict[str, ModelConfig] = {
    "llama-2-7b": _llama2(4096, 11008, 32, 32, 32),  # meta-llama/Llama-2-7b-hf
    "llama-2-13b": _llama2(5120, 13824, 40, 40, 40),  # meta-llama/Llama-2-13b-hf
    "llama-2-70b": _llama2(8192, 28672, 80, 64, 8),  # meta-llama/Llama-2-70b-hf
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32),  # meta-llama/Llama-3.1-8B
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64),  # meta-llama/Llama-3.1-70B
    "llama-3.1-405b": _llama3(16384, 53248, 126, 128),  # meta-llama/Llama-3.1-405B
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, rope=_SMALL3, tied=True),  # meta-llama/Llama-3.2-1B
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, rope=_SMALL3, tied=True),  # meta-llama/Llama-3.2-3B
    "mistral-7b": _mistral(4096, 14336, 32, 32, 8),  # mistralai/Mistral-7B-v0.3
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, vocab=151936, tied=True),  # Qwen/Qwen2.5-0.5B-Instruct
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, vocab=151936, tied=True),  # Qwen/Qwen2.5-1.5B-Instruct
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4),  # Qwen/Qwen2.5-7B-Instruct
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8),  # Qwen/Qwen2.5-14B-Instruct
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8),  # Qwen/Qwen2.5-32B-Instruct
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8),  # Qwen/Qwen2.5-72B-Instruct
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),  # Qwen/Qwen3-0.6B
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),  # Qwen/Qwen3-8B
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),  # Qwen/Qwen3-32B
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3),  # HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5),  # HuggingFaceTB/SmolLM2-360M-Instruct
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, rope=Rope(130000.0)),  # HuggingFaceTB/SmolLM2-1.7B-Instruct
}


def preset(name: str) -> ModelConfig:
    """Return the configuration of a preset, or of ``NAME:LAYERS``, the same model with another number of layers.

    Fewer layers make it possible to measure a stage or a shard on fewer GPUs than the model needs.

    Raises ConfigError if there is no such preset (the message lists similar names), or the number of layers is invalid.
    """
    base, colon, layers = name.partition(":")
    if base not in PRESETS:
        accepted = similar("similar names: {}", base.lower(), PRESETS, 4, 0.5) or f"accepted: {', '.join(PRESETS)}"
        raise ConfigError(f"there is no preset {base!r}; {accepted}")
    if not colon:
        return PRESETS[base]
    if not re.fullmatch("[0-9]{1,9}", layers) or not 1 <= int(layers) <= MAX_LAYERS:
        raise ConfigError(
            f"the preset {base} and a colon must be followed by a number of layers, 1 to {MAX_LAYERS}, not {layers!r}"
        )
    return replace(PRESETS[base], layers=int(layers))
