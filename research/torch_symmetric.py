"""PyTorch's own overlap, which is not public or may change: the only file here that calls it.

PyTorch 2.11 to 2.13 have these operators. On GPUs that share no memory they raise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory as symmetric_memory

GATHER_MATMUL, MATMUL_SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


def enable(group: dist.ProcessGroup) -> str:
    """Let the compiler fuse with messages of ``group``, and return its name."""
    name = str(group.group_name)
    if hasattr(symmetric_memory, "enable_symm_mem_for_group"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, but the compiler's pass asks for it
            symmetric_memory.enable_symm_mem_for_group(name)  # type: ignore[arg-type]
    return name


def allocator(group: dist.ProcessGroup, device: torch.device) -> Callable[[int, torch.dtype], torch.Tensor]:
    """Return a function that allocates memory which all ranks map; each call is collective."""

    def allocate(count: int, dtype: torch.dtype) -> torch.Tensor:
        found = symmetric_memory.empty(count, dtype=dtype, device=device)
        symmetric_memory.rendezvous(found, group)
        return found

    return allocate


def use_memory_of_nccl() -> None:
    """Let NCCL allocate symmetric memory, and register it as windows. None may have been allocated before."""
    symmetric_memory.set_backend("NCCL")


def low_contention_all_gather(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Begin to gather ``x`` of all ranks by copies; :func:`wait` waits."""
    found: torch.Tensor = torch.ops.symm_mem._low_contention_all_gather(x, group_name)
    return found


def low_contention_reduce_scatter(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Begin to average parts of ``x`` by copies and one sum; :func:`wait` waits."""
    found: torch.Tensor = torch.ops.symm_mem._low_contention_reduce_scatter(x, "avg", group_name)
    return found


def wait(x: torch.Tensor) -> torch.Tensor:
    """Let the current stream wait for the operation that makes ``x``."""
    found: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return found


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, group_name: str) -> torch.Tensor:
    """Multiply, and sum each rank's rows there."""
    found: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group_name)
    return found


def all_gather_matmul(a: torch.Tensor, b: torch.Tensor, group_name: str) -> torch.Tensor:
    """Gather the rows of all ranks, and multiply them."""
    found: torch.Tensor = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group_name, return_A=False)[1][0]
    return found


def async_tensor_parallel(gathers_first: bool, group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """Return a compiled product with its message, which the compiler's pass for tensor parallelism may fuse."""

    def gather_multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(a, 0, group) @ b

    def multiply_scatter(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter_tensor(a @ b, "sum", 0, group)

    compiled = torch.compile(gather_multiply if gathers_first else multiply_scatter, fullgraph=True)

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with _micro_pipeline():
            found = compiled(a, b)
        return wait(found) if isinstance(found, functional.AsyncCollectiveTensor) else found

    return run


def _micro_pipeline() -> Any:
    import torch._inductor.config as inductor

    return inductor.patch(_micro_pipeline_tp=True)


def operators_seen(run: Callable[[], Any]) -> set[str]:
    """Return the names of operators and of regions that PyTorch's profiler sees while ``run`` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.key for event in profile.key_averages()}
