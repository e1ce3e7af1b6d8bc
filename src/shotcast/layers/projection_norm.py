"""RMSNorm over all queries, and over all keys, of a layer whose heads are divided between ranks."""

from __future__ import annotations

import torch

from shotcast.layers.parallel import Parallel
from shotcast.layers.partition import partition_heads
from shotcast.layers.weights import Weights


class ProjectionNorm:
    """The norms of a rank's queries and keys, using mean squares over all heads.

    Args:
        names: the names of the weights of queries and keys, without ".weight".
        eps: added to the mean squares.
    """

    def __init__(
        self,
        weights: Weights,
        names: tuple[str, str],
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        parallel: Parallel,
    ):
        self._parallel, self._eps = parallel, eps
        own = partition_heads(heads, kv_heads, parallel.rank, parallel.size)
        # a key-value head that several ranks have is counted by the first of them
        group = heads // kv_heads
        kept = 0 if own.zeroed else len(own.kv) - (own.queries.start % group > 0)
        self._counted = (0 if own.zeroed else len(own.queries) * head_dim, kept * head_dim)
        self._totals = torch.tensor([heads * head_dim, kv_heads * head_dim], device=weights.device)
        self._weights = [
            weights.load(f"{name}.weight", slice(part.start * head_dim, part.stop * head_dim))
            for name, part in zip(names, (own.queries, own.kv), strict=True)
        ]

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Normalize the queries and keys of [tokens, (heads + 2 kv heads) * head_dim]."""
        widths = [len(weight) for weight in self._weights]
        *parts, values = qkv.split([*widths, qkv.shape[1] - sum(widths)], dim=1)
        squares = torch.stack(
            [
                part[:, part.shape[1] - counted :].float().square().sum(1)
                for part, counted in zip(parts, self._counted, strict=True)
            ],
            dim=1,
        )
        factors = torch.rsqrt(self._parallel.all_reduce(squares) / self._totals + self._eps)
        normed = [
            (part.float() * factor[:, None] * weight).to(qkv.dtype)
            for part, factor, weight in zip(parts, factors.unbind(1), self._weights, strict=True)
        ]
        return torch.cat((*normed, values), dim=1)
