"""Sums of all ranks, and other reductions: all_reduce and reduce_scatter."""

from __future__ import annotations

import torch

from shotcast.collectives import ops
from shotcast.collectives.arguments import dense
from shotcast.collectives.calls.caller import Caller
from shotcast.collectives.reductions import Reduction, reduction_name


class SumCalls(Caller):
    """Calls that reduce, with a result on every rank."""

    def all_reduce(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        algorithm: str = "auto",
        reduction: Reduction = "sum",
        sms: int | None = None,
    ) -> torch.Tensor:
        """Compute ``out = x_0 + x_1 + ... + x_{N-1}``, or another reduction, on every rank.

        Args:
            x: contiguous, any shape, the same on all ranks.
            out: like ``x``; ``x`` for in place; None for a new tensor.
            algorithm: ``auto``, ``lossless`` (like ``auto``, but never loses precision, even with ``allow_fp8``),
                ``one_shot``, ``two_shot``, ``two_shot_fp8`` (loses precision: ``docs/reference/numerics.md``),
                ``ring``, ``multimem`` (by name only), ``vendor``, or the name of a registered algorithm; over several
                nodes ``nvrar``, ``nvrar_pairs``, ``nvrar_two_shot``, ``nvrar_halving`` and ``nvrar_16bit`` (by name
                only, loses precision); see ``docs/reference/algorithms.md``.
            reduction: ``sum``, ``avg``, ``prod``, ``max`` or ``min``, for integers and bool also ``band``, ``bor`` or
                ``bxor``; or one of ``torch.distributed.ReduceOp``. ``docs/reference/numerics.md`` defines them for each
                dtype.
            sms: the most SMs that native kernels may occupy on a GPU, so that other work continues; 0 for copy engines,
                None for the fastest number. The same on all ranks. CPU ranks and the vendor library (see
                :meth:`explain`) ignore it.

        Returns:
            ``out``. Differentiable; the gradient of ``max`` and ``min`` is divided equally among the ranks that attain
                it, as in ``torch.amax``. The gradient of ``max``, ``min`` and ``prod`` gathers ``x`` of all ranks.
        """
        if not isinstance(reduction, str):
            reduction = reduction_name(reduction, "all_reduce")
        key, operands = ("all_reduce", algorithm, reduction, sms, type(sms)), (x, out)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done
        options = {"algorithm": algorithm, "reduction": reduction, "sms": sms}
        x = dense(x, "x", self.device, "all_reduce")
        return self._make(ops.ALL_REDUCE, x, out, (key, operands), options)

    def reduce_scatter(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        algorithm: str = "auto",
        reduction: Reduction = "sum",
        sms: int | None = None,
    ) -> torch.Tensor:
        """Compute ``out_i = x_0[i] + ... + x_{N-1}[i]`` or another reduction, ``x[i]`` being the i-th of N equal parts.

        Args:
            x: contiguous [N * k, ...].
            out: [k, ...]; None for a new tensor.
            algorithm: ``auto``, ``one_shot``, ``ring`` or ``vendor``; with ``sms`` ``few_sms`` or
                ``copy_engines``.
            reduction, sms: as in :meth:`all_reduce`.

        Returns:
            ``out``. Differentiable as :meth:`all_reduce` is.
        """
        if not isinstance(reduction, str):
            reduction = reduction_name(reduction, "reduce_scatter")
        key, operands = ("reduce_scatter", algorithm, reduction, sms, type(sms)), (x, out)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done
        options = {"algorithm": algorithm, "reduction": reduction, "sms": sms}
        x = dense(x, "x", self.device, "reduce_scatter")
        return self._make(ops.REDUCE_SCATTER, x, out, (key, operands), options)
