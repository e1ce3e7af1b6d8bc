"""The plain-torch reference itself, against float64: each rounding is allowed its half unit, and no more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import FLOATS, inputs

from shotcast.collectives import reference

dtypes = st.sampled_from(list(FLOATS.values()))


def drawn(dtype: torch.dtype, world_size: int, count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator).to(dtype) for _ in range(world_size)]


def bound(xs: list[torch.Tensor], dtype: torch.dtype, hops: int) -> torch.Tensor:
    """Error of a sum: N - 1 additions rounded to float32, and ``hops`` roundings to the dtype, of at most sum |x|.

    Each rounds a value of at most (1 + small) sum |x| by half a unit in the last place, eps / 2 of it.
    """
    total = torch.stack(xs).double().abs().sum(0)
    unit32, unit = torch.finfo(torch.float32).eps / 2, torch.finfo(dtype).eps / 2
    relative = (1 + unit32) ** len(xs) * (1 + unit) ** hops - 1
    return relative * total + hops * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


@settings(max_examples=60, deadline=None)
@given(dtypes, st.integers(1, 8), st.integers(0, 70), st.integers(0, 1 << 20))
def test_within_the_roundings_that_are_stated(dtype: torch.dtype, world_size: int, count: int, seed: int) -> None:
    xs = drawn(dtype, world_size, count, seed)
    exact = torch.stack(xs).double().sum(0)
    for algorithm, hops in (("one_shot", 1), ("two_shot", 1), ("ring", world_size - 1 or 1)):
        got = reference.all_reduce(xs, algorithm)
        assert got.dtype is dtype
        assert bool(((got.double() - exact).abs() <= bound(xs, dtype, hops)).all()), algorithm


def test_the_bound_is_tight_enough_to_see_a_rounding_too_many() -> None:
    """A sum kept in bfloat16 all along is outside."""
    xs = drawn(torch.bfloat16, 8, 1000, 1)
    careless = xs[0].clone()
    for x in xs[1:]:
        careless += x
    exact = torch.stack(xs).double().sum(0)
    assert bool(((careless.double() - exact).abs() > bound(xs, torch.bfloat16, 1)).any())


def test_order_and_start_are_part_of_the_contract() -> None:
    big, one = torch.tensor([2.0**25]), torch.tensor([1.0])
    assert reference.ordered_sum([one, big, -big]).item() == 0.0
    assert reference.ordered_sum([big, -big, one]).item() == 1.0
    minus_zero = torch.tensor([-0.0])
    assert not torch.signbit(reference.ordered_sum([minus_zero, minus_zero])).item(), "sums start at +0.0"
    # bfloat16: 256 + 1 is rounded at each hop of the ring, and once in all otherwise
    xs = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 1.0, 256.0)]
    assert reference.ordered_sum(xs).item() == 258.0
    assert reference.ring_sum(xs, owner=1).item() == 256.0, "256 + 1 twice, from rank 2 on"
    assert reference.ring_sum(xs, owner=2).item() == 258.0, "1 + 1, then 256"


@pytest.mark.parametrize("dtype", FLOATS.values())
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_scatter_is_a_part_of_the_reduce(dtype: torch.dtype, world_size: int) -> None:
    xs = [x.view(world_size, 8) for x in inputs(8 * world_size, dtype, world_size, 2, "cpu")]
    for algorithm in ("one_shot", "ring"):
        # slices of 8 elements are whole multiples of 16 bytes, so a ring's slices are the scatter's parts
        whole = reference.all_reduce(xs, algorithm)
        parts = [reference.reduce_scatter(xs, rank, algorithm) for rank in range(world_size)]
        assert torch.equal(torch.cat(parts).nan_to_num(7.0), whole.nan_to_num(7.0))


def test_infinities_and_nan() -> None:
    inf, nan = float("inf"), float("nan")
    xs = [torch.tensor([inf, inf, nan, 3e38]), torch.tensor([1.0, -inf, 1.0, 3e38])]
    for algorithm in ("one_shot", "ring"):
        got = reference.all_reduce(xs, algorithm)
        assert got[0] == inf
        assert got[1:3].isnan().all()
        assert got[3] == inf
