"""The configuration of a model: its dimensions, and everything else that affects its computation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shotcast.errors import ConfigError, UnsupportedError, shorten
from shotcast.kernels.activation import Activation
from shotcast.layers.rope import Rope
from shotcast.models.config_fields import MAX_COUNT
from shotcast.models.weight_names import HF_LLAMA, WeightNames

DTYPES = ("float32", "bfloat16", "float16")
"""Accepted dtypes of unquantized weights."""

MAX_LAYERS = 999
"""The largest number of layers. A file with more is damaged; its tensor names might not fit into memory."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a Llama-style decoder."""

    hidden: int  # the width of the residual
    intermediate: int  # the width of the feed-forward network
    layers: int
    heads: int  # of queries
    kv_heads: int  # each serves ``heads / kv_heads`` query heads
    head_dim: int
    vocab: int
    norm_eps: float
    rope: Rope
    max_position: int  # the number of tokens of a sequence that the model was made for, by stretched positions too
    tied: bool  # the output projection is the embedding matrix
    # the query, key and value projections have biases; ``output_bias``: the projection after attention has one
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # queries and keys are normalized, "head" by head or in each "projection"; empty for not at all
    qk_norm: Literal["", "head", "projection"] = ""
    sliding_window: int | None = None  # the number of tokens that a token sees, itself included; None for all before it
    full_layers: tuple[int, ...] = ()  # the layers in which it sees all of them in spite of ``sliding_window``
    local_rope: Rope | None = None  # the rotary embedding of the other layers; None for ``rope``
    attention_scale: float | None = None  # the factor of products of queries and keys; None for ``head_dim ** -0.5``
    attention_cap: float = 0.0  # scores of attention x become ``cap * tanh(x / cap)``; 0 for no cap
    logit_cap: float = 0.0  # the same of logits
    activation: Activation = "silu"  # the activation of gates: SiLU, or GELU approximated by tanh
    embedding_scale: float = 1.0  # the factor of embeddings
    norms_less_one: bool = False  # weights of norms are stored less one
    family: str = "llama"  # the name of the model family in :mod:`shotcast.models.families`
    # the name of the torch type in which the checkpoint is stored, ``float32`` if it is a quantized GGUF file
    dtype: str = "bfloat16"
    # the bytes of a weight of the layers' matrices in the checkpoint, if a device can keep it as it is quantized there;
    # None otherwise
    stored_bytes: float | None = None
    stored_on: str = "cuda"  # the type of that device
    eos: tuple[int, ...] = ()  # the tokens that end a text
    names: WeightNames = HF_LLAMA  # the names of the weights

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab", "max_position"):
            largest = MAX_LAYERS if name == "layers" else MAX_COUNT
            if not 1 <= getattr(self, name) <= largest:
                raise ConfigError(f"{name} of a model must be from 1 to {largest}, not {shorten(getattr(self, name))}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embedding, not {self.head_dim}")
        if not 0 < self.norm_eps < math.inf:
            raise ConfigError(f"norm_eps must be above 0 and finite, not {self.norm_eps}")
        for rope in (self.rope, self.local_rope or self.rope):
            if rope.rope_type == "dynamic" and self.head_dim == 2:
                raise ConfigError("head_dim must be above 2 for dynamic rotary embedding")
            for divisors in (rope.divisors, rope.short_divisors):
                if divisors is not None and len(divisors) != self.head_dim // 2:
                    raise ConfigError(
                        f"rotary embedding takes {self.head_dim // 2} divisors, half of head_dim, not {len(divisors)}"
                    )
        if self.dtype not in DTYPES:
            raise UnsupportedError(f"weights of type {self.dtype} are not supported; accepted: {', '.join(DTYPES)}")

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every parameter, matrices as [outputs, inputs]."""
        names, query_width, kv_width = self.names, self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear = (
            (names.query, query_width, self.hidden, self.attention_bias),
            (names.key, kv_width, self.hidden, self.attention_bias),
            (names.value, kv_width, self.hidden, self.attention_bias),
            (names.output, self.hidden, query_width, self.output_bias),
            (names.gate, self.intermediate, self.hidden, self.mlp_bias),
            (names.up, self.intermediate, self.hidden, self.mlp_bias),
            (names.down, self.hidden, self.intermediate, self.mlp_bias),
        )
        norms = (names.attention_norm, names.attention_post_norm, names.mlp_norm, names.mlp_post_norm)
        layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (self.hidden,) for name in norms if name}
        if self.qk_norm:
            whole = self.qk_norm == "projection"
            layer[f"{names.query_norm}.weight"] = (query_width if whole else self.head_dim,)
            layer[f"{names.key_norm}.weight"] = (kv_width if whole else self.head_dim,)
        for name, outputs, inputs, bias in linear:
            before = layer.get(f"{name}.weight", (0,))[0]  # another matrix of this name
            layer[f"{name}.weight"] = (before + outputs, inputs)
            if bias:
                layer[f"{name}.bias"] = (before + outputs,)
        tensors: dict[str, tuple[int, ...]] = {f"{names.embeddings}.weight": (self.vocab, self.hidden)}
        for number in range(self.layers):
            tensors |= {names.of_layer(number, name): shape for name, shape in layer.items()}
        tensors[f"{names.final_norm}.weight"] = (self.hidden,)
        if not self.tied:
            tensors[f"{names.head}.weight"] = (self.vocab, self.hidden)
        return tensors

    def window_of(self, layer: int) -> int | None:
        """Return the number of tokens that a token attends to in a layer; None for all earlier ones."""
        return None if layer in self.full_layers else self.sliding_window

    @property
    def longest_window(self) -> int | None:
        """The largest number of tokens that a token attends to in any layer; None for all earlier ones."""
        return None if self.full_layers else self.sliding_window

    @property
    def has_post_norms(self) -> bool:
        """True if the outputs of attention and MLP are normalized before they are added."""
        return bool(self.names.mlp_post_norm)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors().values())
