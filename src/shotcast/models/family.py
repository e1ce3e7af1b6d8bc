"""The description of a model family: everything in which families of the Llama kind differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shotcast.kernels.activation import Activation
from shotcast.models.config_fields import Fields
from shotcast.models.weight_names import GGUF_LLAMA, HF_LLAMA, WeightNames

if TYPE_CHECKING:
    from shotcast.models.block import Block


def no_sliding_window(config: Fields, layers: int) -> int | None:
    """Return None: every token sees all tokens before it."""
    return None


def no_details(config: Fields, layers: int) -> dict[str, Any]:
    """Return nothing: the family has no fields of its own."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family of models whose decoders differ from Llama's in no more than what is said here.

    Attributes:
        name: the ``model_type`` of its ``config.json``.
        architecture: the class of Hugging Face Transformers whose checkpoints can be read.
        gguf_architectures: the values of ``general.architecture`` of its GGUF files.
        attention_bias: whether the query, key and value projections have biases; "config": as ``attention_bias`` in
            config.json says.
        output_bias: whether the projection after attention has a bias where they have.
        mlp_bias: whether ``mlp_bias`` in config.json is read; otherwise there are no such biases.
        qk_norm: as :attr:`~shotcast.models.config.ModelConfig.qk_norm`.
        activation: the activation of gates, which ``activation_field`` of config.json must name.
        kv_heads_default_to_heads: whether a config.json that lacks ``num_key_value_heads`` has as many as heads.
        default_head_dim: the size of a head where config.json gives none; None: the hidden size divided by the heads.
        defaults: fields of config.json with the values that they have where it lacks them.
        sliding_window: reads the attention window from config.json and the number of layers; None for no window.
        local_rope: whether layers with a window have a rotary embedding of their own.
        details: reads further fields of a :class:`~shotcast.models.config.ModelConfig` likewise.
        gguf_interleaved_rope: whether llama.cpp stores the rows of queries and keys pair after pair, as rotation of
            neighbors needs them.
        names, gguf_names: the names of the weights in Hugging Face checkpoints and in GGUF files.
        block: the class of a layer; None for :class:`~shotcast.models.block.Block`.
    """

    name: str
    architecture: str
    gguf_architectures: tuple[str, ...] = ()
    attention_bias: bool | Literal["config"] = "config"
    output_bias: bool = True
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "projection"] = ""
    activation: Activation = "silu"
    activation_field: str = "hidden_act"
    kv_heads_default_to_heads: bool = False
    default_head_dim: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sliding_window: Callable[[Fields, int], int | None] = no_sliding_window
    local_rope: bool = False
    details: Callable[[Fields, int], dict[str, Any]] = no_details
    gguf_interleaved_rope: bool = False
    names: WeightNames = HF_LLAMA
    gguf_names: WeightNames = GGUF_LLAMA
    block: type[Block] | None = None
