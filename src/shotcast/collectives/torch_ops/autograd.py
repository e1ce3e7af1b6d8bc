"""Derivatives of the collectives: each is the transpose of the linear map that the call computes, or of its slope.

A call is differentiated if a tensor that it reads or writes requires grad. Then the call makes a new tensor, which is
copied to the one to be written, so PyTorch's own rules hold for that. The ranks' tensors require grad alike, as the
derivatives are collectives too.

Each derivative exists twice: for calls of a communicator, and for operators in a graph (``operators.py``), where a
communicator is a name. The latter could serve eager calls too, at three times the host cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shotcast.collectives.interface import Collectives
from shotcast.errors import UnsupportedError

Gradients = tuple[torch.Tensor | None, ...]

LINEAR = ("sum", "avg")
"""Reductions whose derivative needs nothing of what they reduced."""

# mypy sees torch.autograd.Function as untyped


def written(
    function: type[torch.autograd.Function], x: torch.Tensor, out: torch.Tensor, *arguments: Any
) -> torch.Tensor:
    """Copy the result of ``function`` to ``out``, which has been checked, and return that."""
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        x = x.clone()  # the derivative may need what the copy overwrites
    return out.copy_(function.apply(x, *arguments))


class AllReduce(torch.autograd.Function):
    """y_i = sum_r x_r, so dx_i = sum_r dy_r, and the average likewise. For others see :func:`all_reduce_gradient`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Collectives, algorithm: str, reduction: str, sms: int | None
    ) -> torch.Tensor:
        AllReduce.keep(ctx, (x, comm, algorithm, reduction, sms), x)
        return comm.all_reduce(x.detach(), algorithm=algorithm, reduction=reduction, sms=sms)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        grad = plain(grads[0])
        if ctx.reduction in LINEAR:
            total = ctx.comm.all_reduce(grad, algorithm=ctx.algorithm, reduction=ctx.reduction, sms=ctx.sms)
            return total, None, None, None, None
        (x,) = ctx.saved_tensors
        return all_reduce_gradient(ctx.comm, x, grad, ctx.reduction, ctx.sms), None, None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.comm, ctx.algorithm, ctx.reduction, ctx.sms = inputs
        if ctx.reduction not in LINEAR:
            ctx.save_for_backward(x)

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        if ctx.reduction in LINEAR:
            total = torch.ops.shotcast.all_reduce(plain(grad), ctx.comm, ctx.algorithm, ctx.reduction, ctx.sms)
            return total, None, None, None, None
        (x,) = ctx.saved_tensors
        slopes = torch.ops.shotcast.all_reduce_gradient(x, plain(grad), ctx.comm, ctx.reduction, ctx.sms)
        return slopes, None, None, None, None


class ReduceScatter(torch.autograd.Function):
    """y_i = sum_r x_r[i], so dx_i = (dy_0, ..., dy_{N-1}), by N of the average.

    For others see :func:`reduce_scatter_gradient`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Collectives, algorithm: str, reduction: str, sms: int | None
    ) -> torch.Tensor:
        ReduceScatter.keep(ctx, (x, comm, comm.world_size, algorithm, reduction, True, sms), x)
        return comm.reduce_scatter(x.detach(), algorithm=algorithm, reduction=reduction, sms=sms)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        grad = plain(grads[0])
        if ctx.reduction in LINEAR:
            whole = ctx.comm.all_gather(grad, algorithm=ctx.algorithm, sms=ctx.sms)
            return share(whole, ctx.reduction, ctx.world_size), None, None, None, None
        (x,) = ctx.saved_tensors
        return reduce_scatter_gradient(ctx.comm, x, grad, ctx.reduction, ctx.sms), None, None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.comm, ctx.world_size, ctx.algorithm, ctx.reduction, _, ctx.sms = inputs
        if ctx.reduction not in LINEAR:
            ctx.save_for_backward(x)

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        grad = plain(grad)
        if ctx.reduction in LINEAR:
            whole = torch.ops.shotcast.all_gather(grad, ctx.comm, ctx.world_size, ctx.algorithm, ctx.sms)
            whole = share(whole, ctx.reduction, ctx.world_size)
        else:
            (x,) = ctx.saved_tensors
            whole = torch.ops.shotcast.reduce_scatter_gradient(x, grad, ctx.comm, ctx.reduction, ctx.sms)
        return whole, None, None, None, None, None, None


class AllGather(torch.autograd.Function):
    """y = (x_0, ..., x_{N-1}) on all ranks, so dx_i = sum_r dy_r[i].

    Uneven parts have no reduce_scatter: all of dy is summed, and this rank's part is taken.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Collectives, sizes: tuple[int, ...] | None, algorithm: str, sms: int | None
    ) -> torch.Tensor:
        ctx.comm, ctx.algorithm, ctx.sizes, ctx.sms = comm, algorithm, sizes, sms
        return comm.all_gather(x.detach(), sizes=sizes, algorithm=algorithm, sms=sms)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        grad = plain(grads[0])
        if ctx.sizes is None:
            algorithm = where_legal(ctx.comm, grad, ctx.algorithm, ctx.sms)
            return ctx.comm.reduce_scatter(grad, algorithm=algorithm, sms=ctx.sms), None, None, None, None
        total = ctx.comm.all_reduce(grad, sms=ctx.sms)
        return _own_part(total, ctx.sizes, ctx.comm.rank), None, None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.world_size, ctx.algorithm, ctx.sms = inputs

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        operands = plain(grad), ctx.comm, ctx.world_size, ctx.algorithm, "sum", False, ctx.sms
        return torch.ops.shotcast.reduce_scatter(*operands), None, None, None, None

    @staticmethod
    def keep_uneven(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.sizes, ctx.rank, _, ctx.sms = inputs

    @staticmethod
    def traced_uneven(ctx: Any, grad: torch.Tensor) -> Gradients:
        total = torch.ops.shotcast.all_reduce(plain(grad), ctx.comm, "auto", "sum", ctx.sms)
        return _own_part(total, ctx.sizes, ctx.rank), None, None, None, None, None


class AllToAll(torch.autograd.Function):
    """y_i = (x_0[i], ..., x_{N-1}[i]), so dx_i = (dy_0[i], ..., dy_{N-1}[i])."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, algorithm: str, sms: int | None) -> torch.Tensor:
        ctx.comm, ctx.algorithm, ctx.sms = comm, algorithm, sms
        return comm.all_to_all(x.detach(), algorithm=algorithm, sms=sms)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        return ctx.comm.all_to_all(plain(grads[0]), algorithm=ctx.algorithm, sms=ctx.sms), None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.algorithm, ctx.sms = inputs

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        return torch.ops.shotcast.all_to_all(plain(grad), ctx.comm, ctx.algorithm, ctx.sms), None, None, None


class AllToAllUneven(torch.autograd.Function):
    """y_i = (x_0[i], ..., x_{N-1}[i]) of any sizes, so dx_i = (dy_0[i], ..., dy_{N-1}[i])."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Collectives, sent: tuple[int, ...], received: tuple[int, ...], algorithm: str
    ) -> torch.Tensor:
        AllToAllUneven.keep(ctx, (x, comm, sent, received, comm.rank, algorithm), x)
        return comm.all_to_all(x.detach(), algorithm=algorithm, input_sizes=sent, output_sizes=received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        sizes = {"input_sizes": ctx.received, "output_sizes": ctx.sent}
        return ctx.comm.all_to_all(plain(grads[0]), algorithm=ctx.algorithm, **sizes), None, None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.sent, ctx.received, ctx.rank, ctx.algorithm = inputs

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        operands = plain(grad), ctx.comm, ctx.received, ctx.sent, ctx.rank, ctx.algorithm
        return torch.ops.shotcast.all_to_all_uneven(*operands), None, None, None, None, None


class Broadcast(torch.autograd.Function):
    """y_i = x_root, so dx_root = sum_r dy_r, and dx_i = 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, root: int, algorithm: str) -> torch.Tensor:
        ctx.comm, ctx.root = comm, root
        return broadcast_copy(comm, x, root, algorithm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        return _SumAtRoot.apply(plain(grads[0]), ctx.comm, ctx.root), None, None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.root, _ = inputs

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        return torch.ops.shotcast.sum_at_root(plain(grad), ctx.comm, ctx.root), None, None, None


class _SumAtRoot(torch.autograd.Function):
    """y_root = sum_r x_r, and y_i = 0 elsewhere, so dx_i = dy_root."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Collectives, root: int) -> torch.Tensor:
        ctx.comm, ctx.root = comm, root
        return sum_at_root(comm, x.detach(), root)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        return Broadcast.apply(plain(grads[0]), ctx.comm, ctx.root, "auto"), None, None

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.comm, ctx.root = inputs

    @staticmethod
    def traced(ctx: Any, grad: torch.Tensor) -> Gradients:
        return torch.ops.shotcast.broadcast(plain(grad), ctx.comm, ctx.root, "auto"), None, None


# -- gradients that are made of several calls -------------------------------------------------------------------------


def all_reduce_gradient(
    comm: Collectives, x: torch.Tensor, grad: torch.Tensor, reduction: str, sms: int | None = None
) -> torch.Tensor:
    """Return the gradient of a ``max``, ``min`` or ``prod`` of all ranks' ``x``, by :func:`slopes`. Collective."""
    parts = comm.all_gather(x.contiguous().view(1, *x.shape), sms=sms)  # [N, ...]
    return slopes(parts, comm.all_reduce(grad, sms=sms), reduction)[comm.rank].clone()


def reduce_scatter_gradient(
    comm: Collectives, x: torch.Tensor, grad: torch.Tensor, reduction: str, sms: int | None = None
) -> torch.Tensor:
    """Return the gradient of this rank's ``x``; ``grad`` is that of its part of the result. Collective."""
    parts = comm.all_to_all(x.contiguous(), sms=sms).view(
        comm.world_size, *grad.shape
    )  # what the part was reduced from
    return comm.all_to_all(slopes(parts, grad, reduction).view(x.shape), sms=sms)


def share(grad: torch.Tensor, reduction: str, world_size: int) -> torch.Tensor:
    """Return the gradient of a rank's part of a sum or an average, from that of the whole."""
    return grad if reduction == "sum" else grad / world_size


def sum_at_root(comm: Collectives, x: torch.Tensor, root: int) -> torch.Tensor:
    """Return all ranks' sum at ``root``, zeros elsewhere. Collective."""
    total = comm.all_reduce(x)
    return total if comm.rank == root else torch.zeros_like(total)


def broadcast_copy(comm: Collectives, x: torch.Tensor, root: int, algorithm: str) -> torch.Tensor:
    """Broadcast to a new tensor on every rank."""
    out = x.new_empty(x.shape)
    if comm.rank == root:
        out.copy_(x.detach())
    return comm.broadcast(out, root, algorithm)


def slopes(parts: torch.Tensor, grad: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the gradients of ``parts`` [N, ...] from that of their reduction, as PyTorch defines them.

    A maximum or minimum divides its gradient equally among the parts that reach it (``torch.amax``); a part of a
    product has the product of the others as its slope.
    """
    if reduction == "prod":
        one = torch.ones_like(parts[:1])
        before = torch.cat([one, parts[:-1]]).cumprod(0)
        after = torch.cat([one, parts.flip(0)[:-1]]).cumprod(0).flip(0)
        return (before * after).conj() * grad
    reached = parts == (parts.amax(0) if reduction == "max" else parts.amin(0))
    return reached * grad / reached.sum(0)


def plain(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the form that calls accept; autograd conjugates and negates lazily."""
    return grad.resolve_conj().resolve_neg().contiguous()


def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save nothing: the context of a call without a second derivative in a graph."""


def refuse(ctx: Any, grad: torch.Tensor) -> Gradients:
    """Raise UnsupportedError."""
    raise UnsupportedError(
        "max, min, prod and calls with a root have no second derivative in a graph; make the call eagerly"
    )


def _own_part(total: torch.Tensor, sizes: tuple[int, ...], rank: int) -> torch.Tensor:
    start = sum(sizes[:rank])
    return total[start : start + sizes[rank]].clone()


def where_legal(comm: Collectives, x: torch.Tensor, algorithm: str, sms: int | None = None) -> str:
    """Return ``algorithm`` if it can serve this reduce_scatter, else ``auto``.

    An algorithm that gathers a dtype need not be able to add it.
    """
    return algorithm if algorithm in comm.candidates(x, "reduce_scatter", sms) else "auto"


OPERATORS: dict[str, tuple[Callable[..., None], Callable[..., Gradients]]] = {
    "all_reduce": (AllReduce.keep, AllReduce.traced),
    "reduce_scatter": (ReduceScatter.keep, ReduceScatter.traced),
    "all_gather": (AllGather.keep, AllGather.traced),
    "all_gather_uneven": (AllGather.keep_uneven, AllGather.traced_uneven),
    "all_to_all": (AllToAll.keep, AllToAll.traced),
    "all_to_all_uneven": (AllToAllUneven.keep, AllToAllUneven.traced),
    "broadcast": (Broadcast.keep, Broadcast.traced),
    "sum_at_root": (_SumAtRoot.keep, _SumAtRoot.traced),
    "all_reduce_gradient": (keep_nothing, refuse),
    "reduce_scatter_gradient": (keep_nothing, refuse),
}
"""The function that saves the context of a backward, and the backward, for each operator."""
