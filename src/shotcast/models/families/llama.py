"""Llama (Touvron et al., arXiv 2302.13971), and models published in its format, such as SmolLM2."""

from __future__ import annotations

from shotcast.models.family import ModelFamily

LLAMA = ModelFamily(
    name="llama",
    architecture="LlamaForCausalLM",
    gguf_architectures=("llama",),  # GGUF files of Mistral say llama too
    mlp_bias=True,
    kv_heads_default_to_heads=True,
    gguf_interleaved_rope=True,
)
