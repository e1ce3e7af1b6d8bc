"""Names of a model's weights in checkpoints, without ".weight" and ".bias"."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """The names in one naming scheme.

    Attributes:
        layer: the prefix of a layer's weights; ``{}`` stands for its number.
        embeddings, final_norm, head: weights outside the layers. The other attributes are relative to ``layer``.
        attention_norm, mlp_norm: norms of the inputs of attention and MLP; empty if there are none.
        attention_post_norm, mlp_post_norm: norms of their outputs, before these are added; empty if there are none.

    Matrices with the same name are stored as one, with rows in the order of the attributes.
    """

    layer: str
    embeddings: str
    final_norm: str
    head: str
    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    query_norm: str
    key_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    attention_post_norm: str = ""
    mlp_post_norm: str = ""

    def of_layer(self, number: int, name: str) -> str:
        """Return the full name of a weight of layer ``number``."""
        return f"{self.layer.format(number)}.{name}"

    def translate(self, name: str, target: WeightNames) -> str:
        """Translate a tensor's name to another scheme; unknown names are unchanged."""
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            return name
        layer = re.match(re.escape(self.layer).replace(r"\{\}", r"(\d+)") + r"\.", stem)
        relative = stem[layer.end() :] if layer else stem
        for field in fields(self):
            is_global = field.name in _GLOBAL
            if field.name != "layer" and getattr(self, field.name) == relative and is_global == (layer is None):
                translated = getattr(target, field.name)
                return f"{translated if layer is None else f'{target.layer.format(layer[1])}.{translated}'}.{kind}"
        return name


_GLOBAL = ("embeddings", "final_norm", "head")

HF_LLAMA = WeightNames(
    layer="model.layers.{}",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
"""Names in Hugging Face checkpoints of Llama and the families that follow it."""

HF_POST_NORMS = replace(
    HF_LLAMA, attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm", mlp_norm=""
)
"""Names in Hugging Face checkpoints of families that normalize the outputs of attention and MLP."""

GGUF_LLAMA = WeightNames(
    layer="blk.{}",
    embeddings="token_embd",
    final_norm="output_norm",
    head="output",
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    output="attn_output",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)
"""Names in GGUF files."""
