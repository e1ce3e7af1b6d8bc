"""Arguments of kernels that reduce: which numbers, by which reduction, and through slots or flag cells."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from shotcast import wire
from shotcast.errors import UnsupportedError
from shotcast.transport.triton.binding import KernelContext
from shotcast.wire import CallPlan

_OF_PARTS = {"complex64": "float32", "complex128": "float64", "bool": "int1"}


def dtype_of(dtype: str) -> tl.dtype:
    """Return the dtype of the numbers that kernels reduce in tensors of ``dtype``."""
    number: tl.dtype = getattr(tl, _OF_PARTS.get(dtype, dtype))
    return number


def reduction_of(dtype: str, reduction: str) -> int:
    """Return the code of the reduction that kernels apply to these numbers."""
    return wire.REDUCTIONS.index(wire.OF_BOOL.get(reduction, reduction) if dtype == "bool" else reduction)


def reduction_arguments(plan: CallPlan, context: KernelContext) -> dict[str, Any]:
    """Return the arguments DTYPE, REDUCTION and CELLS of a kernel, and its slots, which are flag cells with CELLS.

    Floats of up to 32 bits go through sentinel slots. The words of other data can have any bits, so they go as flag
    cells. Raises UnsupportedError for a reduction that native kernels do not have.
    """
    if plan.reduction not in wire.REDUCED.get(plan.dtype, ()):
        raise UnsupportedError(f"kernels have no {plan.reduction} of {plan.dtype}")
    cells = plan.dtype not in wire.REDUCIBLE
    arguments = {"DTYPE": dtype_of(plan.dtype), "REDUCTION": reduction_of(plan.dtype, plan.reduction), "CELLS": cells}
    if cells:
        arguments |= {"slots_at": context.layout.cells_at, "slots_quads": context.layout.cells_quads}
    return arguments
