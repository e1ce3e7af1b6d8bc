"""The memory that a model needs on a rank, and the free memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shotcast.errors import ConfigError
from shotcast.hardware.detect import control_groups, meminfo, read_lines
from shotcast.layers.partition import FFN_UNIT, VOCAB_UNIT, partition, partition_heads, shard
from shotcast.models.config import ModelConfig


def require_division(config: ModelConfig, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raise ConfigError unless each stage gets a layer, and each rank of a stage gets part of the vocabulary."""
    if pipeline_parallel > config.layers:
        raise ConfigError(f"{config.layers} layers cannot be divided between {pipeline_parallel} stages")
    if tensor_parallel > config.vocab:
        raise ConfigError(f"{config.vocab} words cannot be divided between {tensor_parallel} ranks")


class RankShare(NamedTuple):
    """The fullest rank's part of a layer."""

    heads: int
    kv_heads: int
    columns: int
    words: int


def largest_share(model: ModelConfig, ranks: int) -> RankShare:
    """Return the heads, columns and words of the fullest rank, if ``ranks`` ranks share each layer."""
    parts = [partition_heads(model.heads, model.kv_heads, rank, ranks) for rank in range(ranks)]
    return RankShare(
        max(len(part.queries) for part in parts),
        max(len(part.kv) for part in parts),
        max(len(shard(model.intermediate, rank, ranks, FFN_UNIT).part) for rank in range(ranks)),
        max(map(len, partition(model.vocab, ranks, VOCAB_UNIT))),
    )


def weight_bytes(
    config: ModelConfig, dtype_bytes: int, tensor_parallel: int = 1, pipeline_parallel: int = 1, quantization: str = ""
) -> int:
    """Return the bytes of weights on the rank with the most.

    Layers, query heads, columns of the feed-forward network and rows of the vocabulary are divided by
    :func:`shotcast.layers.partition.partition`. Norms are on every rank, and a key-value head is on every rank that has
    one of its queries. A tied head shares the memory of the embeddings, except with several stages, where the last
    stage has a copy.

    Args:
        quantization: ``fp8`` if layer matrices take one byte per weight plus a float32 per output; ``stored`` if a
            weight takes ``config.stored_bytes`` instead.
    """
    require_division(config, tensor_parallel, pipeline_parallel)
    layer = attention_bytes(config, dtype_bytes, tensor_parallel, quantization)
    layer += network_bytes(config, dtype_bytes, tensor_parallel, quantization)
    return most_of_stages(config, dtype_bytes, tensor_parallel, pipeline_parallel, [layer] * config.layers)


def attention_bytes(config: ModelConfig, dtype_bytes: int, tensor_parallel: int, quantization: str) -> int:
    """Return the bytes of a layer's attention and norms on the rank with the most."""
    share = largest_share(config, tensor_parallel)
    queries, keys = share.heads * config.head_dim, share.kv_heads * config.head_dim
    norms = config.names.attention_norm, config.names.attention_post_norm, config.names.mlp_norm
    rest = config.hidden * (sum(map(bool, norms)) + config.has_post_norms)
    if config.qk_norm:
        rest += queries + keys if config.qk_norm == "projection" else 2 * config.head_dim
    rest += (queries + 2 * keys) * config.attention_bias + config.hidden * config.output_bias
    matrices, outputs = config.hidden * (2 * queries + 2 * keys), queries + 2 * keys + config.hidden
    return rest * dtype_bytes + _matrix_bytes(config, matrices, outputs, dtype_bytes, quantization)


def network_bytes(config: ModelConfig, dtype_bytes: int, tensor_parallel: int, quantization: str) -> int:
    """Return the bytes of a layer's feed-forward network on the rank with the most."""
    columns = largest_share(config, tensor_parallel).columns
    matrices, outputs = 3 * config.hidden * columns, 2 * columns + config.hidden
    return outputs * config.mlp_bias * dtype_bytes + _matrix_bytes(config, matrices, outputs, dtype_bytes, quantization)


def most_of_stages(
    config: ModelConfig, dtype_bytes: int, tensor_parallel: int, pipeline_parallel: int, layers: Sequence[int]
) -> int:
    """Return the bytes of the largest stage, including its part of the vocabulary, given the bytes per layer."""
    words = largest_share(config, tensor_parallel).words
    stages = []
    for stage, part in enumerate(partition(config.layers, pipeline_parallel)):
        first, last = stage == 0, stage == pipeline_parallel - 1
        ends = first + last - (first and last and config.tied)
        rest = (ends * words * config.hidden + last * config.hidden) * dtype_bytes
        stages.append(sum(layers[part.start : part.stop]) + rest)
    return max(stages)


def _matrix_bytes(config: ModelConfig, matrices: int, outputs: int, dtype_bytes: int, quantization: str) -> int:
    if not quantization:
        return matrices * dtype_bytes
    each = config.stored_bytes if quantization == "stored" and config.stored_bytes is not None else 1
    return math.ceil(matrices * each) + 4 * outputs


def kv_bytes_per_token(config: ModelConfig, dtype_bytes: float, kv_heads_of_rank: int, layers_of_rank: int) -> int:
    """Return the bytes of keys and values that a rank stores per token."""
    return 2 * layers_of_rank * kv_heads_of_rank * round(config.head_dim * dtype_bytes)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the free memory of this machine or of this process's control group, whichever is less.

    Args:
        root: the directory where the kernel's file systems are mounted.
    """
    limits = [_free_in_group(*group) for group in control_groups("memory", root)]
    return int(min([meminfo(root).get("MemAvailable", math.inf), *limits]))


def _free_in_group(folder: Path, unified: bool) -> float:
    names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, use = (read_lines(folder / name) for name in names)
    if not limit or not use or limit[0] == "max":
        return math.inf
    # the kernel frees cached files on demand
    cache = [line.split()[1] for line in read_lines(folder / "memory.stat") if line.startswith("inactive_file ")]
    return max(0, int(limit[0]) - int(use[0]) + int(cache[0] if cache else 0))
