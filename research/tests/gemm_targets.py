"""Ranks of test_large_gemm.py: products by the interpreted kernel, compared with float64."""

from __future__ import annotations

from dataclasses import dataclass

import large_gemm as gemm
import torch
from large_gemm import Gemm, GemmConfig


@dataclass(frozen=True)
class GemmCase:
    """A product: its sizes, the layout of its operands, elements before each row, and how it is launched."""

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    a_by_columns: bool = False
    b_by_columns: bool = True
    margin: int = 0
    config: GemmConfig | None = None
    sms: int = 3


def matrix(rows: int, columns: int, by_columns: bool, margin: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Make a matrix whose rows (or columns) are ``margin`` elements apart, in a random order of magnitude."""
    if by_columns:
        return matrix(columns, rows, False, margin, dtype, device).t()
    generator = torch.Generator(device).manual_seed(rows * 1009 + columns)
    values = torch.randn(rows, columns + margin, generator=generator, device=device) + 0.25
    return values.to(dtype)[:, margin:]


def excess(case: GemmCase, device: str) -> float:
    """Return the largest error relative to that of sums rounded to float32 at each step, then once.

    Elements beside the output must stay as they were; those of the output are NaN before.
    """
    a = matrix(case.m, case.k, case.a_by_columns, case.margin, case.dtype, device)
    b = matrix(case.k, case.n, case.b_by_columns, case.margin, case.dtype, device)
    whole = torch.full((case.m + 2, case.n + 8 + case.margin), float("nan"), dtype=case.dtype, device=device)
    whole[0], whole[-1], whole[:, : case.margin], whole[:, case.margin + case.n :] = 7.0, 7.0, 7.0, 7.0
    out = whole[1:-1, case.margin : case.margin + case.n]
    form = gemm.form_of(a, b, out)
    Gemm(form, case.config or gemm.choose_config(form), case.sms)(a, b, out)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    bound = size * (case.k * 2**-24) + exact.abs() * torch.finfo(case.dtype).eps / 2 + 1e-7
    result = float(((out.double() - exact).abs() / bound).nan_to_num(nan=torch.inf).max()) if out.numel() else 0.0
    out.fill_(7.0)
    assert bool((whole == 7.0).all()), "an element beside the output was written"
    return result


def excesses(cases: list[GemmCase]) -> list[float]:
    return [excess(case, "cpu") for case in cases]


def forms(cases: list[GemmCase]) -> list[tuple[bool, int]]:
    """Return for each case whether it uses the copy engine, and its unit."""
    found = []
    for case in cases:
        a = matrix(case.m, case.k, case.a_by_columns, case.margin, case.dtype, "cpu")
        b = matrix(case.k, case.n, case.b_by_columns, case.margin, case.dtype, "cpu")
        form = gemm.form_of(a, b, a.new_empty(case.m, case.n))
        found.append((form.uses_tma, form.unit))
    return found
