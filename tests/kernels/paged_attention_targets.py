"""Ranks of test_paged_attention.py: the kernels under the interpreter, compared with compiled host code."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from shotcast.kernels.cpu import attention
from shotcast.kernels.triton import paged_attention, rope
from shotcast.layers.attention import norm_heads
from shotcast.layers.quantized import quantize

EPS = 1e-3
LENGTHS = (1, 5, 130, 64, 65)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to memory whose end is guarded: reading beyond it raises SIGSEGV."""
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0) == 0  # PROT_NONE
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=size)
    return whole[size - tensor.nbytes :].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def both_ways(
    kv_head_of: tuple[int, ...],
    head_dim: int,
    block_size: int,
    window: int,
    dtype_name: str,
    normed: bool,
    num_sms: int,
    lengths_of: tuple[int, ...] = LENGTHS,
    device: str = "cpu",
    scoring: tuple[float | None, float] = (None, 0.0),
    explain_above: float = float("inf"),
) -> float:
    """Return the largest difference between the kernels and the host's attention, relative to the largest value.

    Raises AssertionError above ``explain_above``, which says which half was off, and where.
    """
    dtype = getattr(torch, dtype_name)
    generator = torch.Generator().manual_seed(head_dim)
    heads, kv_heads, sequences = len(kv_head_of), max(kv_head_of) + 1, len(lengths_of)
    blocks_of = [-(-length // block_size) for length in lengths_of]
    blocks = torch.randperm(sum(blocks_of), generator=generator)
    slots_in_all = sum(blocks_of) * block_size
    keys, values = (torch.randn(slots_in_all, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    tables = torch.zeros(sequences, max(blocks_of), dtype=torch.int32)
    taken = 0
    for sequence, count in enumerate(blocks_of):
        tables[sequence, :count] = blocks[taken : taken + count]
        taken += count
    last = torch.tensor(lengths_of) - 1
    slots = tables[torch.arange(sequences), last // block_size].long() * block_size + last % block_size
    x = torch.randn(sequences, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    angles = torch.rand(max(lengths_of), head_dim // 2, generator=generator) * 6
    lengths = torch.tensor(lengths_of, dtype=torch.int32)
    # The rows of the sequences are in another order than the sequences, in a larger table.
    rows = torch.arange(sequences).flip(0) + 1
    spread = torch.full((sequences + 2, tables.shape[1]), 1 << 20, dtype=torch.int32)
    spread[rows] = tables
    norms = (torch.rand(heads + kv_heads, head_dim, generator=generator) + 0.5).to(dtype) if normed else None

    def run(kernels: bool, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def there(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(tensor.to(device if kernels else "cpu", copy=True) for tensor in tensors)

        mine = there(keys.to(kind), values.to(kind))
        queries, out = there(*[torch.full((sequences, heads, head_dim), float("nan"), dtype=kind)] * 2)
        turns, places = there(angles.cos(), angles.sin()), there(last, slots)
        paged = there(spread, rows, lengths)
        if kernels:
            given = there(x.to(kind))[0]
            gains = None if norms is None else there(norms)[0]
            if device == "cpu":
                given, gains = guarded(given), None if gains is None else guarded(gains)
            rotated = tuple(tensor.clone() for tensor in mine)
            rope.rotate_into_cache(given, *turns, *places, *rotated, queries, gains, EPS)
            decoding = paged_attention.PagedDecoding(heads, head_dim, kv_head_of, 8, num_sms, given.device)
            for scratch in decoding._parts:
                # everything that is merged must have been written, also by parts without tokens
                scratch.fill_(float("nan"))
            decoding(given, *turns, *mine, *paged, block_size, window, out, gains, EPS, *scoring)
            # Compilers fuse products and sums in float32 in one kernel and not in the other.
            joined = 1e-6 if dtype == torch.float32 and device != "cpu" else 0.0
            for kept, alone in zip(mine, rotated, strict=True):
                torch.testing.assert_close(kept, alone, rtol=joined, atol=joined)
        else:
            given = x if norms is None else norm_heads(x, norms, EPS)
            attention.rotate_into_cache(given.to(kind), *turns, *places, *mine, queries)
            attention.decode(queries, *mine, *paged, torch.tensor(kv_head_of), block_size, window, out, *scoring)
        return out.float().cpu(), mine[0].float().cpu(), mine[1].float().cpu()

    results, expected = run(True, dtype), run(False, torch.float32)
    worst = 0.0
    for found, wanted in zip(results, expected, strict=True):
        assert found.shape == wanted.shape
        assert found.isfinite().all()  # comparisons with NaN are false
        worst = max(worst, ((found - wanted).abs().max() / wanted.abs().max()).item())
    if worst > explain_above:  # seen twice in whole runs, 7.2e-5 in float32 each time, and never alone
        again = run(True, dtype), run(False, torch.float32)
        raise AssertionError(
            f"{worst}: {_differences(results, expected)}; the kernels again: "
            f"{_differences(again[0], results)}; the host again: {_differences(again[1], expected)}"
        )
    return worst


def _differences(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> str:
    """Say how many numbers differ by more than rounding, and by how much, in outputs, keys and values."""
    texts = []
    for name, x, y in zip(("outputs", "keys", "values"), one, other, strict=True):
        far = (x - y).abs() > 1e-6 * y.abs().max()
        places = [tuple(place) for place in far.nonzero().tolist()]
        texts.append(f"{name} {len(places)} of {x.numel()}, first {places[:3]}, most {(x - y).abs().max().item():.3g}")
    return ", ".join(texts)


def cap_matters(case: tuple[Any, ...], scoring: tuple[float, float]) -> tuple[float, float]:
    """Return what :func:`both_ways` does with a scale and a cap, and how far the host's results are off without the
    cap."""
    found = both_ways(*case, scoring=scoring)
    decode = attention.decode
    try:
        attention.decode = lambda *given: decode(*given[:-1])  # type: ignore[assignment]
        return found, both_ways(*case, scoring=scoring)
    finally:
        attention.decode = decode


def in_float8(dtype_name: str, num_sms: int, device: str = "cpu") -> tuple[float, bool]:
    """Return how far decoding with a cache in FP8 is off relative to the largest value, and whether the two kernels
    that write to it agree."""
    dtype, kv_head_of, head_dim, block_size = getattr(torch, dtype_name), (0, 0, 1), 24, 4
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, sequences = len(kv_head_of), max(kv_head_of) + 1, len(LENGTHS)
    blocks_of = [-(-length // block_size) for length in LENGTHS]
    blocks = torch.randperm(sum(blocks_of), generator=generator).int()
    tables = torch.zeros(sequences, max(blocks_of), dtype=torch.int32)
    for sequence, mine in enumerate(blocks.split(blocks_of)):
        tables[sequence, : len(mine)] = mine
    last = torch.tensor(LENGTHS) - 1
    slots = tables[torch.arange(sequences), last // block_size].long() * block_size + last % block_size
    x = torch.randn(sequences, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    angles = torch.rand(max(LENGTHS), head_dim // 2, generator=generator) * 6
    turns = angles.cos(), angles.sin()
    paged = tables, torch.arange(sequences), torch.tensor(LENGTHS, dtype=torch.int32)

    def quantized(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = quantize(cache.flatten(0, 1))
        return found.values.view(cache.shape), found.scale.view(cache.shape[:2])

    kept = [torch.randn(len(blocks) * block_size, kv_heads, head_dim, generator=generator) for _ in range(2)]
    caches, scales = zip(*map(quantized, kept), strict=True)
    exact = [cache.float() * scale[:, :, None] for cache, scale in zip(caches, scales, strict=True)]

    def there(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to(device, copy=True) for tensor in tensors]

    written = []
    queries, out = there(*[torch.empty(sequences, heads, head_dim, dtype=dtype)] * 2)
    for decodes in (False, True):
        mine, of_mine, given, angles_of = there(*caches), there(*scales), there(x)[0], there(*turns)
        if decodes:
            decoding = paged_attention.PagedDecoding(heads, head_dim, kv_head_of, 8, num_sms, given.device)
            arguments = *angles_of, *mine, *there(*paged), block_size, 0, out
            decoding(given, *arguments, scales=(of_mine[0], of_mine[1]))
        else:
            places = there(last, slots)
            rope.rotate_into_cache(given, *angles_of, *places, *mine, queries, scales=(of_mine[0], of_mine[1]))
        written.append([tensor.cpu() for tensor in (*(one.view(torch.uint8) for one in mine), *of_mine)])
    same = all(map(torch.equal, *written))

    rotated = torch.empty(sequences, heads, head_dim)
    attention.rotate_into_cache(x.float(), *turns, last, slots, exact[0], exact[1], rotated)
    for cache in exact:
        values, scale = quantized(cache[slots])
        cache[slots] = values.float() * scale[:, :, None]
    wanted = torch.empty(sequences, heads, head_dim)
    attention.decode(rotated, exact[0], exact[1], *paged, torch.tensor(kv_head_of), block_size, 0, wanted)
    return ((out.float().cpu() - wanted).abs().max() / wanted.abs().max()).item(), same
