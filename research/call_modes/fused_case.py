"""All-reduce, residual and norm: the calls of all implementations, fused and unfused, and the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from call_modes import names as modes
from shotcast.bench import baselines, implementations
from shotcast.bench.baselines import BenchCall
from shotcast.bench.cases import Case, RankContext, Reference
from shotcast.collectives import separate_norm
from shotcast.collectives.choice.choice import Explanation
from shotcast.collectives.norm_operands import Fp8Normed
from shotcast.memory.operands import NormTensors
from shotcast.wire import LAYER_WITH_BIAS, RMS, Norm

EPS = 1e-6
E4M3_MAX = 448.0


class FusedCase(Case):
    """The tensors, calls and reference of an all_reduce_rms_norm or, with a bias, an all_reduce_layer_norm.

    ``x`` and the residual are [tokens, hidden], weight and bias are [hidden]. All but ``x`` are equal on all ranks. For
    ``unfused``, NCCL and Gloo, an all-reduce is followed by one kernel for residual and norm.
    """

    def __init__(self, context: RankContext, op: str, nbytes: int, hidden: int, seed: int):
        self._hidden, self._fused_op = hidden, op
        super().__init__(context, "all_reduce", nbytes, seed)
        layer = op == "all_reduce_layer_norm"
        self._kind = LAYER_WITH_BIAS if layer else RMS
        self._bias = context.random(seed, 999, hidden) if layer else None
        self._residual = context.random(seed, 997, self._count).view(-1, hidden)
        self._weight = context.random(seed, 998, hidden)
        self._static_scale: torch.Tensor | None = None

    def _input(self, rank: int) -> torch.Tensor:
        return super()._input(rank).view(-1, self._hidden)

    def _new(self) -> torch.Tensor:
        return torch.empty_like(self.x)

    def _explained(self, mode: str) -> Explanation:
        assert self.context.comm is not None
        return self.context.comm.explain(self.x, op=self._fused_op, mode=mode)

    def calls(self, names: Sequence[str]) -> list[BenchCall]:
        legal: tuple[str, ...] = ()
        if self.context.comm is not None:
            legal = (*self._explained("eager").candidates, implementations.AUTO, *modes.FUSED)
        return [
            self._own(name) if modes.is_own(name) else self._other(name)
            for name in names
            if name in legal or not modes.is_own(name)
        ]

    def _own(self, name: str) -> BenchCall:
        comm: Any = self.context.comm
        x = self.x
        if name in modes.PLAIN:
            plain = baselines.own_call(modes.PLAIN[name], "all_reduce", comm, x, self._new())
            return dataclasses.replace(plain, name=name)
        if name == "unfused":
            reduced = baselines.own_call(implementations.AUTO, "all_reduce", comm, x, self._new())
            return self._then_norm(name, reduced)
        if name in modes.FP8:
            return self._quantized(name, comm)
        normed, new_residual = self._new(), self._new()
        make, operands = getattr(comm, self._fused_op), self._operands

        def fused() -> None:
            make(*operands, EPS, algorithm=name, out=(normed, new_residual))

        return self._normed(BenchCall(name, fused, x, ()), normed, new_residual)

    @property
    def _operands(self) -> tuple[torch.Tensor, ...]:
        """The tensors that a call reads, in order."""
        shift = () if self._bias is None else (self._bias,)
        return self.x, self._residual, self._weight, *shift

    def _other(self, name: str) -> BenchCall:
        reduced = baselines.library_call(name, "all_reduce", self.context.group, self.x, self._new())
        return self._then_norm(name, reduced)

    def _normed(self, call: BenchCall, normed: torch.Tensor, new_residual: torch.Tensor) -> BenchCall:
        """Return the call with these results."""

        def values() -> Mapping[str, torch.Tensor]:
            return {"normed": normed.double() - self.norm(new_residual), "new_residual": new_residual}

        return dataclasses.replace(call, results=(normed, new_residual), values=values)

    def _then_norm(self, name: str, reduced: BenchCall) -> BenchCall:
        normed, new_residual = self._new(), self._new()
        tensors = NormTensors(self._residual, self._weight, EPS, new_residual, normed, bias=self._bias)
        norm, by_kernel = Norm(self._hidden, kind=self._kind), self.context.device.type == "cuda"

        def run() -> None:
            reduced.run()
            separate_norm.norm_sum(reduced.results[0], tensors, norm, by_kernel)

        return self._normed(dataclasses.replace(reduced, name=name, run=run), normed, new_residual)

    def _quantized(self, name: str, comm: Any) -> BenchCall:
        x = self.x
        tokens = x.shape[0]
        new_residual = self._new()
        quantized = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        static = modes.FP8[name] == "static"
        scale = self.static_scale if static else torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
        given, out = scale if static else None, Fp8Normed(quantized, scale, new_residual, None)

        make, operands = getattr(comm, f"{self._fused_op}_fp8"), self._operands

        def run() -> None:
            make(*operands, EPS, scale=given, out=out)

        def values() -> Mapping[str, torch.Tensor]:
            error = quantized.double() * scale.double() - self.norm(new_residual)
            return {name: error, "new_residual": new_residual}

        results = (quantized, new_residual) if static else (quantized, scale, new_residual)
        return BenchCall(name, run, x, results, values=values)

    @property
    def static_scale(self) -> torch.Tensor:
        """The scale of the whole tensor, [1], chosen to fit its largest value; equal on all ranks."""
        if self._static_scale is None:
            largest = self.norm(self.reference()["new_residual"][0]).abs().max().float().reshape(1)
            self._static_scale = largest * (1 + 1 / 64) / E4M3_MAX
        return self._static_scale

    def norm(self, new_residual: torch.Tensor) -> torch.Tensor:
        """Compute the norm of these rows in float64."""
        rows = self._centred(new_residual.double())
        normed = rows / self._deviation(rows) * self._weight.double()
        return normed if self._bias is None else normed + self._bias.double()

    def _centred(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._bias is None else rows - rows.mean(-1, keepdim=True)

    @staticmethod
    def _deviation(rows: torch.Tensor) -> torch.Tensor:
        return (rows.square().mean(-1, keepdim=True) + EPS).sqrt()

    def reference(self) -> Reference:
        """Compute the references of the sum, the new residual and the norm.

        The norm is checked against the norm of the new residual that the call returned. The new residual has the error
        of the sum plus one more rounding, which that error may enlarge. The norm is computed in float32 and rounded
        once. FP8 results may be off by another half step of e4m3: 2^-4 of the value or, below the normal range, 2^-10
        of the scale.
        """
        step = torch.finfo(self.context.dtype).eps
        plain = super().reference()
        total, total_error = (values.view(self.x.shape) for values in plain["sum"])
        kept_residual = total + self._residual.double()
        residual_error = total_error + step * (kept_residual.abs() + total_error)
        # the magnitude of a norm, for any new residual within the bound
        deviation = self._deviation(self._centred(kept_residual))
        size = self.norm(kept_residual).abs() + 2 * self._weight.double().abs() * residual_error / deviation
        normed_error = step * size + 2**-20
        if self._bias is not None:  # a mean is rounded, and what is added to the bias may be larger than the sum
            float_step, largest = torch.finfo(torch.float32).eps, kept_residual.abs().amax(-1, keepdim=True)
            inside = self._weight.double().abs() * (64 * largest / deviation) + 64 * self._bias.double().abs()
            normed_error = normed_error + float_step * inside
        zeros = torch.zeros_like(kept_residual)
        reference = {
            "sum": (total, total_error),
            "new_residual": (kept_residual, residual_error),
            "normed": (zeros, normed_error),
        }
        for name, largest in (("fp8_dynamic", size.amax(-1, keepdim=True)), ("fp8_static", size.max())):
            fp8_error = 2**-4 * (size + normed_error) + 2**-10 * largest / E4M3_MAX
            reference[name] = (zeros, normed_error + 1.02 * fp8_error)
        return reference
