"""Functions that a rank of tests/device/test_reduction_words.py runs: reductions of words, interpreted.

They have their own module, since Triton decides at import whether it interprets.
"""

# ruff: noqa: N803, RUF005 (Triton: compile-time arguments are upper case, and tuples are joined by +)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from expected_results import reduced

from shotcast import wire
from shotcast.device.triton.reductions import reduce_words, reduced_unless_stopped
from shotcast.transport.triton.binding import dtype_of, reduction_of

SIZE = 512


@triton.jit
def reduce_kernel(parts, out, COUNT: tl.constexpr, DTYPE: tl.constexpr, REDUCTION: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    words = ()
    for r in tl.static_range(COUNT):
        words = words + (tl.load(parts + r * SIZE + offs),)
    tl.store(out + offs, reduce_words(words, COUNT, DTYPE, REDUCTION))


@triton.jit
def stopped_kernel(out, live, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(out + offs, reduced_unless_stopped(live, offs, DTYPE))


def any_bits(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random bits of SIZE words: NaN, infinities, both zeros, subnormals and numbers."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (4 * SIZE,), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        kinds = torch.tensor([0, 0, 1, 2, 3, 64, 128, 255], dtype=torch.uint8)  # not 0 is true
        return kinds[raw.to(torch.int64) % len(kinds)].view(dtype)
    x = raw.view(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return x
    parts = torch.view_as_real(x) if dtype.is_complex else x
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 1.5]).to(parts.dtype)
    taken = special[torch.randint(8, parts.shape, generator=generator)]
    near = torch.randn(parts.shape, generator=generator).to(parts.dtype)
    which = torch.rand(parts.shape, generator=generator)
    parts.copy_(torch.where(which < 0.4, taken, torch.where(which < 0.8, near, parts)))
    return x


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether bits are equal, all NaNs being one value."""
    if got.is_complex():
        got, wanted = torch.view_as_real(got), torch.view_as_real(wanted)
    if got.is_floating_point():
        nan = wanted.isnan()
        if not torch.equal(nan, got.isnan()):
            return False
        got, wanted = got.masked_fill(nan, 0.0), wanted.masked_fill(nan, 0.0)
    return torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def every_reduction(counts: tuple[int, ...]) -> int:
    """Compare every reduction of every dtype with plain torch. Return how many were compared."""
    done = 0
    for name, reductions in wire.REDUCED.items():
        dtype = getattr(torch, name)
        for reduction in reductions:
            count = counts[done % len(counts)]
            xs = [any_bits(dtype, 100 * done + rank) for rank in range(count)]
            out = torch.empty_like(xs[0])
            words = torch.cat([x.view(torch.int32) for x in xs])
            how = dtype_of(name), reduction_of(name, reduction)
            reduce_kernel[(1,)](words, out.view(torch.int32), count, *how, SIZE)
            assert same(out, reduced(xs, reduction)), (name, reduction, count)
            done += 1
    return done


def stopped() -> None:
    """Check that a stopped call leaves NaN in floats, and that a live one leaves words alone."""
    for name in wire.REDUCED:
        dtype = getattr(torch, name)
        for live in (0, 1):
            words = torch.empty(SIZE, dtype=torch.int32)
            stopped_kernel[(1,)](words, live, dtype_of(name), SIZE)
            if not live and (dtype.is_floating_point or dtype.is_complex):
                assert words.view(dtype).isnan().all(), name
            else:
                assert torch.equal(words, torch.arange(SIZE, dtype=torch.int32)), name
