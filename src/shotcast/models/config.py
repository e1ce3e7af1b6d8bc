"""What a model is: dimensions, and everything else that its computation depends on."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.layers.rope import Rope

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Classes of Hugging Face whose checkpoints can be read."""

DTYPES = ("float32", "bfloat16", "float16")
"""Of weights that are not quantised."""

MOST_LAYERS = 999
"""A file that says more is damaged; the names of its tensors might not fit into memory."""

_MOST = (1 << 31) - 1
"""Of anything else."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family.

    Attributes:
        hidden, intermediate: width of the residual, and of the feed-forward network.
        heads, kv_heads: query heads; key-value heads, each of which serves ``heads / kv_heads`` of them.
        tied: the output projection is the embedding matrix.
        attention_bias: of the query, key and value projections; ``output_bias``: of the one after attention.
        qk_norm: queries and keys are normed, head by head.
        sliding_window: tokens that a token sees, itself included, in every layer; None for all before it.
        dtype: name of torch's type in which the checkpoint is stored, ``float32`` if it is quantised.
        bos: the token that begins a text, None if there is none.
        eos: tokens that end one.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope: Rope
    max_position: int
    tied: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    family: Family = "llama"
    dtype: str = "bfloat16"
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "hidden",
            "intermediate",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "vocab",
            "max_position",
        ):
            most = MOST_LAYERS if name == "layers" else _MOST
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} of a model is from 1 to {most}, not {_shown(getattr(self, name))}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embedding, not {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window is at least 1, not {self.sliding_window}")
        if not 0 < self.norm_eps < math.inf:
            raise ConfigError(f"norm_eps is above 0 and finite, not {self.norm_eps}")
        divisors = self.rope.divisors
        if divisors is not None and len(divisors) != self.head_dim // 2:
            raise ConfigError(
                f"rotary embedding takes {self.head_dim // 2} divisors, half of head_dim, not {len(divisors)}"
            )
        if self.dtype not in DTYPES:
            raise UnsupportedError(f"weights of type {self.dtype} are not supported; accepted: {', '.join(DTYPES)}")

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, matrices as [outputs, inputs]."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear = {
            "self_attn.q_proj": (queries, self.hidden, self.attention_bias),
            "self_attn.k_proj": (keys, self.hidden, self.attention_bias),
            "self_attn.v_proj": (keys, self.hidden, self.attention_bias),
            "self_attn.o_proj": (self.hidden, queries, self.output_bias),
            "mlp.gate_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.up_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.down_proj": (self.hidden, self.intermediate, self.mlp_bias),
        }
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }
        if self.qk_norm:
            layer |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        for name, (outputs, inputs, bias) in linear.items():
            layer[f"{name}.weight"] = (outputs, inputs)
            if bias:
                layer[f"{name}.bias"] = (outputs,)
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        found["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, self.hidden)
        return found

    @property
    def parameters(self) -> int:
        """How many numbers the model consists of."""
        return sum(math.prod(shape) for shape in self.tensors().values())

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From ``config.json`` of transformers (version 4 or 5), and ``generation_config.json`` if there is one.

        What the classes of transformers do not read changes nothing there, and is passed over here; what they read and
        is not implemented here is refused.

        Raises:
            ConfigError: something is missing or makes no sense.
            UnsupportedError: the model computes something that is not implemented.
        """
        return _from_hf(config, generation or {})


def _from_hf(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    family = _family(config)
    _refuse_what_is_not_implemented(config)
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    # Only Llama's class takes as many key-value heads as heads where nothing is said.
    every_head = heads if family == "llama" or "num_key_value_heads" in config else None
    if config.get("head_dim") is None and family != "qwen3" and hidden % heads:
        raise ConfigError(
            f"config.json gives no head_dim, and hidden_size {hidden} does not divide by num_attention_heads {heads}"
        )
    bias = family == "qwen2" or bool(config.get("attention_bias") and family != "mistral")
    max_position = _count(config, "max_position_embeddings")
    layers = _count(config, "num_hidden_layers")
    return ModelConfig(
        hidden=hidden,
        intermediate=_count(config, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", every_head),
        head_dim=_count(config, "head_dim", 128 if family == "qwen3" else hidden // heads),
        vocab=_count(config, "vocab_size"),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, max_position),
        max_position=max_position,
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(config, family, layers),
        family=family,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        bos=_tokens(config, "bos_token_id")[0] if _tokens(config, "bos_token_id") else None,
        eos=tuple(dict.fromkeys(_tokens(config, "eos_token_id") + _tokens(generation, "eos_token_id"))),
    )


def _family(config: Mapping[str, Any]) -> Family:
    accepted = ", ".join(ARCHITECTURES)
    named = _names(config, "architectures")
    if not named:
        families: dict[str, Family] = {family: family for family in ARCHITECTURES.values()}
        kind = config.get("model_type")
        if not isinstance(kind, str) or (family := families.get(kind)) is None:
            raise UnsupportedError(
                f"config.json names no architecture, and its model_type is {kind!r}; accepted architectures: {accepted}"
            )
        return family
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        raise UnsupportedError(f"architecture {', '.join(named)} is not supported; accepted: {accepted}")
    return ARCHITECTURES[named[0]]


def _refuse_what_is_not_implemented(config: Mapping[str, Any]) -> None:
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act {activation!r} is not supported; accepted: silu")
    if quantisation := config.get("quantization_config"):
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise UnsupportedError(
            f"the checkpoint is quantised (quantization_config: {method}), which is not supported in this format; "
            "accepted: weights that are not quantised, or a GGUF file"
        )
    if config.get("rope_interleaved"):
        raise UnsupportedError("rope_interleaved is not supported; accepted: rotation of the two halves of a head")


def _sliding_window(config: Mapping[str, Any], family: Family, layers: int) -> int | None:
    """The window of all layers. Llama has none, Qwen only with ``use_sliding_window``."""
    if family == "llama":
        return None
    kinds = _names(config, "layer_types")
    if family == "mistral":
        window = _count(config, "sliding_window", 4096) if config.get("sliding_window", 4096) is not None else None
        # transformers does not read layer_types here, so that they may say nothing else
        if any((kind == "sliding_attention") != (window is not None) for kind in kinds):
            raise UnsupportedError(
                f"layer_types {sorted(set(kinds))} with sliding_window {window} is not supported; "
                "accepted: the same attention in all layers"
            )
        return window
    if not config.get("use_sliding_window", False) or config.get("sliding_window", 4096) is None:
        if kinds and set(kinds) != {"full_attention"}:
            raise UnsupportedError(f"layer_types {sorted(set(kinds))} without sliding_window is not supported")
        return None
    if not kinds:
        first = _count(config, "max_window_layers", 28, least=0)
        kinds = ["sliding_attention" if number >= first else "full_attention" for number in range(layers)]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise UnsupportedError(
            f"layers with different attention ({', '.join(sorted(set(kinds)))}) are not supported; "
            "accepted: the same attention in all layers"
        )
    return _count(config, "sliding_window", 4096)


def _rope(config: Mapping[str, Any], max_position: int) -> Rope:
    """``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling`` of transformers 4."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, Mapping):
        raise ConfigError(f"rope_parameters of config.json is an object, not {said!r}")
    if any(isinstance(value, Mapping) for value in said.values()):
        raise UnsupportedError("rope_parameters that differ between layers are not supported")
    theta = _number(said if said.get("rope_theta") is not None else config, "rope_theta", 10000.0)
    kind = said.get("rope_type") or said.get("type") or "default"
    partial = said.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UnsupportedError(f"partial_rotary_factor {partial} is not supported; accepted: 1")
    if said.get("mrope_section"):
        raise UnsupportedError("mrope_section (positions of several dimensions) is not supported")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", _number(said, "factor"))
    # A config may say the original length beside the other parameters; transformers lets that go first.
    original = config if config.get("original_max_position_embeddings") is not None else said
    original_max_position = _count(original, "original_max_position_embeddings", max_position)
    if kind == "llama3":
        low, high = _number(said, "low_freq_factor"), _number(said, "high_freq_factor")
        if low >= high:
            raise ConfigError(f"low_freq_factor ({low:g}) of rope_parameters must be below high_freq_factor ({high:g})")
        return Rope(theta, "llama3", _number(said, "factor"), low, high, original_max_position)
    if kind == "yarn":
        return _yarn(said, theta, original_max_position, max_position)
    raise UnsupportedError(f"rope_type {kind!r} is not supported; accepted: default, linear, llama3, yarn")


def _yarn(said: Mapping[str, Any], theta: float, original_max_position: int, max_position: int) -> Rope:
    if said.get("truncate", True) is not True:
        raise UnsupportedError("truncate=false of yarn is not supported; accepted: true")
    factor = _number(said, "factor", max_position / original_max_position)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = None
    if said.get("attention_factor") is not None:
        attention_factor = _number(said, "attention_factor")
    elif said.get("mscale") and said.get("mscale_all_dim"):
        attention_factor = magnitude(_number(said, "mscale")) / magnitude(_number(said, "mscale_all_dim"))
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_position=original_max_position,
        attention_factor=attention_factor,
        beta_fast=_number(said, "beta_fast", 32.0),
        beta_slow=_number(said, "beta_slow", 1.0),
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"config.json has no {key}")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise ConfigError(f"{key} of config.json is a whole number from {least} to {_MOST}, not {_shown(value)}")
    return value


def _names(config: Mapping[str, Any], key: str) -> list[str]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{key} of config.json is a list of names, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """Of what may be anything, not more than a line."""
    if isinstance(value, int) and value.bit_length() > 1 << 10:
        return f"one of {value.bit_length()} bits"  # Python does not write out all of them
    return reprlib.repr(value)


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"config.json has no {key}")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{key} of config.json is a number above 0, not {_shown(value)}")
    return float(value)


def _tokens(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Token ids, of which a config gives none, one or a list."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if wrong := [token for token in ids if isinstance(token, bool) or not isinstance(token, int)]:
        raise ConfigError(f"{key} of config.json is a token id or a list of them, not {wrong[0]!r}")
    # some checkpoints say -1 for "none"
    return tuple(token for token in ids if token >= 0)
