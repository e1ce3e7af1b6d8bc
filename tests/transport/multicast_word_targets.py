"""Functions that a rank of tests/transport/test_multicast_words.py runs: multicast.py interpreted, compared with torch.

They have their own module, since Triton decides at import whether it interprets.
"""

# ruff: noqa: N803 (Triton: compile-time arguments are upper case, and tuples are joined by +)
from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from shotcast.collectives import reference
from shotcast.transport.triton import multicast
from shotcast.transport.triton.multicast import multicast_sum, multicast_words, quads_of
from word_targets import DTYPES, aligned, expect, random_words

NOWHERE = 1 << 52
SIZE = 64


@triton.jit
def store_kernel(address, data, count, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    multicast_words(address, offs, tl.load(data + offs), offs < count)


@triton.jit
def sum_kernel(address, out, count, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE // 4)
    sums = multicast_sum(address, places, places * 4 < count, DTYPE)
    for i in tl.static_range(4):
        tl.store(out + places * 4 + i, sums[i])


@triton.jit
def quads_kernel(data, out, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    quads = quads_of(tl.load(data + offs), SIZE // 4)
    for i in tl.static_range(4):
        tl.store(out + i * (SIZE // 4) + tl.arange(0, SIZE // 4), quads[i])


def copies_of(ranks: int, seed: int) -> tuple[list[torch.Tensor], multicast.Emulated]:
    """Return the memory of each rank, twice a tile and a quad, and its multicast address."""
    memory = [aligned(random_words(2 * SIZE + 4, seed + r).view(torch.uint8)).view(torch.int32) for r in range(ranks)]
    area = multicast.emulate(NOWHERE, memory[0].nbytes, tuple(copy.data_ptr() for copy in memory))
    return memory, area


def takes_quads_apart() -> None:
    data = random_words(SIZE, 1)
    out = torch.zeros_like(data)
    quads_kernel[(1,)](data, out, SIZE)
    assert torch.equal(out.view(4, -1), data.view(-1, 4).T)


def stores() -> int:
    """Store whole quads of a tile, from none to all, at every other quad. Every rank gets these words and no other."""
    done = 0
    for ranks, count, quad in itertools.product((1, 3, 8), range(0, SIZE + 1, 4), (0, 7)):
        memory, area = copies_of(ranks, done)
        wanted = [copy.clone() for copy in memory]
        data = random_words(SIZE, 1000 + done)
        store_kernel[(1,)](NOWHERE + 16 * quad, data, count, SIZE)
        for copy, words in zip(memory, wanted, strict=True):
            words[4 * quad : 4 * quad + count] = data[:count]
            assert torch.equal(copy, words), (ranks, count, quad)
        assert (area.stored_quads, area.summed_quads) == (count // 4, 0)
        done += 1
    return done


def sums(name: str) -> None:
    """Sum arbitrary bits in rank order in float32, rounded once.

    Quads that are not loaded are zero, and memory is unchanged.
    """
    dtype = getattr(torch, name)
    for ranks, count, quad in itertools.product((1, 2, 3, 8), (0, 4, 36, SIZE), (0, 7)):
        memory, area = copies_of(ranks, ranks * 100 + count)
        before = [copy.clone() for copy in memory]
        out = torch.full([SIZE], 7, dtype=torch.int32)
        sum_kernel[(1,)](NOWHERE + 16 * quad, out, count, DTYPES[name], SIZE)
        parts = [copy[4 * quad : 4 * quad + count].view(dtype) for copy in memory]
        expect(out[:count].view(dtype), reference.ordered_sum(parts), (ranks, count, quad))
        assert not out[count:].any()
        assert all(torch.equal(copy, words) for copy, words in zip(memory, before, strict=True))
        assert (area.stored_quads, area.summed_quads) == (0, count // 4)


def outside(first_byte: int, count: int) -> str:
    """Return the errors of a store to ``first_byte`` past the start of the emulated memory, and of a load there."""
    _, area = copies_of(2, 5)
    said = []
    for run in (
        lambda: store_kernel[(1,)](area.start + first_byte, random_words(SIZE, 1), count, SIZE),
        lambda: sum_kernel[(1,)](area.start + first_byte, random_words(SIZE, 1), count, DTYPES["float32"], SIZE),
    ):
        try:
            run()
            said.append("")
        except Exception as error:
            said.append(repr(error))
    assert bool(said[0]) == bool(said[1])
    return said[0]
