"""The references of the harness: inputs, expected results and error bounds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from shotcast.bench.cases import Case, RankContext
from shotcast.bench.operations import expected


def context(dtype: torch.dtype = torch.bfloat16, world_size: int = 4, rank: int = 1) -> RankContext:
    group: Any = None  # references communicate nothing
    return RankContext(torch.device("cpu"), dtype, rank, world_size, group)


def inputs(nbytes: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [Case(context(dtype, rank=rank), "all_reduce", nbytes, seed=3).x for rank in range(4)]


def test_inputs_differ_by_rank_and_by_size() -> None:
    xs = inputs(64)
    assert len({tuple(x.tolist()) for x in xs}) == 4
    assert not torch.equal(xs[0], Case(context(rank=0), "all_reduce", 64, seed=4).x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sum_in_any_order_is_right_and_a_wrong_one_is_not(dtype: torch.dtype) -> None:
    nbytes = 4096 * dtype.itemsize
    xs = inputs(nbytes, dtype)
    wanted, bound = Case(context(dtype), "all_reduce", nbytes, seed=3).reference()["sum"]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        total = torch.zeros_like(xs[0])
        for rank in order:
            total = total + xs[rank]  # rounded at each step
        assert ((total.double() - wanted).abs() <= bound).all()
    without_one = (total - xs[2]).double()
    assert ((without_one - wanted).abs() > bound).float().mean() > 0.9


def test_parts() -> None:
    xs = inputs(256)
    scattered, _ = Case(context(), "reduce_scatter", 256, seed=3).reference()["sum"]
    assert torch.allclose(scattered, sum(x.double() for x in xs)[32:64])  # type: ignore[index]
    gathered, bound = Case(context(), "all_gather", 256, seed=3).reference()["sum"]
    assert gathered.shape == (128,)
    assert torch.equal(gathered[32:64], Case(context(rank=1), "all_gather", 256, seed=3).x.double())
    assert not bound.any()


def through_e4m3(values: torch.Tensor) -> torch.Tensor:
    blocks = values.view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view(-1)


def test_fp8_transport_has_a_bound_of_its_own_which_it_keeps() -> None:
    xs = [x.float() for x in inputs(1 << 15)]
    reference = Case(context(), "all_reduce", 1 << 15, seed=3).reference()
    wanted, bound = reference["two_shot_fp8"]
    sent = through_e4m3(torch.stack([through_e4m3(x) for x in xs]).sum(0)).to(torch.bfloat16).double()
    assert ((sent - wanted).abs() <= bound).all()
    assert ((sent - wanted).abs() > reference["sum"][1]).any(), "the sum's own bound would do"
    assert ((sent - xs[2].double() - wanted).abs() > bound).float().mean() > 0.5


def small(op: str, dtype: torch.dtype, reduction: str = "sum", rank: int = 1, world_size: int = 3) -> Case:
    return Case(context(dtype, world_size, rank), op, 6 * dtype.itemsize, 3, reduction)


def of_each(op: str, dtype: torch.dtype) -> list[list[float]]:
    return [small(op, dtype, rank=rank).x.tolist() for rank in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_results_of_copies(dtype: torch.dtype) -> None:
    """Six elements on three ranks, of which this is the second; the root is the first."""
    a, b, c = of_each("all_to_all", dtype)
    assert small("all_to_all", dtype).reference()["sum"][0].tolist() == [*a[2:4], *b[2:4], *c[2:4]]
    assert small("broadcast", dtype).reference()["sum"][0].tolist() == a
    assert small("scatter", dtype).reference()["sum"][0].tolist() == a[2:4]
    a, b, c = of_each("gather", dtype)
    assert [len(one) for one in (a, b, c)] == [2] * 3
    assert small("gather", dtype, rank=0).reference()["sum"][0].tolist() == [*a, *b, *c]
    for op in ("gather", "reduce"):
        assert small(op, dtype).reference() == {}, "the root alone has a result"
    for op in ("all_to_all", "broadcast", "scatter", "all_gather"):
        assert not small(op, dtype).reference()["sum"][1].any(), "copies are exact"


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "reduce"])
@pytest.mark.parametrize(
    ("reduction", "combine"),
    [
        ("sum", sum), ("avg", lambda xs: sum(xs) / 3), ("prod", math.prod), ("max", max), ("min", min),
    ],
)  # fmt: skip
def test_results_of_reductions(op: str, reduction: str, combine: Any) -> None:
    rank = 0 if op == "reduce" else 1
    for dtype in (torch.float64, torch.int16):
        if reduction == "avg" and dtype is torch.int16:
            continue
        value, bound = small(op, dtype, reduction, rank).reference()["sum"]
        wanted = [combine(xs) for xs in zip(*of_each(op, dtype), strict=True)]
        assert value.tolist() == pytest.approx(wanted[2:4] if op == "reduce_scatter" else wanted, rel=1e-12)
        exact = dtype is torch.int16 or reduction in ("max", "min")
        assert bool(bound.any()) is not exact


def test_whole_numbers_wrap_around() -> None:
    value, _ = Case(context(torch.int8, 8, 0), "all_reduce", 512, 3, "prod").reference()["sum"]
    xs = torch.stack([Case(context(torch.int8, 8, rank), "all_reduce", 512, 3).x for rank in range(8)])
    assert (xs.long().prod(0).abs() > 127).any()
    assert torch.equal(value, xs.long().prod(0).to(torch.int8).double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_products_are_within_the_bound(dtype: torch.dtype) -> None:
    """Partial products are rounded in any order, also those that are subnormal and grow again."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.randint(-12 if dtype is torch.float16 else -63, 2, (4, 20_000), generator=generator)
    xs = (torch.randn(4, 20_000, generator=generator) * 2.0**scales).to(dtype)
    wanted, bound = expected("all_reduce", "prod", 0, 4, lambda rank: xs[rank])
    for order in itertools.permutations(range(4)):
        product = xs[order[0]]
        for rank in order[1:]:
            product = product * xs[rank]
        assert ((product.double() - wanted).abs() <= bound).all(), order
    pairs = (xs[0] * xs[1]) * (xs[2] * xs[3])
    assert ((pairs.double() - wanted).abs() <= bound).all()
    wrong = xs[0] * xs[1] * xs[2]
    assert ((wrong.double() - wanted).abs() > bound).float().mean() > 0.5
