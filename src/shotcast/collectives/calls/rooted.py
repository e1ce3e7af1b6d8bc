"""Calls with a root: reduce, gather and scatter."""

from __future__ import annotations

import torch

from shotcast.collectives import ops
from shotcast.collectives.arguments import dense, rank_in, valid, writable
from shotcast.collectives.calls.caller import Caller
from shotcast.collectives.ops import OpSpec
from shotcast.collectives.prepared import Given
from shotcast.collectives.reductions import Reduction, reduction_name
from shotcast.collectives.torch_private import is_traced
from shotcast.errors import ConfigError
from shotcast.wire import Op


class RootedCalls(Caller):
    """Calls that send data to one rank or from it."""

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
        vendor library sets the order; call :meth:`all_reduce` if you need its bits.

        Args:
            x: any shape, the same on all ranks.
            root: the rank that gets the result.
            out: on the root, like ``x``; ``x`` for in place; None for a new tensor. Not used elsewhere.
            algorithm: ``auto``, ``one_shot``, ``two_shot`` or ``vendor``; between CPU hosts ``nvrar_pairs``.
            reduction: as in :meth:`all_reduce`.

        Returns:
            ``out`` on the root, an empty tensor elsewhere. Differentiable: every rank calls ``backward()``; ranks other
                than the root do so through the empty tensor (its sum is 0).
        """
        if not isinstance(reduction, str):
            reduction = reduction_name(reduction, "reduce")
        key, operands = ("reduce", root, type(root), algorithm, reduction), (x, out if root == self.rank else None)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done if root == self.rank else nothing_of(x)
        return self._to_root(ops.REDUCE, x, root, out, (key, operands), algorithm, reduction)

    def gather(
        self, x: torch.Tensor, root: int, out: torch.Tensor | None = None, algorithm: str = "auto"
    ) -> torch.Tensor:
        """Compute ``out = x_0, x_1, ..., x_{N-1}``, joined along the first dimension, on rank ``root``.

        Args:
            x: [k, ...], the same shape on all ranks.
            root: the rank that gets the result.
            out: on the root, [N * k, ...], whose local part may be ``x``; None for a new tensor. Not used elsewhere.
            algorithm: ``auto``, ``one_shot`` or ``vendor``.

        Returns:
            ``out`` on the root, [0, ...] elsewhere. Differentiable as :meth:`reduce` is.
        """
        key, operands = ("gather", root, type(root), algorithm), (x, out if root == self.rank else None)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done if root == self.rank else nothing_of(x)
        return self._to_root(ops.GATHER, x, root, out, (key, operands), algorithm)

    def _to_root(
        self,
        spec: OpSpec,
        x: torch.Tensor,
        root: int,
        out: torch.Tensor | None,
        given: Given,
        algorithm: str,
        reduction: str = "sum",
    ) -> torch.Tensor:
        """Run an operation whose result only the root gets."""
        x = dense(x, "x", self.device, spec.name)
        at_root = rank_in(root, self.world_size, "root", spec.name) == self.rank
        count = None
        if spec is ops.GATHER:
            x = x.view(1) if x.dim() == 0 else x
            count = x.numel() * self.world_size
        if at_root or is_traced() or (x.requires_grad and torch.is_grad_enabled()):
            parts = self.world_size if at_root else 0
            options = {"root": root, "parts": parts, "algorithm": algorithm, "reduction": reduction}
            return self._make(spec, x, out if at_root else None, given, options, count=count)
        # the kernels of GPUs for a reduce are those of an all_reduce, and write to every rank
        everywhere = spec is ops.REDUCE and self.topology.transport.writes_everywhere
        room = x.new_empty(x.shape) if everywhere else None
        assert spec.op is not None
        self._run(spec.op, x, room, algorithm, reduction, root, count=count, given=given)
        return nothing_of(x)

    def scatter(
        self, x: torch.Tensor | None, root: int, out: torch.Tensor | None = None, algorithm: str = "auto"
    ) -> torch.Tensor:
        """Compute ``out = x[i]`` on rank i, where ``x[i]`` is the i-th of N equal parts of the root's ``x``.

        Args:
            x: on the root, [N * k, ...]. Elsewhere its values are not read: a tensor like it, or None if there is an
                ``out``.
            root: the rank that holds the parts.
            out: [k, ...]; on the root it may be its part of ``x``; None for a new tensor.
            algorithm: ``auto``, ``one_shot`` or ``vendor``.

        Returns:
            ``out``. Differentiable if ``x`` requires grad on all ranks; the gradient goes to the root.
        """
        key, operands = ("scatter", root, type(root), algorithm, x is None), (out if x is None else x, out)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done
        at_root = rank_in(root, self.world_size, "root", "scatter") == self.rank
        if x is None:
            if at_root or out is None:
                raise ConfigError("scatter: x is a tensor on the root, and elsewhere too where there is no out")
            valid(out, "out", self.device, "scatter")
            if is_traced():
                x = out.new_empty((out.shape[0] * self.world_size, *out.shape[1:]))
            elif out.requires_grad and torch.is_grad_enabled():
                writable(out, "out", "scatter")
                into = torch.empty_like(out, requires_grad=False)
                return out.copy_(self.scatter(None, root, out=into, algorithm=algorithm))
            else:
                count = out.numel() * self.world_size
                self._run(Op.SCATTER, None, out, algorithm, root=root, count=count, given=(key, operands))
                return out
        x = dense(x, "x", self.device, "scatter")
        return self._make(ops.SCATTER, x, out, (key, operands), {"root": root, "algorithm": algorithm}, count=x.numel())


def nothing_of(x: torch.Tensor) -> torch.Tensor:
    """Return the result of a rank that gets none: no rows, shaped like those of ``x``."""
    return x.new_empty((0, *x.shape[1:]))
