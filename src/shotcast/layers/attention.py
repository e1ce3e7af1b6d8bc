"""Attention over a paged cache of keys and values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the customary name)

from shotcast.layers.batch import Batch, PrefillMetadata


class KVCache:
    """The keys and values of one layer on one rank.

    Attributes:
        keys, values: [blocks * block_size, key-value heads, head_dim]; float32 on the CPU, the model's dtype or
            float8_e4m3fn on CUDA.
        scales: float32 [blocks * block_size, key-value heads], of keys and of values, if they are float8_e4m3fn.
    """

    def __init__(
        self, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        self.block_size = block_size
        shape = (blocks * block_size, kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.scales: tuple[torch.Tensor, torch.Tensor] | None = None
        if dtype == torch.float8_e4m3fn:
            self.scales = torch.empty(shape[:2], device=device), torch.empty(shape[:2], device=device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, self.values, *(self.scales or ())))


def norm_heads(qkv: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMSNorm to each head of queries and keys, using its row of ``weight`` [heads + kv heads, head_dim]."""
    num_decodes, head_dim = weight.shape
    queries_and_keys = qkv[:, : num_decodes * head_dim].view(-1, num_decodes, head_dim)
    normed = F.rms_norm(queries_and_keys.float(), (head_dim,), None, eps).to(qkv.dtype) * weight
    return torch.cat((normed.flatten(1), qkv[:, num_decodes * head_dim :]), dim=1)


class Attention:
    """Causal attention of a rank's heads: normalizes and rotates queries and keys, caches keys and values, and attends.

    Args:
        kv_head_of: the index of the key-value head of each query head.
        cosines, sines: float32 [positions, head_dim / 2].
        max_num_seqs: the largest number of sequences that decode together.
        window: the number of tokens that a query sees, including itself; 0 for all.
        norms: [heads + kv heads, head_dim], weights of an RMSNorm of each query's and key's head; None for no norm.
        share_scratch_with: another layer of the same shape that shares its scratch memory; they run in turn.
        scale: the factor of products of queries and keys; None for ``head_dim ** -0.5``.
        cap: if not 0, scores x become ``cap * tanh(x / cap)``.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        kv_head_of: tuple[int, ...],
        cosines: torch.Tensor,
        sines: torch.Tensor,
        max_num_seqs: int,
        window: int = 0,
        norms: torch.Tensor | None = None,
        eps: float = 0.0,
        share_scratch_with: Attention | None = None,
        scale: float | None = None,
        cap: float = 0.0,
    ):
        self.heads, self.kv_heads, self.head_dim = heads, max(kv_head_of) + 1, head_dim
        self.window = window
        self._scoring = head_dim**-0.5 if scale is None else scale, cap
        self._norms, self._eps = norms, eps
        self._cosines, self._sines = cosines, sines
        self._kv_head_of = torch.tensor(kv_head_of, device=cosines.device)
        starts = [kv_head_of.index(kv) for kv in range(self.kv_heads)] + [heads]
        self._first_heads = torch.tensor(starts, dtype=torch.int32, device=cosines.device)
        self._group = max(stop - start for start, stop in itertools.pairwise(starts))
        self._paged_decoding: Any = None if share_scratch_with is None else share_scratch_with._paged_decoding
        if self._paged_decoding is None and cosines.device.type == "cuda":
            from shotcast.kernels.triton.paged_attention import PagedDecoding

            num_sms = torch.cuda.get_device_properties(cosines.device).multi_processor_count
            self._paged_decoding = PagedDecoding(heads, head_dim, kv_head_of, max_num_seqs, num_sms, cosines.device)
        self._even_groups = self._group * self.kv_heads == heads

    def __call__(self, qkv: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
        """Attend: queries, keys and values [tokens, (heads + 2 kv heads) * head_dim] to [tokens, heads * head_dim]."""
        num_decodes = batch.num_decodes
        out = self._new_heads(qkv, cache)
        if batch.tiles is not None:
            from shotcast.kernels.triton.prompt_attention import attend

            queries = self._rotate(qkv, cache, batch, slice(None))
            tiles = batch.block_tables, *batch.tiles, self._first_heads, self._group, cache.block_size, self.window
            attend(queries, cache.keys, cache.values, *tiles, out, *self._scoring, cache.scales)
        paged = cache.keys, cache.values, batch.block_tables, batch.table_rows, batch.seq_lens
        if self._paged_decoding is not None and num_decodes:
            rest_of_cache = cache.block_size, self.window, out[:num_decodes]
            options = self._norms, self._eps, *self._scoring, cache.scales
            self._paged_decoding(qkv[:num_decodes], self._cosines, self._sines, *paged, *rest_of_cache, *options)
        elif num_decodes:
            from shotcast.kernels.cpu.attention import decode

            queries = self._rotate(qkv[:num_decodes], cache, batch, slice(0, num_decodes))
            decode(queries, *paged, self._kv_head_of, cache.block_size, self.window, out[:num_decodes], *self._scoring)
        if batch.prefill is not None:
            rest = slice(num_decodes, None)
            self._prefill(self._rotate(qkv[rest], cache, batch, rest), cache, batch.prefill, out[rest])
        return out.view(qkv.shape[0], -1).to(qkv.dtype)

    def _new_heads(self, qkv: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Allocate [tokens, heads, head_dim] in the dtype that attention computes in."""
        dtype = cache.keys.dtype if cache.scales is None else qkv.dtype
        return qkv.new_empty(qkv.shape[0], self.heads, self.head_dim, dtype=dtype)

    def max_tile_tokens(self, tokens: int, dtype: torch.dtype, stored: torch.dtype) -> int:
        """Return the largest number of tokens in a tile of :class:`~shotcast.layers.batch.AttentionTiles`.

        ``stored`` is the dtype of cached keys and values.
        """
        from shotcast.device.triton.intrinsics import is_hopper, num_sms
        from shotcast.kernels.triton.prompt_attention import tile_tokens

        device = self._cosines.device
        shape = self._group, self.kv_heads, self.head_dim
        return tile_tokens(tokens, *shape, dtype, num_sms(device), is_hopper(device) and stored == dtype)

    def _rotate(self, qkv: torch.Tensor, cache: KVCache, batch: Batch, part: slice) -> torch.Tensor:
        """Return rotated queries [tokens, heads, head_dim], and write keys and values to the cache."""
        queries = self._new_heads(qkv, cache)
        places = batch.positions[part], batch.slot_mapping[part]
        rotation = self._cosines, self._sines, *places, cache.keys, cache.values, queries
        if self._paged_decoding is None:
            from shotcast.kernels.cpu.attention import rotate_into_cache

            x = qkv if self._norms is None else norm_heads(qkv, self._norms, self._eps)
            rotate_into_cache(x.to(cache.keys.dtype), *rotation)
        else:
            from shotcast.kernels.triton import rope

            rope.rotate_into_cache(qkv, *rotation, self._norms, self._eps, cache.scales)
        return queries

    def _prefill(self, queries: torch.Tensor, cache: KVCache, prefill: PrefillMetadata, out: torch.Tensor) -> None:
        """Attend with the last tokens of each sequence, [tokens, heads, head_dim], to themselves and earlier ones."""
        bounds = zip(itertools.pairwise(prefill.cu_seqlens_q), itertools.pairwise(prefill.cu_seqlens_k), strict=True)
        for (first, stop), (first_key, stop_key) in bounds:
            out[first:stop] = self._attend(queries[first:stop], cache, prefill.slots[first_key:stop_key])

    def _attend(self, queries: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
        """Run :meth:`_prefill` for one sequence."""
        length, count = slots.shape[0], queries.shape[0]
        scale, cap = self._scoring
        even = self._even_groups and not cap
        # [1, heads, tokens, head_dim], as scaled_dot_product_attention takes it
        keys, values = (
            (cached[slots] if even else cached[slots][:, self._kv_head_of]).transpose(0, 1)[None]
            for cached in (cache.keys, cache.values)
        )
        options: dict[str, Any] = {"enable_gqa": even and self.heads != self.kv_heads}
        if count == length and not 0 < self.window < length and not cap:
            options["is_causal"] = True
        else:
            positions = torch.arange(length, device=queries.device)
            ages = positions[length - count :, None] - positions
            seen = ages >= 0
            options["attn_mask"] = seen & (ages < self.window) if self.window else seen
        if cap:
            scores = queries.transpose(0, 1)[None] @ keys.transpose(2, 3) * (scale / cap)
            weights = (cap * scores.tanh_()).masked_fill_(~options["attn_mask"], -math.inf).softmax(-1)
            return (weights @ values)[0].transpose(0, 1)
        out = F.scaled_dot_product_attention(queries.transpose(0, 1)[None], keys, values, scale=scale, **options)
        return out[0].transpose(0, 1)
