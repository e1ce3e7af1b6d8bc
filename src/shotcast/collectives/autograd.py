"""Derivatives of the collectives: each is the transpose of the linear map that the call is.

They belong to the operators (``ops.py``), so they hold in eager and in compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shotcast.errors import UnsupportedError

Gradients = tuple[torch.Tensor | None, ...]


def _a_sum(ctx: Any, op: str) -> None:
    if ctx.reduction != "sum":
        raise UnsupportedError(f"{op} has a derivative for the reduction sum, not for {ctx.reduction}")


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.comm, ctx.algorithm, ctx.reduction = inputs


def _all_reduce(ctx: Any, grad: torch.Tensor) -> Gradients:
    """y_i = sum_r x_r, so dx_i = sum_r dy_r."""
    _a_sum(ctx, "all_reduce")
    return torch.ops.shotcast.all_reduce(grad.contiguous(), ctx.comm, ctx.algorithm, "sum"), None, None, None


def _reduce_scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.comm, ctx.world_size, ctx.algorithm, ctx.reduction, _ = inputs


def _reduce_scatter(ctx: Any, grad: torch.Tensor) -> Gradients:
    """y_i = sum_r x_r[i], so dx_i = (dy_0, ..., dy_{N-1})."""
    _a_sum(ctx, "reduce_scatter")
    whole = torch.ops.shotcast.all_gather(grad.contiguous(), ctx.comm, ctx.world_size, ctx.algorithm)
    return whole, None, None, None, None, None


def _all_gather_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.comm, ctx.world_size, ctx.algorithm = inputs


def _all_gather(ctx: Any, grad: torch.Tensor) -> Gradients:
    """y = (x_0, ..., x_{N-1}) on all ranks, so dx_i = sum_r dy_r[i]."""
    # what gathers a dtype need not add it up, hence not strict
    part = torch.ops.shotcast.reduce_scatter(grad.contiguous(), ctx.comm, ctx.world_size, ctx.algorithm, "sum", False)
    return part, None, None, None


def _all_gather_uneven_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.comm, sizes, rank, _ = inputs
    ctx.start, ctx.rows = sum(sizes[:rank]), sizes[rank]


def _all_gather_uneven(ctx: Any, grad: torch.Tensor) -> Gradients:
    """As :func:`_all_gather`; uneven parts have no reduce_scatter: sum all, keep mine."""
    total = torch.ops.shotcast.all_reduce(grad.contiguous(), ctx.comm, "auto", "sum")
    return total[ctx.start : ctx.start + ctx.rows].clone(), None, None, None, None


FORMULAS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_reduce": (_all_reduce, _all_reduce_setup),
    "reduce_scatter": (_reduce_scatter, _reduce_scatter_setup),
    "all_gather": (_all_gather, _all_gather_setup),
    "all_gather_uneven": (_all_gather_uneven, _all_gather_uneven_setup),
}
"""By operator: its backward, and what keeps for it what it needs."""
