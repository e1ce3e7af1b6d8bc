"""The references of the harness: inputs, expected results and error bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shotcast.bench.cases import Case, RankContext


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
    expected, bound = Case(context(dtype), "all_reduce", nbytes, seed=3).reference()["sum"]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        total = torch.zeros_like(xs[0])
        for rank in order:
            total = total + xs[rank]  # rounded at each step
        assert ((total.double() - expected).abs() <= bound).all()
    without_one = (total - xs[2]).double()
    assert ((without_one - expected).abs() > bound).float().mean() > 0.9


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
    expected, bound = reference["two_shot_fp8"]
    sent = through_e4m3(torch.stack([through_e4m3(x) for x in xs]).sum(0)).to(torch.bfloat16).double()
    assert ((sent - expected).abs() <= bound).all()
    assert ((sent - expected).abs() > reference["sum"][1]).any(), "the sum's own bound would do"
    assert ((sent - xs[2].double() - expected).abs() > bound).float().mean() > 0.5


def test_work_is_undone() -> None:
    made = Case(context(), "all_reduce", 64, seed=3)
    kept = made.x.clone()
    made.x.fill_(7.0)
    made.restore()
    assert torch.equal(made.x, kept)
