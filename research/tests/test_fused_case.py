"""All-reduce, residual and norm: measurements on CPU ranks, and the references of the harness."""

from __future__ import annotations

import dataclasses
from typing import Any

import call_modes_targets as targets
import pytest
import torch
from call_modes import harness
from call_modes.fused_case import E4M3_MAX, EPS, FusedCase
from call_modes.mode_config import ModeConfig
from call_modes.names import FUSED_OPS

import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.bench.cases import RankContext, Reference

HIDDEN = 32
CONFIG = ModeConfig(
    op="all_reduce_rms_norm",
    device="cpu",
    dtype="float32",
    sizes=(4 * HIDDEN, 12 * HIDDEN),
    iters=12,
    warmup_iters=2,
    budget_s=0.05,
    timeout_s=90,
    hidden=HIDDEN,
)
ALWAYS = {"auto", "unfused", "plain", "plain_one_shot", "plain_two_shot", "fp8_static", "fp8_dynamic", "gloo"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_implementation_is_right(dtype: str) -> None:
    rows = harness.run(dataclasses.replace(CONFIG, dtype=dtype), 2)
    assert ALWAYS <= {row.algorithm for row in rows} <= set(CONFIG.implementations())
    assert [row for row in rows if row.errors != 0 or row.time_us is None] == []
    assert {row.hidden for row in rows} == {HIDDEN}
    assert {row.tokens for row in rows} == ({1, 3} if dtype == "float32" else {2, 6})


@pytest.mark.full
def test_work_between() -> None:
    names = ("auto", "unfused", "gloo")
    rows = harness.run(dataclasses.replace(CONFIG, between="gemm", inner=4, algorithms=names, sizes=(128,)), 2)
    assert [(row.measure, row.algorithm, row.errors) for row in rows] == [
        (measure, name, 0) for measure in ("call", "between") for name in names
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auto", "normed"), ("auto", "new_residual"), ("unfused", "normed"), ("gloo", "new_residual"),
        ("plain", "sum"), ("fp8_static", "fp8_static"), ("fp8_dynamic", "fp8_dynamic"), ("fp8_dynamic", "new_residual"),
    ],
)  # fmt: skip
def test_a_wrong_element_of_any_result_is_found(name: str, value: str) -> None:
    config = dataclasses.replace(CONFIG, sizes=(4 * HIDDEN,))
    rows = shotcast.spawn(targets.wrong_in_one_value, 2, config, name, value, timeout_s=300)[0]
    assert [(row.errors, row.time_us) for row in rows] == [(1, None)]


# --- what is right ----------------------------------------------------------------------------------------------------


def build(dtype: torch.dtype, rank: int = 0, op: str = "all_reduce_rms_norm") -> FusedCase:
    group: Any = None
    context = RankContext(torch.device("cpu"), dtype, rank, 4, group)
    return FusedCase(context, op, 64 * 256 * dtype.itemsize, 256, seed=5)


def within_bound(value: torch.Tensor, name: str, reference: Reference) -> torch.Tensor:
    expected, bound = reference[name]
    return (value.double() - expected).abs() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", FUSED_OPS)
def test_the_plain_computation_is_right(op: str, dtype: torch.dtype) -> None:
    cases = [build(dtype, rank, op) for rank in range(4)]
    case, reference = cases[0], cases[0].reference()
    total = case.x
    for other in cases[1:]:
        total = total + other.x  # rounded at each step
    new_residual = total + case._residual
    if case._bias is None:
        normed = torch.nn.functional.rms_norm(new_residual.float(), (256,), case._weight.float(), EPS).to(dtype)
    else:
        operands = new_residual.float(), (256,), case._weight.float(), case._bias.float(), EPS
        normed = torch.nn.functional.layer_norm(*operands).to(dtype)
    assert within_bound(total, "sum", reference).all()
    assert within_bound(new_residual, "new_residual", reference).all()
    assert within_bound(normed - case.norm(new_residual), "normed", reference).all()
    dynamic = normed.float().abs().amax(-1, keepdim=True) / E4M3_MAX
    for name, scale in (("fp8_static", case.static_scale), ("fp8_dynamic", dynamic)):
        back = (normed.float() / scale).to(torch.float8_e4m3fn).float() * scale
        assert within_bound(back - case.norm(new_residual), name, reference).all(), name
        assert not within_bound(back - case.norm(new_residual), "normed", reference).all(), (
            "the bound of the norm itself would do"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_off_is_not_right(dtype: torch.dtype) -> None:
    case = build(dtype)
    reference = case.reference()
    new_residual, _ = reference["new_residual"]
    normed = case.norm(new_residual)
    assert within_bound(new_residual - case._residual.double(), "new_residual", reference).float().mean() < 0.1
    without_mean = new_residual / new_residual.square().sum(-1, keepdim=True).sqrt() * case._weight.double()
    for wrong in (without_mean, normed / case._weight.double(), normed * 1.05, case.norm(new_residual + 0.05)):
        assert within_bound(wrong - normed, "normed", reference).float().mean() < 0.2
    for name in ("fp8_static", "fp8_dynamic"):
        assert within_bound(normed * 0.1, name, reference).float().mean() < 0.3
        assert within_bound(normed * 0.03, name, reference).all()


def test_the_norm_is_that_of_rms_norm() -> None:
    case = build(torch.float32)
    expected = torch.nn.functional.rms_norm(case.x.double(), (256,), case._weight.double(), EPS)
    assert torch.allclose(case.norm(case.x), expected)


def test_all_ranks_share_residual_weight_and_scale() -> None:
    first, second = build(torch.float32, 0), build(torch.float32, 3)
    assert torch.equal(first._residual, second._residual)
    assert torch.equal(first._weight, second._weight)
    assert torch.equal(first.static_scale, second.static_scale)
    assert not torch.equal(first.x, second.x)


def test_nothing_is_clamped_by_the_static_scale() -> None:
    case = build(torch.float32)
    largest = case.norm(case.reference()["new_residual"][0]).abs().max() / case.static_scale.double()
    assert 0.95 * E4M3_MAX < largest <= E4M3_MAX


@pytest.mark.full
def test_fused_kernels_are_right() -> None:
    """The Triton kernels are right in the interpreter."""
    names = ("one_shot", "two_shot", "auto", "fp8_static", "fp8_dynamic")
    config = dataclasses.replace(CONFIG, sizes=(8 * HIDDEN,), iters=5, budget_s=0.0, warmup_iters=1)
    rows = interpret(harness.measure, 2, config, names, timeout_s=300, env=GPU_COLLECTIVES)[0]
    assert [(row.algorithm, row.errors) for row in rows] == [(name, 0) for name in names]
    assert [row.time_us for row in rows if row.time_us is None] == []
