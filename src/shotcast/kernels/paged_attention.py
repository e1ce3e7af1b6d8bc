"""Attention of one query a sequence over a paged cache, and norm and rotation of queries and keys into it.

For decoding, where time is that of reading keys and values once: every (sequence, key-value head) is divided into
``splits`` parts of its context, each a program that reads its part in tiles for all query heads of the group, so that a
single long sequence uses the whole GPU; a second kernel joins the parts (Flash-Decoding, Dao et al., 2023), if there
are several. Lengths and tables are read on the device: a captured graph serves whatever they hold, and parts without
tokens end at once.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from shotcast.kernels.target import await_prior_kernel, dot, launch_options, release_next_kernel
from shotcast.kernels.words import round_float

TILE, SMALL_TILE = 64, 32
"""Keys that a program has in flight at once; the small tile where a context is in more than _MANY_SPLITS parts."""
_MANY_SPLITS = 16


@triton.jit
def rotate_kernel(
    x,
    norms,
    cosines,
    sines,
    positions,
    slots,
    keys,
    values,
    queries,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, head): heads are the queries', then the keys', then the values'. ``norms`` may be None."""
    release_next_kernel(PDL)
    await_prior_kernel(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, HALF_TILE)
    inside = i < HALF
    source = x + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF)
    first = tl.load(source + i, mask=inside, other=0.0)
    second = tl.load(source + HALF + i, mask=inside, other=0.0)
    slot = tl.load(slots + token)
    if head < HEADS + KV_HEADS:
        DTYPE: tl.constexpr = x.dtype.element_ty
        position = tl.load(positions + token)
        cosine = tl.load(cosines + position * HALF + i, mask=inside)
        sine = tl.load(sines + position * HALF + i, mask=inside)
        a, b = first.to(tl.float32), second.to(tl.float32)
        if norms is not None:
            # rounded before and after the weight, as models are trained
            factor = tl.rsqrt(tl.sum(a * a + b * b, axis=0) / (2 * HALF) + eps)
            weight = norms + head * (2 * HALF) + i
            a = round_float(a * factor, DTYPE).to(tl.float32) * tl.load(weight, mask=inside).to(tl.float32)
            b = round_float(b * factor, DTYPE).to(tl.float32) * tl.load(weight + HALF, mask=inside).to(tl.float32)
            a, b = round_float(a, DTYPE).to(tl.float32), round_float(b, DTYPE).to(tl.float32)
        first = round_float(a * cosine - b * sine, DTYPE)
        second = round_float(b * cosine + a * sine, DTYPE)
    if head < HEADS:
        target = queries + (token * HEADS + head) * (2 * HALF)
    elif head < HEADS + KV_HEADS:
        target = keys + (slot * KV_HEADS + head - HEADS) * (2 * HALF)
    else:
        target = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF)
    tl.store(target + i, first, mask=inside)
    tl.store(target + HALF + i, second, mask=inside)


@triton.jit
def decode_kernel(
    queries,
    keys,
    values,
    tables,
    rows,
    lengths,
    first_heads,
    parts,
    weights,
    result,
    scale,
    blocks,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (sequence, key-value head, split); ``parts``: float32 [sequences, heads, splits, head_dim], sums of
    values by weights that are relative to the largest score; ``weights``: [..., 2], that score and the weights' sum.
    One split alone is the ``result``, [sequences, heads, head_dim]."""
    release_next_kernel(PDL)
    await_prior_kernel(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    first_head = tl.load(first_heads + kv)
    head = first_head + tl.arange(0, GROUP)
    mine = head < tl.load(first_heads + kv + 1)
    d = tl.arange(0, WIDTH)
    wide = d < HEAD_DIM
    query = tl.load(
        queries + (sequence * HEADS + head[:, None]) * HEAD_DIM + d[None, :],
        mask=mine[:, None] & wide[None, :],
        other=0.0,
    )
    length = tl.load(lengths + sequence)
    table = tables + tl.load(rows + sequence).to(tl.int64) * blocks
    begin = tl.maximum(length - window, 0) if window > 0 else 0
    each = ((length - begin + SPLITS - 1) // SPLITS + TILE - 1) // TILE * TILE
    start = begin + split * each
    stop = tl.minimum(start + each, length)
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, WIDTH], tl.float32)
    for tile in range(start, stop, TILE):
        position = tile + tl.arange(0, TILE)
        there = position < stop
        block = tl.load(table + position // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        row = ((block * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + kv) * HEAD_DIM
        address = row[:, None] + d[None, :]
        key = tl.load(keys + address, mask=there[:, None] & wide[None, :], other=0.0)
        value = tl.load(values + address, mask=there[:, None] & wide[None, :], other=0.0)
        scores = dot(query, tl.trans(key)) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        weight = tl.exp(scores - higher[:, None])
        kept = tl.exp(largest - higher)
        total = total * kept + tl.sum(weight, axis=1)
        out = out * kept[:, None] + dot(weight.to(value.dtype), value)
        largest = higher
    place = (sequence * HEADS + head) * SPLITS + split
    address = place[:, None] * HEAD_DIM + d[None, :]
    if SPLITS == 1:
        joined = round_float(out / total[:, None], result.dtype.element_ty)
        tl.store(result + address, joined, mask=mine[:, None] & wide[None, :])
    else:
        tl.store(parts + address, out, mask=mine[:, None] & wide[None, :])
        tl.store(weights + place * 2, largest, mask=mine)
        tl.store(weights + place * 2 + 1, total, mask=mine)


@triton.jit
def join_kernel(
    parts, weights, out, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr
):
    """Program (sequence * heads): the parts of one head as one."""
    release_next_kernel(PDL)
    await_prior_kernel(PDL)
    place = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    largest = tl.load(weights + (place * SPLITS + s) * 2)
    total = tl.load(weights + (place * SPLITS + s) * 2 + 1)
    share = tl.where(total > 0, tl.exp(largest - tl.max(largest, axis=0)), 0.0)
    address = (place * SPLITS + s[:, None]) * HEAD_DIM + d[None, :]
    part = tl.load(parts + address, mask=(total > 0)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    joined = tl.sum(part * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    tl.store(out + place * HEAD_DIM + d, round_float(joined, out.dtype.element_ty), mask=d < HEAD_DIM)


def rotate_into_cache(
    x: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    norms: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """As :func:`shotcast.cpu.attention.rotate_into_cache`; x, queries and caches are of one dtype.

    Args:
        norms: [heads + kv heads, head_dim], weights of an RMSNorm of each query's and key's head before that.
        eps: of the norm.
    """
    tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    options = launch_options(x.device, warps=1)
    rotate_kernel[(tokens, heads + 2 * kv_heads)](
        x,
        norms,
        cosines,
        sines,
        positions,
        slots,
        keys,
        values,
        queries,
        eps,
        heads,
        kv_heads,
        head_dim // 2,
        triton.next_power_of_2(head_dim // 2),
        options["launch_pdl"],
        **options,
    )


class Decoding:
    """Attention of one query a sequence, for one layer shape; the scratch between its kernels is kept.

    Args:
        heads, head_dim: of the queries.
        kv_of: for each query head its key-value head, ascending.
        sequences: at most.
        processors: multiprocessors of the GPU.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        kv_of: tuple[int, ...],
        sequences: int,
        processors: int,
        device: torch.device,
    ):
        self._heads, self._head_dim, self._kv_heads = heads, head_dim, max(kv_of) + 1
        starts = [kv_of.index(kv) for kv in range(self._kv_heads)] + [heads]
        self._first_heads = torch.tensor(starts, dtype=torch.int32, device=device)
        largest = max(stop - start for start, stop in itertools.pairwise(starts))
        self._group = max(16, triton.next_power_of_2(largest))  # tl.dot takes 16 rows or more
        self._processors = processors
        room = max(count * self.splits(count) for count in range(1, sequences + 1)) * heads
        self._parts = torch.empty(room * head_dim, device=device)
        self._weights = torch.empty(room * 2, device=device)

    def splits(self, sequences: int) -> int:
        """Parts of each context, so that about two programs a processor are there: a power of two."""
        wanted = max(1, 2 * self._processors // (sequences * self._kv_heads))
        return min(64, 1 << (wanted.bit_length() - 1))

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        block_size: int,
        window: int,
        out: torch.Tensor,
    ) -> None:
        """As :func:`shotcast.cpu.attention.decode`; queries, caches and out are of one dtype."""
        sequences = queries.shape[0]
        splits, width = self.splits(sequences), triton.next_power_of_2(self._head_dim)
        options = launch_options(queries.device, warps=4)
        pdl = options["launch_pdl"]
        decode_kernel[(sequences, self._kv_heads, splits)](
            queries,
            keys,
            values,
            tables,
            rows,
            lengths,
            self._first_heads,
            self._parts,
            self._weights,
            out,
            self._head_dim**-0.5,
            tables.shape[1],
            window,
            self._heads,
            self._kv_heads,
            self._head_dim,
            self._group,
            max(16, width),
            block_size,
            splits,
            TILE if splits <= _MANY_SPLITS else SMALL_TILE,
            pdl,
            **options,
        )
        if splits > 1:
            join_kernel[(sequences * self._heads,)](
                self._parts, self._weights, out, self._head_dim, width, splits, pdl, **options
            )
