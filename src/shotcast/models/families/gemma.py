"""Gemma 2 (arXiv 2408.00118): norms before and after attention and MLP, soft caps, and a window in every other layer;
the text model of Gemma 3 (arXiv 2503.19786): norms of each head instead of caps, a window in five layers of six, and a
rotary embedding for these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shotcast.errors import UnsupportedError
from shotcast.models.config_fields import Fields, count, full_layers, number
from shotcast.models.family import ModelFamily
from shotcast.models.weight_names import HF_POST_NORMS

_DEFAULTS = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
}


def sliding_window(config: Fields, layers: int) -> int | None:
    """Read the window of the layers that have one."""
    return count(config, "sliding_window")


def details(config: Fields, layers: int, pattern: int = 2) -> dict[str, Any]:
    """Read which layers have no window (every ``pattern``-th by default), and the other numbers of Gemma 2.

    Raises:
        UnsupportedError: tokens see later ones.
    """
    if config.get("use_bidirectional_attention"):
        raise UnsupportedError("use_bidirectional_attention is not supported; accepted: attention to earlier tokens")

    def cap(key: str) -> float:
        return 0.0 if config.get(key) is None else number(config, key)

    return {
        "full_layers": full_layers(config, layers, lambda layer: (layer + 1) % pattern == 0),
        "attention_scale": number(config, "query_pre_attn_scalar") ** -0.5,
        "attention_cap": cap("attn_logit_softcapping"),
        "logit_cap": cap("final_logit_softcapping"),
        "embedding_scale": count(config, "hidden_size") ** 0.5,
        "norms_less_one": True,
    }


def _details_of_gemma3(config: Fields, layers: int) -> dict[str, Any]:
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedError("attn_logit_softcapping of Gemma 3 is not supported; accepted: null")
    return details(config, layers, count(config, "sliding_window_pattern", 6))


GEMMA2 = ModelFamily(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    activation="gelu_tanh",
    activation_field="hidden_activation",
    default_head_dim=256,
    defaults=_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    sliding_window=sliding_window,
    details=details,
    names=replace(HF_POST_NORMS, mlp_norm="pre_feedforward_layernorm"),
)

GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    qk_norm="head",
    defaults=_DEFAULTS | {"rope_theta": 1e6},
    local_rope=True,
    details=_details_of_gemma3,
)
