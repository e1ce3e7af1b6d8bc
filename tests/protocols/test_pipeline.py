"""A chunked pipeline: several epochs of sentinel buffers inside one kernel, without a kernel boundary between them.

A block of two warps pushes chunk k into generation k % 3, polls it, and clears generation (k + 2) % 3, that of the
previous chunk. Its clears must have landed before it pushes chunk k + 1. That takes a system-scope fence by every warp,
then a block barrier, because the word that one warp clears is pushed to by peers that have heard from the other warp.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from .explore import Kind
from .machine import Await, Barrier, Fence, KernelBoundary, Machine, Program, Start, Steps, Store
from .words import SENTINEL, Input

WARPS = 2


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol. Each of them can be removed."""

    fence: bool = True
    barrier: bool = True
    shifted: bool = True  # whether a warp clears words that the other one polls


def warp_program(rank: int, ranks: int, warp: int, kernels: int, chunks: int, rules: Rules) -> Steps:
    """An all-reduce by one shot: no rank is more than one chunk ahead.

    Each warp has one word of each sender in a chunk.
    """
    epoch = 0
    block = tuple(f"rank {rank} warp {w}" for w in range(WARPS))
    for kernel in range(kernels):
        yield Start(kernel)
        for chunk in range(chunks):
            generation, previous = epoch % 3, (epoch + 2) % 3
            for owner in range(ranks):
                yield Store((owner, "slots", generation, rank, warp), Input(rank, epoch, warp))
            yield Await(
                {(rank, "slots", generation, r, warp): Input(r, epoch, warp) for r in range(ranks)},
                lambda word: word != SENTINEL,
            )
            cleared = (warp + 1) % WARPS if rules.shifted else warp
            for r in range(ranks):
                yield Store((rank, "slots", previous, r, cleared), SENTINEL)
            if chunk < chunks - 1:
                if rules.fence:
                    yield Fence()
                if rules.barrier:
                    yield Barrier((kernel, chunk), block)
            epoch += 1
        yield KernelBoundary(kernel)


def model(ranks: int, rules: Rules | None = None, kernels: int = 1, chunks: int = 4, **options: bool) -> Machine:
    rules = rules or Rules()

    def program(rank: int, warp: int) -> Program:
        return Program(rank, f"warp {warp}", lambda: warp_program(rank, ranks, warp, kernels, chunks, rules))

    programs = [program(rank, warp) for rank in range(ranks) for warp in range(WARPS)]
    return Machine(programs, {"slots": SENTINEL}, **options)


@pytest.mark.parametrize("ranks", [2, 3])
def test_protocol_holds(ranks: int, verify) -> None:
    verify(model(ranks, kernels=2 if ranks == 2 else 1, chunks=4))


@pytest.mark.full
def test_without_the_fence_a_clear_comes_too_late(refute) -> None:
    refute(model(2, Rules(fence=False)), Kind.DEADLOCK, Kind.WRONG_VALUE)


def test_without_the_barrier_the_other_warp_may_not_have_cleared(refute) -> None:
    refute(model(2, Rules(barrier=False)), Kind.DEADLOCK, Kind.WRONG_VALUE)


def test_warps_that_keep_to_their_own_words_need_no_barrier(verify, refute) -> None:
    """Each warp is then a pipeline of its own, which still needs the fence."""
    verify(model(2, Rules(barrier=False, shifted=False)))
    refute(model(2, Rules(barrier=False, shifted=False, fence=False)), Kind.DEADLOCK, Kind.WRONG_VALUE)
