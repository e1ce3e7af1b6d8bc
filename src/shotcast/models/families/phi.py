"""Phi-3 (arXiv 2404.14219): Llama with joined matrices, and LongRoPE for long contexts."""

from __future__ import annotations

from dataclasses import replace

from shotcast.models.config_fields import Fields, count
from shotcast.models.family import ModelFamily
from shotcast.models.weight_names import HF_LLAMA

_QKV, _GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"


def sliding_window(config: Fields, layers: int) -> int | None:
    """Read the window, which all layers have if there is one."""
    return None if config.get("sliding_window") is None else count(config, "sliding_window")


PHI3 = ModelFamily(
    name="phi3",
    architecture="Phi3ForCausalLM",
    attention_bias=False,
    kv_heads_default_to_heads=True,
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    sliding_window=sliding_window,
    names=replace(HF_LLAMA, query=_QKV, key=_QKV, value=_QKV, gate=_GATE_UP, up=_GATE_UP),
)
