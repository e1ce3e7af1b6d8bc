"""Linear layers of vLLM's batch-invariant mode, on our kernels. Importing it needs vLLM.

vLLM computes them by one tile of 128 rows, however few rows there are. Ours read the weights once at full speed
(:mod:`shotcast.kernels.triton.batch_invariant_gemm`).
"""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any

import torch
from vllm.model_executor.layers import batch_invariant

from shotcast.kernels.triton import batch_invariant_gemm

logger = logging.getLogger(__name__)

NAME = "linear_batch_invariant"
USERS = "vllm.model_executor.layers.linear", "vllm.model_executor.layers.vocab_parallel_embedding"
"""The modules that have vLLM's function under its name, each of which calls it for its layers."""

_own: Any = getattr(batch_invariant, NAME, None)
_invariant: dict[tuple[Any, ...], bool] = {}
"""By sides, dtype and bias of a layer, whether our kernel had the same bits for every number of rows."""


def linear_batch_invariant(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``input @ weight.T + bias``, rounded once, where vLLM's function of this name rounds before the bias."""
    return torch.ops.shotcast_vllm_linear.batch_invariant(input, weight, bias)


def _serves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    if not batch_invariant_gemm.serves(x, weight):
        return False
    key = (*weight.shape, weight.dtype, bias is not None)
    if key not in _invariant:
        if torch.cuda.is_current_stream_capturing():
            return False
        _invariant[key] = not batch_invariant_gemm.differs(weight, bias)
        if not _invariant[key]:
            logger.warning("vLLM computes layers of %s: bits of our kernel depend on the batch here", key)
    return _invariant[key]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not _serves(x, weight, bias):
        return _own(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return batch_invariant_gemm.linear(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


def _shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def install() -> None:
    """Give vLLM's layers our function. Raises ImportError if vLLM's is not what this was written for."""
    if _own is None or list(inspect.signature(_own).parameters) != ["input", "weight", "bias"]:
        raise ImportError(f"{batch_invariant.__name__} has no {NAME}(input, weight, bias)")
    modules = [importlib.import_module(name) for name in USERS]
    for module in modules:
        if not hasattr(module, NAME):
            raise ImportError(f"{module.__name__} has no {NAME}")
    for module in modules:
        setattr(module, NAME, linear_batch_invariant)


_library = torch.library.Library("shotcast_vllm_linear", "DEF")
"""The operator, which is opaque to compilers."""
_library.define("batch_invariant(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("batch_invariant", _linear, "CompositeExplicitAutograd")
_library.impl("batch_invariant", _shape, "Meta")
