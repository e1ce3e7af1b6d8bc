"""The configuration of a model: its dimensions, and everything else that its computation depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shotcast.errors import ConfigError, UnsupportedError, shorten
from shotcast.layers.rope import Rope
from shotcast.models.config_fields import MAX_COUNT
from shotcast.models.weight_names import HF_LLAMA, WeightNames

DTYPES = ("float32", "bfloat16", "float16")
"""Accepted types of weights that are not quantized."""

MAX_LAYERS = 999
"""The largest number of layers. A file with more is damaged; the names of its tensors might not fit into memory."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a decoder of the Llama kind.

    Attributes:
        hidden, intermediate: the width of the residual, and of the feed-forward network.
        heads, kv_heads: query heads; key-value heads, each of which serves ``heads / kv_heads`` query heads.
        max_position: the number of tokens of a sequence that the model was made for, by stretched positions too.
        tied: the output projection is the embedding matrix.
        attention_bias: the query, key and value projections have biases; ``output_bias``: the projection after
            attention has one.
        qk_norm: each head of queries and keys is normalized.
        sliding_window: the number of tokens that a token sees, itself included, in every layer; None for all before it.
        family: the name of the model family, as it is registered in :mod:`shotcast.models.registry`.
        dtype: the name of the torch type in which the checkpoint is stored, ``float32`` if it is quantized.
        bos: the token that begins a text, None if there is none.
        eos: the tokens that end a text.
        names: the names of the weights.
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
    family: str = "llama"
    dtype: str = "bfloat16"
    bos: int | None = None
    eos: tuple[int, ...] = ()
    names: WeightNames = HF_LLAMA

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
            largest = MAX_LAYERS if name == "layers" else MAX_COUNT
            if not 1 <= getattr(self, name) <= largest:
                raise ConfigError(f"{name} of a model must be from 1 to {largest}, not {shorten(getattr(self, name))}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embedding, not {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, not {self.sliding_window}")
        if not 0 < self.norm_eps < math.inf:
            raise ConfigError(f"norm_eps must be above 0 and finite, not {self.norm_eps}")
        if self.rope.rope_type == "dynamic" and self.head_dim == 2:
            raise ConfigError("head_dim must be above 2 for dynamic rotary embedding")
        divisors = self.rope.divisors
        if divisors is not None and len(divisors) != self.head_dim // 2:
            raise ConfigError(
                f"rotary embedding takes {self.head_dim // 2} divisors, half of head_dim, not {len(divisors)}"
            )
        if self.dtype not in DTYPES:
            raise UnsupportedError(f"weights of type {self.dtype} are not supported; accepted: {', '.join(DTYPES)}")

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every parameter, matrices as [outputs, inputs]."""
        names, query_width, kv_width = self.names, self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear = {
            names.query: (query_width, self.hidden, self.attention_bias),
            names.key: (kv_width, self.hidden, self.attention_bias),
            names.value: (kv_width, self.hidden, self.attention_bias),
            names.output: (self.hidden, query_width, self.output_bias),
            names.gate: (self.intermediate, self.hidden, self.mlp_bias),
            names.up: (self.intermediate, self.hidden, self.mlp_bias),
            names.down: (self.hidden, self.intermediate, self.mlp_bias),
        }
        layer: dict[str, tuple[int, ...]] = {
            f"{names.attention_norm}.weight": (self.hidden,),
            f"{names.mlp_norm}.weight": (self.hidden,),
        }
        if self.qk_norm:
            layer |= {f"{name}.weight": (self.head_dim,) for name in (names.query_norm, names.key_norm)}
        for name, (outputs, inputs, bias) in linear.items():
            layer[f"{name}.weight"] = (outputs, inputs)
            if bias:
                layer[f"{name}.bias"] = (outputs,)
        tensors: dict[str, tuple[int, ...]] = {f"{names.embeddings}.weight": (self.vocab, self.hidden)}
        for number in range(self.layers):
            tensors |= {names.of_layer(number, name): shape for name, shape in layer.items()}
        tensors[f"{names.final_norm}.weight"] = (self.hidden,)
        if not self.tied:
            tensors[f"{names.head}.weight"] = (self.vocab, self.hidden)
        return tensors

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(math.prod(shape) for shape in self.tensors().values())
