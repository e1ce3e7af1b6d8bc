"""Model families: the ways in which Llama-style models differ, and a table of the families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shotcast.errors import UnsupportedError
from shotcast.kernels.activation import Activation
from shotcast.models.config_fields import Fields, count, full_layers, number, strings
from shotcast.models.weight_names import HF_LLAMA, HF_POST_NORMS, WeightNames


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family of models whose decoders differ from Llama's only in the fields below."""

    name: str  # the ``model_type`` of its ``config.json``
    architecture: str  # the class of Hugging Face Transformers whose checkpoints can be read
    gguf_architectures: tuple[str, ...] = ()  # the values of ``general.architecture`` of its GGUF files
    # whether the query, key and value projections have biases; "config": as ``attention_bias`` in config.json says
    attention_bias: bool | Literal["config"] = "config"
    output_bias: bool = True  # whether the projection after attention has a bias where they have
    mlp_bias: bool = False  # whether ``mlp_bias`` in config.json is read; otherwise there are no such biases
    qk_norm: Literal["", "head", "projection"] = ""  # as :attr:`~shotcast.models.config.ModelConfig.qk_norm`
    activation: Activation = "silu"  # the activation of gates, which ``activation_field`` of config.json must name
    activation_field: str = "hidden_act"
    # whether a config.json that lacks ``num_key_value_heads`` has as many as heads
    kv_heads_default_to_heads: bool = False
    # the size of a head where config.json gives none; None: the hidden size divided by the heads
    default_head_dim: int | None = None
    # fields of config.json with the values that they have where it lacks them
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # reads the attention window from config.json and the number of layers; None for no window
    sliding_window: Callable[[Fields, int], int | None] = lambda config, layers: None
    local_rope: bool = False  # whether layers with a window have a rotary embedding of their own
    # reads further fields of a :class:`~shotcast.models.config.ModelConfig` likewise
    details: Callable[[Fields, int], dict[str, Any]] = lambda config, layers: {}
    # whether llama.cpp stores the rows of queries and keys pair after pair, as rotation of neighbors needs them
    gguf_interleaved_rope: bool = False
    names: WeightNames = HF_LLAMA  # of the weights in Hugging Face checkpoints


# Touvron et al., arXiv 2302.13971, and models published in its format, such as SmolLM2
LLAMA = ModelFamily(
    name="llama",
    architecture="LlamaForCausalLM",
    gguf_architectures=("llama",),  # GGUF files of Mistral say llama too
    mlp_bias=True,
    kv_heads_default_to_heads=True,
    gguf_interleaved_rope=True,
)


def _mistral_window(config: Fields, layers: int) -> int | None:
    """Read the window, 4096 by default. Transformers ignores ``layer_types`` here."""
    window = count(config, "sliding_window", 4096) if config.get("sliding_window", 4096) is not None else None
    kinds = strings(config, "layer_types")
    if any((kind == "sliding_attention") != (window is not None) for kind in kinds):
        raise UnsupportedError(
            f"layer_types {sorted(set(kinds))} with sliding_window {window} is not supported; "
            "accepted: the same attention in all layers"
        )
    return window


# Jiang et al., arXiv 2310.06825: Llama without biases, with a sliding window
MISTRAL = ModelFamily(
    name="mistral",
    architecture="MistralForCausalLM",
    attention_bias=False,
    sliding_window=_mistral_window,
)


def _qwen_window(config: Fields, layers: int) -> int | None:
    """Read the window, which applies only with ``use_sliding_window``."""
    if not config.get("use_sliding_window", False) or config.get("sliding_window", 4096) is None:
        kinds = strings(config, "layer_types")
        if kinds and set(kinds) != {"full_attention"}:
            raise UnsupportedError(f"layer_types {sorted(set(kinds))} without sliding_window is not supported")
        return None
    if len(_qwen_full_layers(config, layers)) == layers:
        return None
    return count(config, "sliding_window", 4096)


def _qwen_full_layers(config: Fields, layers: int) -> tuple[int, ...]:
    first = count(config, "max_window_layers", 28, least=0)
    return full_layers(config, layers, lambda layer: layer < first)


def _qwen_details(config: Fields, layers: int) -> dict[str, Any]:
    return {"full_layers": _qwen_full_layers(config, layers)} if _qwen_window(config, layers) else {}


# arXiv 2407.10671: biases of queries, keys and values
QWEN2 = ModelFamily(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    gguf_architectures=("qwen2",),
    attention_bias=True,
    output_bias=False,
    sliding_window=_qwen_window,
    details=_qwen_details,
)

# arXiv 2505.09388: norms of each head of queries and keys instead
QWEN3 = ModelFamily(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    gguf_architectures=("qwen3",),
    qk_norm="head",
    default_head_dim=128,
    sliding_window=_qwen_window,
    details=_qwen_details,
)


_QKV, _GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"


# arXiv 2404.14219: joined matrices, and LongRoPE for long contexts
PHI3 = ModelFamily(
    name="phi3",
    architecture="Phi3ForCausalLM",
    attention_bias=False,
    kv_heads_default_to_heads=True,
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    sliding_window=lambda config, _: None if config.get("sliding_window") is None else count(config, "sliding_window"),
    names=replace(HF_LLAMA, query=_QKV, key=_QKV, value=_QKV, gate=_GATE_UP, up=_GATE_UP),
)


# arXiv 2501.00656: norms after attention and MLP instead of before them, and of all queries and of all keys
OLMO2 = ModelFamily(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    qk_norm="projection",
    kv_heads_default_to_heads=True,
    defaults={"rms_norm_eps": 1e-5},
    names=replace(HF_POST_NORMS, attention_norm=""),
)


_GEMMA_DEFAULTS = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
}


def _gemma_details(config: Fields, layers: int, pattern: int = 2) -> dict[str, Any]:
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


def _gemma3_details(config: Fields, layers: int) -> dict[str, Any]:
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedError("attn_logit_softcapping of Gemma 3 is not supported; accepted: null")
    return _gemma_details(config, layers, count(config, "sliding_window_pattern", 6))


# arXiv 2408.00118: norms before and after attention and MLP, soft caps, and a window in every other layer
GEMMA2 = ModelFamily(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    activation="gelu_tanh",
    activation_field="hidden_activation",
    default_head_dim=256,
    defaults=_GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    sliding_window=lambda config, _: count(config, "sliding_window"),
    details=_gemma_details,
    names=replace(HF_POST_NORMS, mlp_norm="pre_feedforward_layernorm"),
)

# the text model (arXiv 2503.19786): norms of each head instead of caps, a window in five layers of six, and a rotary
# embedding for these
GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    qk_norm="head",
    defaults=_GEMMA_DEFAULTS | {"rope_theta": 1e6},
    local_rope=True,
    details=_gemma3_details,
)


FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, GEMMA2, GEMMA3)}


def by_hf_name(architectures: list[str], model_type: object) -> ModelFamily:
    """Return the family named by ``architectures`` in a config.json, or by ``model_type`` if that list is empty."""
    known = {family.architecture: family for family in FAMILIES.values()}
    accepted = ", ".join(known)
    if not architectures:
        if not isinstance(model_type, str) or (family := FAMILIES.get(model_type)) is None:
            raise UnsupportedError(
                f"config.json names no architecture, and its model_type is {model_type!r}; "
                f"accepted architectures: {accepted}"
            )
        return family
    if len(architectures) != 1 or architectures[0] not in known:
        raise UnsupportedError(f"architecture {', '.join(architectures)} is not supported; accepted: {accepted}")
    return known[architectures[0]]


def by_gguf_architecture() -> dict[str, ModelFamily]:
    """Return the families by the values of ``general.architecture`` in their GGUF files."""
    return {architecture: family for family in FAMILIES.values() for architecture in family.gguf_architectures}
