"""Implementations that ``shotcast bench`` does not measure, and families of implementations.

``nccl_symmetric`` is NCCL on registered memory, for sums by all-reduce; it is measured only on request.

A fused operation also has ``unfused`` (our all-reduce, then a kernel for residual and norm), ``plain`` (only our
all-reduce: the time above it is the cost of the fused part; ``plain_one_shot`` and ``plain_two_shot`` name its
algorithm), ``fp8_static`` and ``fp8_dynamic`` (the fused forms that quantize), and NCCL or Gloo followed by the same
kernel for residual and norm.
"""

from __future__ import annotations

from shotcast.bench import implementations
from shotcast.bench.operations import OPERATIONS

FUSED_OPS = ("all_reduce_rms_norm", "all_reduce_layer_norm")
OPS = (*OPERATIONS, *FUSED_OPS)
PLAIN = {"plain": "auto", "plain_one_shot": "one_shot", "plain_two_shot": "two_shot"}
"""Our all-reduce without the fused residual and norm, and its algorithm."""
FP8 = {"fp8_static": "static", "fp8_dynamic": "dynamic"}
FUSED = ("unfused", *PLAIN, *FP8)
NCCL_SYMMETRIC = "nccl_symmetric"


def plain_operation(op: str) -> str:
    """Return the plain operation that moves as much data as ``op``."""
    return op if op in OPERATIONS else "all_reduce"


def library_of(device: str) -> str:
    """Return the library that fused operations are measured beside."""
    return "gloo" if device == "cpu" else "nccl"


def default(op: str, device: str, nodes: int = 1) -> tuple[str, ...]:
    """Return the implementations measured by default, in report order."""
    if op not in FUSED_OPS:
        return implementations.default(op, device, nodes)
    return (*implementations.own_algorithms(op, nodes), *FUSED, library_of(device))


def known(op: str, device: str) -> tuple[str, ...]:
    """Return all names that can be requested for an operation."""
    if op not in FUSED_OPS:
        on_request = (NCCL_SYMMETRIC,) if (op, device) == ("all_reduce", "cuda") else ()
        return (*implementations.known(op, device), *on_request)
    of_nccl = [name for name in implementations.NCCL_SETTINGS if device == "cuda"]
    return tuple(dict.fromkeys((*default(op, device), *default(op, device, nodes=2), "vendor", *of_nccl)))


def is_own(name: str) -> bool:
    """Return whether the Communicator runs this implementation."""
    return implementations.is_own(name) or name in FUSED


def is_nccl(name: str) -> bool:
    return name == "nccl" or name.startswith("nccl_")


def is_library(name: str) -> bool:
    """Return whether this is Gloo or a variant of NCCL."""
    return is_nccl(name) or name == "gloo"
