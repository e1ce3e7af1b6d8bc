"""A model family of the Llama kind with names of its own, and a rank of test_families.py that runs it."""

from __future__ import annotations

from dataclasses import replace

import torch
from parity_targets import logits

from shotcast.models.families import FAMILIES, ModelFamily
from shotcast.models.weight_names import HF_LLAMA

NAMES = replace(HF_LLAMA, layer="decoder.layers.{}", embeddings="decoder.embed", query="attention.to_q", down="ffn.w2")
ALPACA = ModelFamily(
    name="alpaca",
    architecture="AlpacaForCausalLM",
    gguf_architectures=("alpaca",),
    attention_bias=True,
    output_bias=False,
    names=NAMES,
)


def logits_of_registered(folder: str, prompts: list[list[int]]) -> list[torch.Tensor] | None:
    """Add the family, then compute the logits of all tokens of each prompt."""
    FAMILIES[ALPACA.name] = ALPACA
    return logits(folder, 1, prompts, 4, 1, {})
