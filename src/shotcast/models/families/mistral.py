"""Mistral (Jiang et al., arXiv 2310.06825): Llama without biases, with a sliding window."""

from __future__ import annotations

from shotcast.errors import UnsupportedError
from shotcast.models.config_fields import Fields, count, strings
from shotcast.models.family import ModelFamily


def sliding_window(config: Fields, layers: int) -> int | None:
    """Read the window, 4096 if config.json does not mention it.

    Raises:
        UnsupportedError: ``layer_types`` says something else. Transformers does not read it here.
    """
    window = count(config, "sliding_window", 4096) if config.get("sliding_window", 4096) is not None else None
    kinds = strings(config, "layer_types")
    if any((kind == "sliding_attention") != (window is not None) for kind in kinds):
        raise UnsupportedError(
            f"layer_types {sorted(set(kinds))} with sliding_window {window} is not supported; "
            "accepted: the same attention in all layers"
        )
    return window


MISTRAL = ModelFamily(
    name="mistral",
    architecture="MistralForCausalLM",
    attention_bias=False,
    sliding_window=sliding_window,
)
