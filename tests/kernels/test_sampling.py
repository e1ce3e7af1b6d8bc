"""Sampling kernels: under Triton's interpreter against PyTorch on the CPU, and compiled for GPUs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import sampling_targets as targets

import cross
from quick_interpreter import interpret
from shotcast.kernels.triton import sampling
from shotcast.kernels.triton.sampling import SamplingShape


@pytest.mark.full
@pytest.mark.parametrize(
    ("vocabs", "examples"),
    [
        ((1, 2, 31, 257), 16),
        ((1000, 5000), 4),
        pytest.param((1, 2, 31, 257), 100, marks=pytest.mark.full),
        pytest.param((1000, 5000), 20, marks=pytest.mark.full),
    ],
)
def test_the_tokens_that_pytorch_draws(vocabs: tuple[int, ...], examples: int) -> None:
    """Cover all parameters; tokens may differ only where scores or thresholds are as close as float32 rounding."""
    ((total, excused),) = interpret(targets.compared, 1, vocabs, examples)
    assert total >= 2 * examples
    assert excused <= total // 100 + 1, f"{excused} of {total} differ by rounding"


@pytest.mark.full
def test_top_p_is_of_what_top_k_leaves() -> None:
    assert interpret(targets.both_cuts, 1) == [(32, 0)]


@pytest.mark.full
def test_neither_company_nor_division_changes_a_draw() -> None:
    (found,) = interpret(targets.alone_and_together, 1, 700)
    assert all(tokens == found[0][0] for both in found for tokens in both)


def test_rows_that_are_no_numbers_give_some_token_and_leave_others_alone() -> None:
    (found,) = interpret(targets.broken, 1, 300)
    assert found[:3] == found[3:]


def test_warming_up_changes_no_draw() -> None:
    assert interpret(targets.warmed, 1, 100) == [True]


@pytest.mark.full
def test_weights_far_off_count() -> None:
    (found,) = interpret(targets.tail, 1, 40)
    assert set(found) == {0, 1}


def test_noise_at_its_ends() -> None:
    bits = [0, 1, 0x40, 0x7FFFFFFF, 0x7FFFFF80, 0xFFFFFFFF, 0x80000000, 0x12345678]
    ((found, wanted, _),) = interpret(targets.scores, 1, bits)
    assert found == pytest.approx(wanted, rel=1e-6)


def test_no_score_is_above_its_bound_and_few_tokens_are_looked_at_closer() -> None:
    drawn = random.Random(0)
    bits = [drawn.getrandbits(31) >> drawn.randrange(31) for _ in range(4060)]
    bits += [edge for power in range(1, 19) for edge in (2**power - 1, 2**power)]
    ((scores, _, bounds),) = interpret(targets.scores, 1, bits)
    assert all(bound >= score for score, bound in zip(scores, bounds, strict=True))
    small = [bound - score for score, bound, number in zip(scores, bounds, bits, strict=True) if 64 < number < 2**26]
    assert max(small) < 0.1


def test_zeros_of_either_sign_are_equal() -> None:
    assert interpret(targets.zeros, 1) == [[3, 3]]


# -- compiled ---------------------------------------------------------------------------------------------------------

KINDS = {
    **dict.fromkeys(("logits", "reals"), "*fp32"),
    **dict.fromkeys(("counts", "masks", "integers"), "*i32"),
    **dict.fromkeys(("best", "state", "bins", "lists", "out", "last_tokens"), "*i64"),
    "top_p": "*fp64",
}


def compiled(kernel: Any, vocab: int, warps: int, capability: int = 90) -> Any:
    shape = SamplingShape(vocab, (vocab - 1).bit_length(), sampling.CAPACITY, sampling.TILE, sampling.BLOCK)
    options = {"enable_fp_fusion": True} | sampling.OPTIONS  # Triton's defaults, and the options that a launch changes
    return cross.build_of_kinds(kernel, KINDS, shape, warps, capability, options, KINDS)


@pytest.mark.parametrize(
    ("kernel", "warps", "registers"),
    [
        (sampling.penalised_max_kernel, sampling.WARPS, 64),
        (sampling.histogram_kernel, sampling.WARPS, 128),
        (sampling.candidates_kernel, sampling.WARPS, 168),
        (sampling.finish_kernel, sampling.FINISH_WARPS, 128),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("vocab", [128_256, 50_257])
def test_in_registers(kernel: Any, warps: int, registers: int, vocab: int, tmp_path: Path) -> None:
    made = compiled(kernel, vocab, warps)
    used = cross.resources(made, tmp_path)
    assert used["LOCAL"] == used["STACK"] == 0
    assert used["REG"] <= registers
    found = cross.instructions(made.asm["ptx"])
    if kernel is not sampling.finish_kernel:
        assert ("ld.global.v4.b32" in found) == (vocab % 4 == 0)
    # Rounding is the CPU's: quotients exactly, and no product fused with a sum.
    assert not [name for name in found if name.startswith("div.full")]
    if kernel is sampling.penalised_max_kernel:
        assert not [name for name in found if name.startswith("fma")]


@pytest.mark.parametrize("capability", [100, pytest.param(80, marks=pytest.mark.full)])
def test_kernels_compile(capability: int) -> None:
    for kernel in (sampling.penalised_max_kernel, sampling.histogram_kernel, sampling.candidates_kernel):
        compiled(kernel, 32_000, sampling.WARPS, capability)
    compiled(sampling.finish_kernel, 32_000, sampling.FINISH_WARPS, capability)
