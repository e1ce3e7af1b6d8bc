"""Reader for the ``config.json`` of Hugging Face Transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.layers.rope import ROPE_TYPES, Rope
from shotcast.models.config import ModelConfig
from shotcast.models.config_fields import Fields, count, number, numbers, strings, token_ids
from shotcast.models.families import ModelFamily, by_hf_name
from shotcast.models.quantization_config import read_quantization

_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
"""The config.json names of each activation, the usual one first."""


def read_hf_config(config: Fields, generation: Fields | None = None, family: ModelFamily | None = None) -> ModelConfig:
    """Read a Transformers ``config.json`` (version 4 or 5), and ``generation_config.json`` if there is one.

    Fields that Transformers ignores are ignored here too. Fields that it reads but that are not implemented here are
    rejected.

    Raises ConfigError if a field is missing or invalid. Raises UnsupportedError if the model needs something that is
    not implemented.

    Args:
        family: the family of the model; None for the one that ``config`` names.
    """
    family = family or family_of(config)
    config = {**family.defaults, **config}
    _refuse_unsupported(family, config)
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    is_optional = family.kv_heads_default_to_heads or "num_key_value_heads" in config
    default_head_dim = hidden // heads if family.default_head_dim is None else family.default_head_dim
    if config.get("head_dim") is None and family.default_head_dim is None and hidden % heads:
        raise ConfigError(
            f"config.json gives no head_dim, and hidden_size {hidden} does not divide by num_attention_heads {heads}"
        )
    bias = bool(config.get("attention_bias")) if family.attention_bias == "config" else family.attention_bias
    max_position = count(config, "max_position_embeddings")
    rope, local_rope = _ropes(family, config, max_position)
    layers = count(config, "num_hidden_layers")
    quantization = read_quantization(config)
    eos = token_ids(config, "eos_token_id") + token_ids(generation or {}, "eos_token_id")
    return ModelConfig(
        hidden=hidden,
        intermediate=count(config, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=count(config, "num_key_value_heads", heads if is_optional else None),
        head_dim=count(config, "head_dim", default_head_dim),
        vocab=count(config, "vocab_size"),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        max_position=max_position if family.local_rope else rope.context_length(max_position),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias and family.output_bias,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        sliding_window=family.sliding_window(config, layers),
        local_rope=local_rope,
        activation=family.activation,
        family=family.name,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        stored_bytes=None if quantization is None else quantization.weight_bytes(),
        eos=tuple(dict.fromkeys(eos)),
        names=family.names,
        **family.details(config, layers),
    )


def family_of(config: Fields) -> ModelFamily:
    """Return the family of a ``config.json``. Raises UnsupportedError listing the implemented ones."""
    return by_hf_name(strings(config, "architectures"), config.get("model_type"))


def _refuse_unsupported(family: ModelFamily, config: Fields) -> None:
    accepted = _ACTIVATIONS[family.activation]
    if (activation := config.get(family.activation_field, accepted[0])) not in accepted:
        raise UnsupportedError(f"{family.activation_field} {activation!r} is not supported; accepted: {accepted[0]}")
    if config.get("rope_interleaved"):
        raise UnsupportedError("rope_interleaved is not supported; accepted: rotation of the two halves of a head")


def _ropes(family: ModelFamily, config: Fields, max_position: int) -> tuple[Rope, Rope | None]:
    """Read the rotary embedding of all layers, and of layers with a window if it differs.

    ``rope_parameters`` of Transformers 5 has both; in Transformers 4, ``rope_local_base_freq`` is the second one's
    theta.
    """
    parameters = _rope_parameters(config)
    if not family.local_rope:
        return _rope(config, parameters, max_position), None
    local: Fields = {"rope_theta": number(config, "rope_local_base_freq", 10000.0)}
    if set(parameters) <= {"full_attention", "sliding_attention"}:
        own = {kind: _rope_parameters(parameters, kind) for kind in ("full_attention", "sliding_attention")}
        parameters, local = own["full_attention"], {**local, **own["sliding_attention"]}
    return _rope(config, parameters, max_position), _rope(config, local, max_position)


def _rope_parameters(config: Fields, key: str = "rope_parameters") -> Fields:
    parameters = config.get(key) or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"{key} in config.json must be an object, not {parameters!r}")
    return parameters


def _rope(config: Fields, parameters: Fields, max_position: int) -> Rope:
    """Read Transformers 5's ``rope_parameters``, or Transformers 4's ``rope_theta`` and ``rope_scaling``."""
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedError("rope_parameters that differ between layers are not supported")
    theta = number(parameters if parameters.get("rope_theta") is not None else config, "rope_theta", 10000.0)
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UnsupportedError(f"partial_rotary_factor {partial} is not supported; accepted: 1")
    if parameters.get("mrope_section"):
        raise UnsupportedError("mrope_section (positions of several dimensions) is not supported")
    if rope_type == "default":
        return Rope(theta)
    if rope_type == "linear":
        return Rope(theta, "linear", number(parameters, "factor"))
    if rope_type == "dynamic":
        return Rope(theta, "dynamic", number(parameters, "factor"), original_max_position=max_position)
    # A config may give the original length outside the other parameters; Transformers prefers that one.
    original = config if config.get("original_max_position_embeddings") is not None else parameters
    original_max_position = count(original, "original_max_position_embeddings", max_position)
    if rope_type == "llama3":
        low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
        if low >= high:
            raise ConfigError(f"low_freq_factor ({low:g}) of rope_parameters must be below high_freq_factor ({high:g})")
        return Rope(theta, "llama3", number(parameters, "factor"), low, high, original_max_position)
    if rope_type in ("longrope", "su") or (rope_type == "yarn" and "long_factor" in parameters):
        return _longrope(parameters, theta, original_max_position, max_position)
    if rope_type == "yarn":
        return _yarn(parameters, theta, original_max_position, max_position)
    raise UnsupportedError(f"rope_type {rope_type!r} is not supported; accepted: {', '.join(ROPE_TYPES)}")


def _longrope(parameters: Fields, theta: float, original_max_position: int, max_position: int) -> Rope:
    factor = number(parameters, "factor", max_position / original_max_position)
    usual = 1.0
    if factor > 1 and original_max_position > 1:
        usual = math.sqrt(1 + math.log(factor) / math.log(original_max_position))
    return Rope(
        theta,
        "longrope",
        original_max_position=original_max_position,
        attention_factor=number(parameters, "attention_factor", usual),
        divisors=numbers(parameters, "long_factor"),
        short_divisors=numbers(parameters, "short_factor"),
    )


def _yarn(parameters: Fields, theta: float, original_max_position: int, max_position: int) -> Rope:
    if parameters.get("truncate", True) is not True:
        raise UnsupportedError("truncate=false of yarn is not supported; accepted: true")
    factor = number(parameters, "factor", max_position / original_max_position)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = None
    if parameters.get("attention_factor") is not None:
        attention_factor = number(parameters, "attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        attention_factor = magnitude(number(parameters, "mscale")) / magnitude(number(parameters, "mscale_all_dim"))
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_position=original_max_position,
        attention_factor=attention_factor,
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
    )
