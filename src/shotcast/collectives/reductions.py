"""Reductions by name and by PyTorch's enum, and the dtypes for which each is defined."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shotcast import wire
from shotcast.errors import ConfigError, UnsupportedError

Reduction = str | dist.ReduceOp | dist.ReduceOp.RedOpType
"""A name from :data:`shotcast.wire.REDUCTIONS`, or PyTorch's constant for it."""

OF_TORCH = {"PRODUCT" if name == "prod" else name.upper(): name for name in wire.REDUCTIONS}
"""Reductions by PyTorch's names, which Dynamo of PyTorch 2.11 can hash, unlike the constants."""
_AVERAGED_INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
"""Integer dtypes that PyTorch divides."""


def reduction_name(reduction: Reduction, call: str) -> str:
    """Return the name of a reduction. Raises ConfigError for an unknown name or constant."""
    if isinstance(reduction, str):
        if reduction in wire.REDUCTIONS:
            return reduction
    elif isinstance(reduction, dist.ReduceOp | dist.ReduceOp.RedOpType):
        kind: Any = reduction
        if not isinstance(reduction, dist.ReduceOp.RedOpType):
            kind = next(one for one in dist.ReduceOp.RedOpType.__members__.values() if kind == one)
        if kind.name in OF_TORCH:
            return OF_TORCH[kind.name]
        if kind.name == "PREMUL_SUM":
            raise ConfigError(f"{call}: ReduceOp.PREMUL_SUM is not served; multiply x by the factor, and take the sum")
    known = f"{', '.join(wire.REDUCTIONS)}, and those of torch.distributed.ReduceOp"
    raise ConfigError(f"{call}: unknown reduction {reduction!r}; there are {known}")


def check_reduction(dtype: str, reduction: str, begin: str = "") -> None:
    """Raise UnsupportedError, with a message that starts with ``begin``, unless a reduction is defined for a dtype."""
    floats = dtype not in (*wire.INTEGERS, "bool")
    if reduction == "avg" and not floats and not is_divided(dtype, reduction):
        integers = ", ".join(_AVERAGED_INTEGERS)
        raise UnsupportedError(f"{begin}avg takes floating-point tensors and {integers}, not {dtype}")
    if reduction in ("band", "bor", "bxor") and floats:
        raise UnsupportedError(f"{begin}{reduction} takes integers and bool, not {dtype}")


def is_divided(dtype: str, reduction: str) -> bool:
    """Return whether a reduction is a sum divided afterwards: the average of integers, as in NCCL."""
    return reduction == "avg" and dtype in _AVERAGED_INTEGERS


def divide(total: torch.Tensor, ranks: int) -> None:
    """Divide a sum of integers by the number of ranks, rounding toward zero."""
    total.div_(ranks, rounding_mode="trunc")
