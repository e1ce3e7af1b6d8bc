"""Rotation of queries and keys by their positions (RoPE), after a norm of each head if the model has one.

During decoding, this is part of attention (:mod:`shotcast.kernels.triton.paged_attention`), which uses the functions of
this module. Steps with prompts run a separate kernel, which also writes keys and values to the paged cache.

An FP8 cache has e4m3 values, and a scale for each head of each key and value:

    scale = max |head| / 448, at least 2^-126;   value = e4m3(head / scale)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from shotcast.device.triton.float8 import from_e4m3
from shotcast.device.triton.intrinsics import (
    await_prior_kernel,
    has_float8_conversions,
    launch_options,
    release_next_kernel,
)
from shotcast.device.triton.words import round_float
from shotcast.kernels.triton.norm import e4m3_byte, magnitude, scale_of


class Rotation(NamedTuple):
    """The tables of a rotation, float32 [positions, HALF], and the weights and the epsilon of the norm before it.

    ``norms`` is [heads + kv heads, head_dim], or None for no norm.
    """

    norms: Any
    cosines: Any
    sines: Any
    eps: Any


class Cache(NamedTuple):
    """Keys and values [slots, KV_HEADS, head_dim], and their scales [slots, KV_HEADS], None unless the cache is FP8.

    Kernels unpack it, since Triton's tuples already have a ``values`` attribute.
    """

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any


@dataclass(frozen=True, slots=True)
class RotateShape:
    """The SHAPE argument of :func:`rotate_kernel`. HALF_TILE: HALF rounded up to a power of two."""

    HEADS: int
    KV_HEADS: int
    HALF: int
    HALF_TILE: int
    HEADS_TILE: int
    PDL: bool


@triton.jit
def norm_and_rotate(a, b, norms, cosine, sine, eps, HEADS_TILE: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Normalize heads [HEADS_TILE, HALF_TILE], given by their halves, with the halves ``norms`` of their weights (or
    None), and rotate them.

    The computation is in float32, rounded to DTYPE before and after the weight, as in training, and at the end.
    """
    a, b = a.to(tl.float32), b.to(tl.float32)
    if norms is not None:
        factor = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
        a = round_float(a * factor, DTYPE).to(tl.float32) * norms[0].to(tl.float32)
        b = round_float(b * factor, DTYPE).to(tl.float32) * norms[1].to(tl.float32)
        a, b = round_float(a, DTYPE).to(tl.float32), round_float(b, DTYPE).to(tl.float32)
    return round_float(a * cosine - b * sine, DTYPE), round_float(b * cosine + a * sine, DTYPE)


@triton.jit
def load_halves(base, rows, i, mask, HALF: tl.constexpr):
    """Load both halves of the heads at indices ``rows`` [n, 1], each of 2 * HALF elements, from ``base``."""
    address = rows * (2 * HALF) + i
    return tl.load(base + address, mask=mask, other=0.0), tl.load(base + address + HALF, mask=mask, other=0.0)


@triton.jit
def quantize_halves(a, b):
    """Quantize heads, given by their halves; return their bytes as int32, and each head's scale, float32 [heads, 1]."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    scale = scale_of(tl.maximum(tl.max(magnitude(a), axis=1), tl.max(magnitude(b), axis=1)))[:, None]
    inverse = tl.div_rn(1.0, scale)
    return e4m3_byte(a * inverse), e4m3_byte(b * inverse), scale


@triton.jit
def as_stored(byte, cache):
    """Convert bytes, given as int32, to elements of a cache."""
    return byte.to(tl.uint8).to(cache.dtype.element_ty, bitcast=True)


@triton.jit
def from_cache(stored, DTYPE: tl.constexpr):
    """Convert elements of a cache (DTYPE, e4m3, or e4m3 bytes) to DTYPE, without their scale."""
    if stored.dtype == tl.uint8:
        stored = from_e4m3(stored.to(tl.int32))
    return stored.to(DTYPE)


@triton.jit
def rotate_kernel(x, rotation, positions, slots, cache, queries, SHAPE: tl.constexpr):
    """Program (token, part): process HEADS_TILE heads; queries come first, then keys, then values.

    ``rotation`` is a :class:`Rotation`, ``cache`` a :class:`Cache` and SHAPE a :class:`RotateShape`.
    """
    HEADS: tl.constexpr = SHAPE.HEADS
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    HALF: tl.constexpr = SHAPE.HALF
    HEADS_TILE: tl.constexpr = SHAPE.HEADS_TILE
    release_next_kernel(SHAPE.PDL)
    await_prior_kernel(SHAPE.PDL)
    norms, cosines, sines, eps = rotation
    keys, values, key_scales, value_scales = cache
    ALL_HEADS: tl.constexpr = HEADS + 2 * KV_HEADS
    DTYPE: tl.constexpr = x.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None]
    i = tl.arange(0, SHAPE.HALF_TILE)[None, :]
    in_half = i < HALF
    first, second = load_halves(x, token * ALL_HEADS + head, i, in_half & (head < ALL_HEADS), HALF)
    slot = tl.load(slots + token)
    position = tl.load(positions + token)
    cosine = tl.load(cosines + position * HALF + i, mask=in_half)
    sine = tl.load(sines + position * HALF + i, mask=in_half)
    rotates = head < HEADS + KV_HEADS
    gains = None if norms is None else load_halves(norms, head, i, in_half & rotates, HALF)
    low, high = norm_and_rotate(first, second, gains, cosine, sine, eps, HEADS_TILE, HALF, DTYPE)
    first, second = tl.where(rotates, low, first), tl.where(rotates, high, second)
    query = queries + (token * HEADS + head) * (2 * HALF) + i
    tl.store(query, first, mask=in_half & (head < HEADS))
    tl.store(query + HALF, second, mask=in_half & (head < HEADS))
    if key_scales is not None:
        low_byte, high_byte, scale = quantize_halves(first, second)
        first, second = as_stored(low_byte, keys), as_stored(high_byte, keys)
        of_head = slot * KV_HEADS + head - HEADS
        tl.store(key_scales + of_head, scale, mask=rotates & (head >= HEADS))
        tl.store(value_scales + of_head - KV_HEADS, scale, mask=(head >= HEADS + KV_HEADS) & (head < ALL_HEADS))
    cache_offset = (slot * KV_HEADS + head - HEADS) * (2 * HALF) + i
    tl.store(keys + cache_offset, first, mask=in_half & rotates & (head >= HEADS))
    tl.store(keys + cache_offset + HALF, second, mask=in_half & rotates & (head >= HEADS))
    cache_offset -= KV_HEADS * (2 * HALF)
    tl.store(values + cache_offset, first, mask=in_half & (head >= HEADS + KV_HEADS) & (head < ALL_HEADS))
    tl.store(values + cache_offset + HALF, second, mask=in_half & (head >= HEADS + KV_HEADS) & (head < ALL_HEADS))


CacheScales = tuple[torch.Tensor, torch.Tensor] | None
"""The scales of keys and of values in an FP8 cache; None for any other cache."""


def stored(keys: torch.Tensor, values: torch.Tensor, scales: CacheScales) -> Cache:
    """Prepare caches and scales for kernels: FP8 is passed as bytes if the GPU has no instructions for it."""
    if scales is None:
        return Cache(keys, values, None, None)
    if not has_float8_conversions(keys.device):
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    return Cache(keys, values, *scales)


_PAIRS = 1024
"""Pairs of elements per program."""


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
    scales: CacheScales = None,
) -> None:
    """Rotate as :func:`shotcast.kernels.cpu.attention.rotate_into_cache` does; x, queries and caches have the same
    dtype.

    Args:
        scales: float32 [slots, kv heads], of keys and of values, if the caches are float8_e4m3fn.
        norms: [heads + kv heads, head_dim], weights of an RMSNorm over each query and key head before the rotation.
    """
    tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    all_heads = heads + 2 * kv_heads
    half_tile = triton.next_power_of_2(head_dim // 2)
    count = min(triton.next_power_of_2(all_heads), max(1, _PAIRS // half_tile))
    options = launch_options(x.device, warps=max(1, count * half_tile // 256))  # 16-byte accesses of 16-bit values
    rotate_kernel[(tokens, triton.cdiv(all_heads, count))](
        x,
        Rotation(norms, cosines, sines, eps),
        positions,
        slots,
        stored(keys, values, scales),
        queries,
        RotateShape(heads, kv_heads, head_dim // 2, half_tile, count, options["launch_pdl"]),
        **options,
    )
