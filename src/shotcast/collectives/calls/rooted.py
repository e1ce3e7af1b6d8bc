"""Calls with a root: reduce, gather and scatter."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from shotcast.collectives.arguments import dense, output, rank_in, rows_per_rank, valid
from shotcast.collectives.calls.caller import Caller
from shotcast.collectives.reductions import Reduction, reduction_name
from shotcast.collectives.torch_ops import autograd, autograd_rooted, operators_rooted
from shotcast.errors import ConfigError
from shotcast.wire import Op


class RootedCalls(Caller):
    """The calls whose data goes to one rank, or comes from it."""

    def reduce(
        self,
        x: torch.Tensor,
        root: int,
        out: torch.Tensor | None = None,
        algorithm: str = "auto",
        reduction: Reduction = "sum",
    ) -> torch.Tensor:
        """Compute ``out = x_0 + x_1 + ... + x_{N-1}`` on rank ``root``.

        On one node and between CPU hosts, native kernels give the bits of :meth:`all_reduce`. Between GPU hosts the
        vendor library sets the order; where those bits are needed, :meth:`all_reduce` gives them.

        Args:
            x: any shape, the same on all ranks.
            root: the rank that gets the result.
            out: on the root, like ``x``; ``x`` itself for in place; None for a new tensor. Not used elsewhere.
            algorithm: ``auto``, ``one_shot``, ``two_shot`` or ``vendor``; between CPU hosts ``nvrar_pairs``.
            reduction: as in :meth:`all_reduce`.

        Returns:
            ``out`` on the root, an empty tensor elsewhere. Differentiable: every rank calls ``backward()``, on others
            through the empty tensor (its sum is 0).
        """
        if not isinstance(reduction, str):
            reduction = reduction_name(reduction)
        key, operands = ("reduce", root, type(root), algorithm, reduction), (x, out if root == self.rank else None)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done if root == self.rank else nothing_of(x)
        x = dense(x, "x", self.device)
        at_root = rank_in(root, self.world_size, "root") == self.rank
        if is_compiling():
            return operators_rooted.reduce(self, x, root, out, algorithm, reduction)
        if (out is None or not at_root) and x.requires_grad and torch.is_grad_enabled():
            return autograd_rooted.Reduce.apply(x, self, root, algorithm, reduction)
        if at_root:
            out = output(x, out, x.shape, 0)
            if (x.requires_grad or out.requires_grad) and torch.is_grad_enabled():
                return autograd.written(autograd_rooted.Reduce, x, out, self, root, algorithm, reduction)
        else:  # the kernels of GPUs are those of an all_reduce, and write to every rank
            out = x.new_empty(x.shape) if self.topology.transport.writes_everywhere else None
        given = key, operands
        self._run(Op.REDUCE, x, out, algorithm=algorithm, reduction=reduction, root=root, given=given)
        return out if at_root and out is not None else nothing_of(x)

    def gather(
        self, x: torch.Tensor, root: int, out: torch.Tensor | None = None, algorithm: str = "auto"
    ) -> torch.Tensor:
        """Compute ``out = x_0, x_1, ..., x_{N-1}``, joined along the first dimension, on rank ``root``.

        Args:
            x: [k, ...], the same shape on all ranks.
            root: the rank that gets the result.
            out: on the root, [N * k, ...], of which its own part may be ``x``; None for a new tensor. Not used
                elsewhere.
            algorithm: ``auto``, ``one_shot`` or ``vendor``.

        Returns:
            ``out`` on the root, [0, ...] elsewhere. Differentiable as :meth:`reduce` is.
        """
        key, operands = ("gather", root, type(root), algorithm), (x, out if root == self.rank else None)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done if root == self.rank else nothing_of(x)
        x = dense(x, "x", self.device)
        at_root = rank_in(root, self.world_size, "root") == self.rank
        if x.dim() == 0:
            x = x.view(1)
        if is_compiling():
            return operators_rooted.gather(self, x, root, out, algorithm)
        shape = (x.shape[0] * self.world_size, *x.shape[1:])
        if (out is None or not at_root) and x.requires_grad and torch.is_grad_enabled():
            return autograd_rooted.Gather.apply(x, self, root, algorithm)
        out = output(x, out, shape, self.rank * x.nbytes) if at_root else None
        if out is not None and (x.requires_grad or out.requires_grad) and torch.is_grad_enabled():
            return autograd.written(autograd_rooted.Gather, x, out, self, root, algorithm)
        count = x.numel() * self.world_size
        self._run(Op.GATHER, x, out, algorithm=algorithm, root=root, count=count, given=(key, operands))
        return nothing_of(x) if out is None else out

    def scatter(
        self, x: torch.Tensor | None, root: int, out: torch.Tensor | None = None, algorithm: str = "auto"
    ) -> torch.Tensor:
        """Compute ``out = x[i]`` on rank i, where ``x[i]`` is the i-th of N equal parts of the root's ``x``.

        Args:
            x: on the root, [N * k, ...]. Elsewhere its values are not read: a tensor like it, or None if there is an
                ``out``.
            root: the rank that has the parts.
            out: [k, ...]; on the root it may be its part of ``x``; None for a new tensor.
            algorithm: ``auto``, ``one_shot`` or ``vendor``.

        Returns:
            ``out``. Differentiable where ``x`` of all ranks requires grad; the gradient is that of the root.
        """
        key, operands = ("scatter", root, type(root), algorithm, x is None), (out if x is None else x, out)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done
        at_root = rank_in(root, self.world_size, "root") == self.rank
        if x is None:
            if at_root or out is None:
                raise ConfigError("scatter: x is a tensor on the root, and elsewhere too where there is no out")
            valid(out, "out", self.device)
            whole, shape = out.numel() * self.world_size, tuple(out.shape)
            like = out
        else:
            like = x = dense(x, "x", self.device)
            rows = rows_per_rank(x, self.world_size, "scatter")
            whole, shape = x.numel(), (rows, *x.shape[1:])
        if is_compiling():
            return operators_rooted.scatter(self, x, root, out, algorithm, shape)
        if out is None and like.requires_grad and torch.is_grad_enabled():
            return autograd_rooted.Scatter.apply(like, self, root, algorithm)
        out = output(like, out, shape, self.rank * (like.nbytes // self.world_size) if at_root else None)
        if x is not None and (x.requires_grad or out.requires_grad) and torch.is_grad_enabled():
            return autograd.written(autograd_rooted.Scatter, x, out, self, root, algorithm)
        if out.requires_grad and torch.is_grad_enabled():
            return out.copy_(
                self.scatter(None, root, out=torch.empty_like(out, requires_grad=False), algorithm=algorithm)
            )
        source = x if at_root else None
        self._run(Op.SCATTER, source, out, algorithm=algorithm, root=root, count=whole, given=(key, operands))
        return out


def nothing_of(x: torch.Tensor) -> torch.Tensor:
    """Return the result of a rank that gets none: no rows like those of ``x``."""
    return x.new_empty((0, *x.shape[1:]))
