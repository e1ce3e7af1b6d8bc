"""Reductions with normalized rows: fused operations, or separate calls for the sum and the norm."""

from __future__ import annotations

from typing import Any

import torch

from shotcast.collectives import separate_norm
from shotcast.collectives.calls.copies import CopyCalls
from shotcast.collectives.calls.sums import SumCalls
from shotcast.collectives.norm_operands import Fp8Normed, aligned, copy_back, is_aligned, norm_operands
from shotcast.collectives.ops import OPS
from shotcast.collectives.prepared import Given
from shotcast.collectives.torch_ops import autograd, operators
from shotcast.collectives.torch_private import is_traced
from shotcast.memory.operands import NormTensors
from shotcast.wire import LAYER, RMS, Norm, Op


class NormCalls(SumCalls, CopyCalls):
    """Calls that reduce, add the residual and normalize the rows."""

    def all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        algorithm: str = "auto",
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce ``x``, add the residual and apply RMSNorm in one kernel, as between the blocks of a transformer.

        ``new_residual = all_reduce(x) + residual``; ``normed = new_residual / rms(new_residual) * weight``, in float32
        from the rounded ``new_residual``. If no fused kernel serves the call (:meth:`explain` says why), the sum is a
        separate call followed by the norm, with the same bits.

        Args:
            x, residual: contiguous [..., hidden], float32, float16 or bfloat16.
            weight: [hidden], of any of these dtypes, which may differ from the dtype of ``x``.
            eps: added to the mean square.
            algorithm: ``auto``, ``one_shot`` or ``two_shot``, or, over several nodes, the ones listed for
                :meth:`all_reduce`; ``vendor`` for the vendor library's unfused sum.
            out: (normed, new_residual), like ``x``, so that nothing is allocated; new_residual may be all of
                ``residual``, and normed all of ``x``. Other overlaps are refused. None for new tensors.

        Returns:
            ``(normed, new_residual)``. Differentiable.
        """
        return self._norm(RMS, x, residual, weight, None, eps, algorithm, out)

    def all_reduce_rms_norm_fp8(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        scale: torch.Tensor | None = None,
        with_normed: bool = False,
        algorithm: str = "auto",
        out: Fp8Normed | None = None,
    ) -> Fp8Normed:
        """Run :meth:`all_reduce_rms_norm`, and return the norm in FP8 for the matrix product that follows.

        ``quantized = e4m3(clamp(normed * (1 / scale), -448, 448))`` from ``normed`` rounded to the dtype, so ``normed``
        is about ``quantized * scale``. NaN stays NaN.

        Args:
            x, residual, weight, eps, algorithm: as in :meth:`all_reduce_rms_norm`.
            scale: one float32 on the device; None for one scale a row: max(abs(normed)) / 448, at least 2^-126 (a row
                of zeros).
            with_normed: also return ``normed``.
            out: tensors for the results; its scale is written only if ``scale`` is None. None for new tensors.

        Returns:
            ``Fp8Normed(quantized, scale, new_residual, normed)``; not differentiable.
        """
        operands = x, residual, weight, None, eps, algorithm, out, True, scale, with_normed
        return self._norm(RMS, *operands)

    def all_reduce_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        algorithm: str = "auto",
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run :meth:`all_reduce_rms_norm` with a LayerNorm.

        ``new_residual = all_reduce(x) + residual``; ``normed = (new_residual - mean) / sqrt(variance + eps) * weight +
        bias``, with mean and variance of the row.

        Args:
            x, residual, weight, algorithm, out: as in :meth:`all_reduce_rms_norm`.
            bias: like ``weight``; None for no bias.
            eps: added to the variance.

        Returns:
            ``(normed, new_residual)``. Differentiable.
        """
        return self._norm(LAYER, x, residual, weight, bias, eps, algorithm, out)

    def all_reduce_layer_norm_fp8(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        scale: torch.Tensor | None = None,
        with_normed: bool = False,
        algorithm: str = "auto",
        out: Fp8Normed | None = None,
    ) -> Fp8Normed:
        """Run :meth:`all_reduce_layer_norm`, and return the norm in FP8 as :meth:`all_reduce_rms_norm_fp8` does."""
        operands = x, residual, weight, bias, eps, algorithm, out, True, scale, with_normed
        return self._norm(LAYER, *operands)

    def _norm(
        self,
        kind: str,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        algorithm: str,
        out: Any,
        fp8: bool = False,
        scale: torch.Tensor | None = None,
        with_normed: bool = True,
    ) -> Any:
        """Run a fused call, optionally with the norm in FP8; return what ``out`` would hold."""
        normed = new_residual = quantized = rows = None
        if isinstance(out, tuple):
            if fp8 and len(out) == 4:
                quantized, rows, new_residual, normed = out
            elif len(out) == 2:
                normed, new_residual = out
        written = normed if with_normed else None, new_residual, quantized, rows if scale is None else None
        operands = x, residual, weight, bias, scale, *written
        aliases = written[0] is x, new_residual is residual
        key = kind, algorithm, eps, type(eps), bias is None, out is None, aliases, fp8, scale is None, with_normed
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done
        spec = OPS[f"all_reduce_{kind}_norm{'_fp8' * fp8}"]
        named = {"x": x, "residual": residual, "weight": weight, "bias": bias, "scale": scale}
        options = {"eps": eps, "with_normed": with_normed, "algorithm": algorithm}
        if is_traced():
            return operators.traced_norm(spec, self, out, named | options)
        norm, tensors = norm_operands(
            spec.name, self.device, x, residual, weight, eps, out, kind, bias, fp8, scale, with_normed
        )
        differentiable = () if fp8 else (x, residual, weight, bias, *(out or ()))
        if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in differentiable):
            made = autograd.record(spec, self, named | options)
            return made if out is None else (out[0].copy_(made[0]), out[1].copy_(made[1]))
        assert spec.op is not None
        self._run_norm(spec.op, x, norm, tensors, algorithm, (key, operands))
        if fp8:
            assert tensors.quantized is not None
            assert tensors.scale is not None
            return Fp8Normed(tensors.quantized, tensors.scale, tensors.new_residual, tensors.normed)
        return tensors.normed, tensors.new_residual

    def _run_norm(
        self, op: Op, x: torch.Tensor, norm: Norm, tensors: NormTensors, algorithm: str, given: Given | None = None
    ) -> None:
        """Run a fused call, or separate calls for the sum and the norm."""
        by_kernel = self.topology.runs_grids
        if self.world_size == 1 and not by_kernel and not self._closed:
            with torch.no_grad():
                separate_norm.norm_sum(x, tensors, norm, by_kernel)
            return
        if by_kernel and not is_aligned(x, tensors):
            moved, inside = aligned(x, tensors)
            self._run_norm(op, moved, norm, inside, algorithm)
            with torch.no_grad():
                copy_back(inside, tensors)
            return
        call = self._run(op, x, None, algorithm=algorithm, norm=norm, tensors=tensors, given=given)
        if self.world_size > 1 and not call.by_library:
            return
        plain = "vendor" if algorithm == "vendor" else "auto"
        # the sum goes where the new residual will be; if the old one is there, into x where the norm will be
        room = tensors.new_residual if tensors.new_residual.data_ptr() != tensors.residual.data_ptr() else None
        if room is None and tensors.normed is not None:
            room = x if tensors.normed.data_ptr() == x.data_ptr() else None
        with torch.no_grad():
            total = self.all_reduce(x, out=room, algorithm=plain)
            separate_norm.norm_sum(total, tensors, norm, by_kernel)
