"""vLLM's fusion of an all-reduce with the following RMSNorm (``fuse_allreduce_rms``), on our kernels.

vLLM compiles a model into graphs and runs passes over them. Its fusion pass replaces the two operators with a
FlashInfer kernel, which bypasses the communicator. Our pass takes its place, and replaces them with an operator that
calls our communicator at every number of tokens.

Importing it needs vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch._inductor.pattern_matcher as pattern_matcher  # it sets variables of the environment
from vllm.compilation.passes import pass_manager
from vllm.compilation.passes.inductor_pass import enable_fake_mode
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.ir import ops as norms

from shotcast.integrations.tensor_parallel import TensorParallelSums

logger = logging.getLogger(__name__)

EPSILONS = (1e-5, 1e-6)
"""Epsilons of the norms that vLLM's pass replaces."""


def _sums(group: Any) -> TensorParallelSums | None:
    return getattr(group.device_communicator, "sums", None)


def _norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum ``x`` [..., hidden] over vLLM's tensor-parallel group. Return ``(normed, new_residual)`` as new tensors."""
    group = get_tp_group()
    sums = _sums(group)
    if sums is not None and sums.serves(x):
        return sums.all_reduce_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
    normed, new = norms.fused_add_rms_norm(group.device_communicator.all_reduce(x), residual, weight, eps)
    return normed, new


def _norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run :func:`_norm`, with ``normed`` in FP8 by the ``scale`` of its layer, one float32."""
    sums = _sums(get_tp_group())
    if sums is not None and sums.serves(x):
        return sums.all_reduce_rms_norm_fp8(x.contiguous(), residual.contiguous(), weight, scale, eps)
    normed, new = _norm(x, residual, weight, eps)
    quantized = torch.empty_like(normed, dtype=torch.float8_e4m3fn)
    torch.ops._C.static_scaled_fp8_quant(quantized, normed, scale)
    return quantized, new


def _shapes(x: torch.Tensor, residual: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(residual)


def _shapes_fp8(x: torch.Tensor, residual: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty_like(residual)


def install(config: Any) -> None:
    """Make vLLM's passes in this process use our pass wherever its tensor-parallel group has our sums.

    Args:
        config: vLLM's configuration, which loses the compile range that begins where vLLM's pass would end: norms in
            graphs of different ranges use kernels whose bits may differ. None if there is none.
    """
    own = pass_manager.AllReduceFusionPass
    if not isinstance(own, _Chosen):
        pass_manager.AllReduceFusionPass = _Chosen(own)
    if config is None or config.model_config is None:
        return
    compilation, model = config.compilation_config, config.model_config
    most = compilation.pass_config.flashinfer_max_size(config.parallel_config.tensor_parallel_size)
    if compilation.pass_config.fuse_allreduce_rms and compilation.compile_ranges_endpoints and most is not None:
        tokens = most // (model.get_hidden_size() * model.dtype.itemsize)
        *ends, last = compilation.compile_ranges_endpoints
        compilation.compile_ranges_endpoints = [*(end for end in ends if end != tokens), last]


class _Chosen:
    """Stands in for vLLM's pass class, and creates either our pass or vLLM's."""

    def __init__(self, own: Any):
        self._own = own

    def __call__(self, config: Any) -> Any:
        if _sums(get_tp_group()) is None:
            return self._own(config)
        return ShotcastFusionPass(config)


class ShotcastFusionPass(VllmPatternMatcherPass):
    """Replaces sums followed by a norm, with or without a residual and quantization by a layer scale."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.patterns = pattern_matcher.PatternMatcherPass(pass_name="shotcast_all_reduce_rms_norm")
        self._register()
        self.dump_patterns(config, self.patterns)

    @enable_fake_mode
    def _register(self) -> None:
        x, weight = self._like(5, 16), self._like(16)
        for eps in EPSILONS:
            if (quantize := _quantizer()) is not None:
                scale = torch.empty(1, 1, dtype=torch.float32, device=self.device)
                self._replace(*_quantized_with_residual(eps, quantize), [x, x.clone(), weight, scale])
                self._replace(*_quantized(eps, quantize), [x, weight, scale])
            self._replace(*_with_residual(eps), [x, x.clone(), weight])
            self._replace(*_alone(eps), [x, weight])
            pattern_matcher._seen_patterns.clear()  # or the patterns of the other epsilon would count as seen

    def _like(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.model_dtype, device=self.device)

    def _replace(self, pattern: Any, replacement: Any, inputs: list[torch.Tensor]) -> None:
        pattern_matcher.register_replacement(
            pattern, replacement, inputs, pattern_matcher.fwd_only, self.patterns, extra_check=_weight_like_input
        )

    @VllmInductorPass.time_and_log
    def __call__(self, graph: torch.fx.Graph) -> None:
        self.matched_count = self.patterns.apply(graph)


def _with_residual(eps: float) -> tuple[Any, Any]:
    def pattern(x: Any, residual: Any, weight: Any) -> Any:
        return norms.fused_add_rms_norm(tensor_model_parallel_all_reduce(x), residual, weight, eps)

    def replacement(x: Any, residual: Any, weight: Any) -> Any:
        return torch.ops.shotcast_vllm.all_reduce_rms_norm(x, residual, weight, eps)

    return pattern, replacement


def _alone(eps: float) -> tuple[Any, Any]:
    def pattern(x: Any, weight: Any) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        return norms.rms_norm(total, weight, eps), total

    def replacement(x: Any, weight: Any) -> Any:
        return torch.ops.shotcast_vllm.all_reduce_rms_norm(x, torch.zeros_like(x), weight, eps)

    return pattern, replacement


def _quantized_with_residual(eps: float, quantize: Any) -> tuple[Any, Any]:
    def pattern(x: Any, residual: Any, weight: Any, scale: Any) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        normed, new = norms.fused_add_rms_norm(total, residual, weight, eps)
        return quantize(normed, scale)[0], new

    def replacement(x: Any, residual: Any, weight: Any, scale: Any) -> Any:
        return torch.ops.shotcast_vllm.all_reduce_rms_norm_fp8(x, residual, weight, scale, eps)

    return pattern, replacement


def _quantized(eps: float, quantize: Any) -> tuple[Any, Any]:
    def pattern(x: Any, weight: Any, scale: Any) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        return quantize(norms.rms_norm(total, weight, eps), scale)[0], total

    def replacement(x: Any, weight: Any, scale: Any) -> Any:
        return torch.ops.shotcast_vllm.all_reduce_rms_norm_fp8(x, torch.zeros_like(x), weight, scale, eps)

    return pattern, replacement


def _quantizer() -> Any:
    """Return vLLM's matcher for FP8 quantization by a layer scale; None if vLLM has no such kernel."""
    try:
        from vllm.compilation.passes.fusion.matcher_utils import MatcherQuantFP8
        from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
    except (ImportError, AttributeError) as error:
        logger.debug("sums that are normed and quantized are not fused: %s", error)
        return None
    return MatcherQuantFP8(kFp8StaticTensorSym)


def _weight_like_input(match: Any) -> bool:
    """Return whether the weight has the dtype of the normalized tensor, as our kernels require."""
    return bool(match.kwargs["weight"].meta["val"].dtype == match.kwargs["x"].meta["val"].dtype)


_library = torch.library.Library("shotcast_vllm", "DEF")
"""The operators, which are opaque to compilers."""
for _name, _more, _real, _fake in (
    ("all_reduce_rms_norm", "", _norm, _shapes),
    ("all_reduce_rms_norm_fp8", ", Tensor scale", _norm_fp8, _shapes_fp8),
):
    _library.define(f"{_name}(Tensor x, Tensor residual, Tensor weight{_more}, float eps) -> (Tensor, Tensor)")
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    _library.impl(_name, _fake, "Meta")
