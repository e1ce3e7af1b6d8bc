"""PyTorch's attention of sequences of several lengths at once. The only file that knows it.

``scaled_dot_product_attention`` takes one sequence, or several of one length: a call for each prompt and layer, most of
them too small for a GPU, and for prompts in chunks with a mask besides.
"""

from __future__ import annotations

import torch


def serves(queries: torch.Tensor) -> bool:
    """Whether :func:`attend` takes such."""
    return queries.is_cuda and queries.dtype in (torch.bfloat16, torch.float16)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    most_queries: int,
    most_keys: int,
    window: int,
) -> torch.Tensor:
    """Causal attention within each sequence; its queries are the last of its positions.

    Args:
        queries: [queries of all sequences, heads, head_dim], sequence by sequence.
        keys, values: [keys of all sequences, heads, head_dim].
        query_starts, key_starts: int32 [sequences + 1] on the device, of each sequence the first; and the number.
        most_queries, most_keys: of a sequence.
        window: keys back that a query sees, its own included; 0 for all.

    Returns:
        As ``queries``.
    """
    from torch.nn.attention.varlen import varlen_attn

    back = window - 1 if window else -1
    out = varlen_attn(queries, keys, values, query_starts, key_starts, most_queries, most_keys, window_size=(back, 0))
    assert isinstance(out, torch.Tensor)
    return out
