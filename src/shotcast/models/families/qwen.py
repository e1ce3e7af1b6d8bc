"""Qwen2 (arXiv 2407.10671): Llama with biases of queries, keys and values; Qwen3 (arXiv 2505.09388): with norms of
each head of queries and keys instead.
"""

from __future__ import annotations

from shotcast.errors import UnsupportedError
from shotcast.models.config_fields import Fields, count, strings
from shotcast.models.family import ModelFamily


def sliding_window(config: Fields, layers: int) -> int | None:
    """Read the window, which holds only with ``use_sliding_window``.

    Raises:
        UnsupportedError: layers differ in their attention.
    """
    kinds = strings(config, "layer_types")
    if not config.get("use_sliding_window", False) or config.get("sliding_window", 4096) is None:
        if kinds and set(kinds) != {"full_attention"}:
            raise UnsupportedError(f"layer_types {sorted(set(kinds))} without sliding_window is not supported")
        return None
    if not kinds:
        first = count(config, "max_window_layers", 28, least=0)
        kinds = ["sliding_attention" if number >= first else "full_attention" for number in range(layers)]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise UnsupportedError(
            f"layers with different attention ({', '.join(sorted(set(kinds)))}) are not supported; "
            "accepted: the same attention in all layers"
        )
    return count(config, "sliding_window", 4096)


QWEN2 = ModelFamily(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    gguf_architectures=("qwen2",),
    attention_bias=True,
    output_bias=False,
    sliding_window=sliding_window,
)

QWEN3 = ModelFamily(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    gguf_architectures=("qwen3",),
    qk_norm=True,
    default_head_dim=128,
    sliding_window=sliding_window,
)
