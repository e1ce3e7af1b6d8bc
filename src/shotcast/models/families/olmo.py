"""OLMo 2 (arXiv 2501.00656): Llama with norms after attention and MLP instead of before them, and norms of all
queries and of all keys.
"""

from __future__ import annotations

from dataclasses import replace

from shotcast.models.family import ModelFamily
from shotcast.models.weight_names import HF_POST_NORMS

OLMO2 = ModelFamily(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    qk_norm="projection",
    kv_heads_default_to_heads=True,
    defaults={"rms_norm_eps": 1e-5},
    names=replace(HF_POST_NORMS, attention_norm=""),
)
