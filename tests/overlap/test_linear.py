"""The linear layers for training: values and gradients of the whole layers, the same bits in every way."""

from __future__ import annotations

from typing import Any

import overlap_targets as targets
import pytest
import torch

from shotcast.errors import ConfigError
from shotcast.launcher.spawn import spawn
from shotcast.overlap.lanes import ThreadLanes
from shotcast.overlap.linear import ColumnParallelLinear, RowParallelLinear

WAYS = [
    ("sequential", "sequential"),
    ("plain", "sequential"),
    ("plain", "2 chunks"),
    ("plain", "8 chunks"),
    ("auto", "auto"),
]


@pytest.mark.full
def test_values_and_gradients() -> None:
    check_block("cpu", 2e-5)


def check_block(device: str, tolerance: float) -> None:
    """Compare a block of two layers, on two ranks, with whole layers in float64."""
    results = spawn(targets.block, 2, WAYS, device, timeout_s=300)
    torch.manual_seed(0)
    up, down = torch.nn.Linear(24, 64), torch.nn.Linear(64, 24)
    x, dy = torch.randn(4, 40, 24), torch.randn(4, 40, 24)
    up, down, x, dy = up.double(), down.double(), x.double().requires_grad_(), dy.double()
    y = down(torch.nn.functional.gelu(up(x)))
    y.backward(dy)
    whole = {"y": y.detach(), "dx": x.grad, "down bias": down.bias.grad}
    for number in range(len(WAYS)):
        for name, expected in whole.items():
            assert expected is not None
            for result in results:
                torch.testing.assert_close(result[number][name].double(), expected, rtol=tolerance, atol=tolerance)
        assert up.weight.grad is not None
        assert up.bias.grad is not None
        assert down.weight.grad is not None
        parts = {"up": (up.weight.grad, 0), "up bias": (up.bias.grad, 0), "down": (down.weight.grad, 1)}
        for name, (expected, dim) in parts.items():
            joined = torch.cat([result[number][name] for result in results], dim)
            torch.testing.assert_close(joined.double(), expected, rtol=tolerance, atol=tolerance)
    for result in results:  # the gradient of the input is summed as a whole, overlapped or not
        for name, value in result[0].items():
            assert torch.equal(value, result[1][name]), name


WAYS_BY_ROWS = ["sequential", "plain", "auto"]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_sequence_parallelism(ranks: int) -> None:
    check_block_by_rows(spawn(targets.block_by_rows, ranks, WAYS_BY_ROWS, timeout_s=300), 1e-6)


def check_block_by_rows(results: list[Any], tolerance: float, dtype: torch.dtype = torch.float32) -> None:
    """Compare a block with sequence parallelism with whole layers in float64, and the bits of its ways."""
    up, down, x, dy = targets.inputs_of_block(dtype)
    up, down, x, dy = up.double(), down.double(), x.double().requires_grad_(), dy.double()
    y = down(torch.nn.functional.gelu(up(x)))
    y.backward(dy)
    whole = {"y": y.detach(), "dx": x.grad, "up": up.weight.grad, "up bias": up.bias.grad, "down": down.weight.grad}
    for number in range(len(results[0])):
        for name, expected in whole.items():
            joined = torch.cat([result[number][name] for result in results], 1 if name == "down" else 0)
            assert expected is not None
            assert relative_error(joined, expected) <= tolerance, name
        for result in results:
            assert down.bias.grad is not None
            assert relative_error(result[number]["down bias"], down.bias.grad) <= tolerance
    for result in results:
        for other in result[1:]:
            for name, value in result[0].items():
                assert torch.equal(value, other[name]), name


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("sms", [5, 0])
def test_collectives_keep_to_the_number_of_sms(sms: int) -> None:
    for seen in spawn(targets.numbers_of_sms, 2, sms, timeout_s=300):
        assert {name for name, _ in seen} == {"all_reduce", "all_gather", "reduce_scatter"}
        assert {given for _, given in seen} == {sms}


def test_uncommon_uses() -> None:
    results = spawn(targets.uncommon_uses_of_layers, 2, timeout_s=300)
    torch.manual_seed(0)
    up, down = torch.nn.Linear(24, 64), torch.nn.Linear(64, 24)
    x = torch.randn(10, 24).requires_grad_()
    y = down(up(x))
    y.sum().backward()
    dx = x.grad
    assert dx is not None
    for seen in results:
        dtype, value, grad, weights = seen["autocast"]
        assert (dtype, weights) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(value, y.detach(), rtol=0.05, atol=0.05)
        torch.testing.assert_close(grad, dx, rtol=0.05, atol=0.05)
        assert "modified by an inplace operation" in seen["changed"]
        given, bias = seen["given"]
        torch.testing.assert_close(given, bias.expand_as(given))
        assert seen["copy"]
        assert "save its state_dict()" in seen["pickled"]
        assert seen["empty"] == ((0, 24), (24,))
        trained, trained_bias, grad = seen["frozen"]
        assert not trained
        assert not trained_bias
        torch.testing.assert_close(grad, up.weight.detach().sum(0).expand_as(x), rtol=1e-5, atol=1e-5)


class Rank:
    """A stand-in for a communicator of three ranks."""

    device, rank, world_size = torch.device("cpu"), 1, 3


def test_sizes_have_to_be_divisible() -> None:
    lanes = ThreadLanes([Rank()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="7 outputs are not divisible among 3 ranks"):
        ColumnParallelLinear(lanes, torch.nn.Linear(6, 7))
    with pytest.raises(ConfigError, match="7 inputs are not divisible among 3 ranks"):
        RowParallelLinear(lanes, torch.nn.Linear(7, 6))
    lanes.close()


def test_a_way_that_does_not_exist_is_refused() -> None:
    lanes = ThreadLanes([Rank()])  # type: ignore[list-item]
    for layer in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(ConfigError, match="way is 'fused'; it takes auto, sequential, plain, 2 chunks, 4 chunks"):
            layer(lanes, torch.nn.Linear(6, 6), "fused")
    lanes.close()
