"""Qwen2 (arXiv 2407.10671): Llama with biases of queries, keys and values; Qwen3 (arXiv 2505.09388): with norms of
each head of queries and keys instead.
"""

from __future__ import annotations

from typing import Any

from shotcast.errors import UnsupportedError
from shotcast.models.config_fields import Fields, count, full_layers, strings
from shotcast.models.family import ModelFamily


def sliding_window(config: Fields, layers: int) -> int | None:
    """Read the window, which holds only with ``use_sliding_window``.

    Raises:
        UnsupportedError: layers have a window, and its size is missing.
    """
    if not config.get("use_sliding_window", False) or config.get("sliding_window", 4096) is None:
        kinds = strings(config, "layer_types")
        if kinds and set(kinds) != {"full_attention"}:
            raise UnsupportedError(f"layer_types {sorted(set(kinds))} without sliding_window is not supported")
        return None
    if len(_full_layers(config, layers)) == layers:
        return None
    return count(config, "sliding_window", 4096)


def _full_layers(config: Fields, layers: int) -> tuple[int, ...]:
    first = count(config, "max_window_layers", 28, least=0)
    return full_layers(config, layers, lambda layer: layer < first)


def details(config: Fields, layers: int) -> dict[str, Any]:
    """Read the layers without a window, if others have one."""
    return {"full_layers": _full_layers(config, layers)} if sliding_window(config, layers) else {}


QWEN2 = ModelFamily(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    gguf_architectures=("qwen2",),
    attention_bias=True,
    output_bias=False,
    sliding_window=sliding_window,
    details=details,
)

QWEN3 = ModelFamily(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    gguf_architectures=("qwen3",),
    qk_norm="head",
    default_head_dim=128,
    sliding_window=sliding_window,
    details=details,
)
