"""Products that are summed over the ranks, on GPUs. Run with ``pytest -m gpu``."""

from __future__ import annotations

import itertools

import pytest
import torch
from summed_targets import CALLS, Case, bits, chosen, exact, failing, graphs, stopped

import shotcast
from shotcast.collectives.rank_device import enough_gpus
from shotcast.kernels.triton import gemm
from shotcast.kernels.triton.gemm import GemmConfig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
WORLD_SIZES = [n for n in (2, 4, 8) if enough_gpus(n)]
BF16, FP16 = torch.bfloat16, torch.float16
CONFIGS = (None, GemmConfig(64, 64, 32, 3, 4), gemm.FAST_ON_FEW[1])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bits_are_those_of_the_product_and_then_the_collective(world_size: int) -> None:
    """Ends within tiles, every layout and alignment, and other tiles."""
    shapes = [(1024, 768, 512), (256 * world_size, 264, 1000), (8 * world_size, 24, 8), (1000, 1032, 72)]
    cases = [
        Case(op, m, n, k, dtype, a_by_columns, b_by_columns, shift, config)
        for (op, (m, n, k)), (dtype, a_by_columns, b_by_columns, shift, config) in zip(
            itertools.product(CALLS, shapes * 2),
            itertools.cycle(zip((BF16, FP16), (False, True), (True, False), (0, 1), CONFIGS[:2], strict=True)),
            strict=False,
        )
        if op == "matmul_all_reduce" or m % world_size == 0
    ]
    cases += [Case(op, 1024, 1027, 264, config=config) for op in CALLS for config in CONFIGS]
    done = shotcast.spawn(bits, world_size, cases, 4, "cuda", timeout_s=380)
    assert done == [4 * len(cases)] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_large_products_and_pieces(world_size: int) -> None:
    """Products of 64 MiB, in a workspace of the size that they need and in one that takes pieces of them."""
    cases = [Case(op, 8192, 4096, 256, config=None) for op in CALLS]
    for max_bytes in (64 << 20, 16 << 20):
        assert shotcast.spawn(bits, world_size, cases, 3, "cuda", max_bytes, timeout_s=300) == [6] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_as_exact_as_float32_sums_and_roundings(world_size: int) -> None:
    for op in CALLS:
        case = Case(op, 1024, 512, 2048, config=None)
        assert max(shotcast.spawn(exact, world_size, case, "cuda", timeout_s=200)) <= 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_graphs_replay_on_changed_inputs(world_size: int) -> None:
    assert shotcast.spawn(graphs, world_size, 6, timeout_s=300) == [6] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_is_chosen(world_size: int) -> None:
    for found in shotcast.spawn(chosen, world_size, "cuda", timeout_s=300):
        for op in CALLS:
            assert set(found[op].median_us) == {"sequential", "fused"} == set(found[op].predicted_us)
        assert "the vendor's library multiplies" in found["small"].why
        assert found["close"]


@pytest.mark.parametrize("kind", ["rows", "columns", "tiles", "operation", "plain"])
@pytest.mark.parametrize("world_size", WORLD_SIZES[:1])
def test_ranks_that_make_other_calls_differ(world_size: int, kind: str) -> None:
    for found in shotcast.spawn(failing, world_size, "cuda", kind, timeout_s=200):
        assert isinstance(found["error"], shotcast.CollectiveMismatch), found
        assert "matmul_all_reduce(bfloat16, " in str(found["error"])
        assert found["again"] is shotcast.CollectiveMismatch


@pytest.mark.parametrize("world_size", WORLD_SIZES[:1])
def test_a_rank_that_does_not_come_is_named(world_size: int) -> None:
    found = shotcast.spawn(failing, world_size, "cuda", "late", timeout_s=200)[0]
    assert isinstance(found["error"], shotcast.CollectiveTimeout)
    assert (found["error"].missing, found["error"].op) == ((1,), "matmul_all_reduce")
    assert found["nan"]
    assert found["took"] < 5


@pytest.mark.parametrize("world_size", WORLD_SIZES[:1])
def test_a_rank_that_ended_is_named(world_size: int) -> None:
    victim = world_size - 1
    outcomes = shotcast.spawn(stopped, world_size, victim, timeout_s=200, return_exceptions=True)
    for found in outcomes[:victim]:
        assert (found["error"].missing, found["error"].reason) == ((victim,), "dead")
        assert found["nan"]
        assert found["took"] < 5
