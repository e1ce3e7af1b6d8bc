"""The matrix product between calls."""

from __future__ import annotations

import torch
from call_modes import gemm


def small_gemm(**change: int) -> gemm.MeasuredGemm:
    sizes = {"tokens": 3, "inner": 8, "hidden": 16, **change}
    return gemm.MeasuredGemm(**sizes, dtype=torch.float32, device=torch.device("cpu"))


def test_fills_the_tensor_that_the_call_reads() -> None:
    gemm_call, out = small_gemm(), torch.full([3 * 16], float("nan"))
    gemm_call(out)
    assert not out.isnan().any()
    expected = gemm_call._a.double() @ next(gemm.itertools.islice(gemm_call._weights, 15, None)).double()
    assert torch.allclose(out.view(3, 16).double(), expected, atol=1e-5)


def test_weights_take_turns() -> None:
    gemm_call = small_gemm()
    results = []
    for _ in range(17):
        out = torch.empty(3, 16)
        gemm_call(out)
        results.append(out)
    assert torch.equal(results[0], results[16])
    assert not any(torch.equal(results[0], other) for other in results[1:16])


def test_weights_are_more_than_a_cache_holds_and_no_more(monkeypatch) -> None:
    monkeypatch.setattr(gemm, "_WEIGHT_BYTES", 5 * 8 * 16 * 4 - 1)
    gemm_call = small_gemm()
    first = torch.empty(3, 16)
    gemm_call(first)
    again = [torch.empty(3, 16) for _ in range(5)]
    for out in again:
        gemm_call(out)
    assert [torch.equal(first, out) for out in again] == [False] * 4 + [True]


def test_name_says_the_sizes_that_do_not_change() -> None:
    assert small_gemm(tokens=1).name == small_gemm(tokens=9).name == "gemm 8x16"
