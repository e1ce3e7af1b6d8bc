"""Derivatives of the collectives: each is the transpose of the linear map that the call is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shotcast.collectives.communicator import Communicator

# mypy sees torch.autograd.Function as untyped


class AllReduce(torch.autograd.Function):
    """y_i = sum_r x_r, so dx_i = sum_r dy_r."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator, algorithm: str) -> torch.Tensor:
        ctx.comm, ctx.algorithm = comm, algorithm
        return comm.all_reduce(x.detach(), algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.comm.all_reduce(grads[0].contiguous(), algorithm=ctx.algorithm), None, None


class ReduceScatter(torch.autograd.Function):
    """y_i = sum_r x_r[i], so dx_i = (dy_0, ..., dy_{N-1})."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator, algorithm: str) -> torch.Tensor:
        ctx.comm, ctx.algorithm = comm, algorithm
        return comm.reduce_scatter(x.detach(), algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.comm.all_gather(grads[0].contiguous(), algorithm=ctx.algorithm), None, None


class AllGather(torch.autograd.Function):
    """y = (x_0, ..., x_{N-1}) on all ranks, so dx_i = sum_r dy_r[i]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, sizes: tuple[int, ...] | None, algorithm: str
    ) -> torch.Tensor:
        ctx.comm, ctx.algorithm, ctx.sizes = comm, algorithm, sizes
        return comm.all_gather(x.detach(), sizes=sizes, algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0].contiguous()
        if ctx.sizes is None:
            # what gathers a dtype need not add it up
            legal = ctx.comm.candidates(grad, "reduce_scatter")
            algorithm = ctx.algorithm if ctx.algorithm in legal else "auto"
            return ctx.comm.reduce_scatter(grad, algorithm=algorithm), None, None, None
        # uneven parts have no reduce_scatter: sum all, keep mine
        start = sum(ctx.sizes[: ctx.comm.rank])
        return ctx.comm.all_reduce(grad)[start : start + ctx.sizes[ctx.comm.rank]].clone(), None, None, None
