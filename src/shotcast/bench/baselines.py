"""What is measured, bound to tensors so that the harness can call and time any contender alike.

PyTorch's kernels work on symmetric memory alone, so the copy into it is part of the call: callers have ordinary
tensors. Its multicast operations are not among them. ``nccl_symmetric`` is NCCL at its best, in place on memory
registered with it, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from shotcast.bench import contenders

NCCL_FAVOURABLE = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
"""Set for all ranks: by default NCCL guards against one communicator in several graphs at once, which no benchmark has,
and which took it from 8.4 to 33 us for 8 KiB with 250 calls a graph (4 H200, NCCL 2.28.9)."""


def serves(name: str, dtype: str, nbytes: int, world_size: int) -> bool:
    """False where a baseline does not take such a tensor."""
    if contenders.is_torch(name):
        # PyTorch's kernels move 16 bytes at a time and have no float16 form.
        return dtype in ("float32", "bfloat16") and nbytes % (16 * world_size) == 0
    return True


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call on fixed tensors.

    Attributes:
        run: makes the call; for CUDA it enqueues and can be captured.
        load: puts the input in place. Needed again before each call whose result counts when ``overwrites`` is set.
        source: the tensor the call reads; what work between calls writes to.
        results: where the call leaves its results.
        overwrites: the call destroys its input, as ``torch.distributed.all_reduce`` does.
        values: what is compared with the reference, by name, read from the results; empty for ``sum``, the one result.
    """

    name: str
    run: Callable[[], Any]
    load: Callable[[], Any]
    source: torch.Tensor
    results: tuple[torch.Tensor, ...]
    overwrites: bool = False
    values: Callable[[], Mapping[str, torch.Tensor]] | None = None

    @property
    def output(self) -> Mapping[str, torch.Tensor]:
        """What the results say now, by name."""
        return {"sum": self.results[0]} if self.values is None else self.values()

    def wipe(self) -> None:
        """Leave nothing in the results that could pass for one."""
        for result in self.results:
            if result.dtype.itemsize == 1:
                result.view(torch.uint8).fill_(0x7F)  # NaN, as float8_e4m3fn
            else:
                result.fill_(float("nan"))


def nothing() -> None:
    pass


def own(name: str, op: str, comm: Any, x: torch.Tensor, out: torch.Tensor) -> Call:
    """A call of ``comm`` with the algorithm ``name``; ordinary tensors, out of place."""
    method = getattr(comm, op)
    return Call(name, lambda: method(x, out=out, algorithm=name), nothing, x, (out,))


def library(name: str, op: str, group: dist.ProcessGroup, x: torch.Tensor, out: torch.Tensor) -> Call:
    """A call of Gloo or NCCL through ``torch.distributed``; the all-reduce is in place, on a tensor like ``out``."""
    if op == "all_reduce":
        return in_place(name, group, x, torch.empty_like(x))
    if op == "reduce_scatter":
        # PyTorch 2.13 renamed both, and the old names warn.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return Call(name, lambda: reduce_scatter(out, x, group=group), nothing, x, (out,))
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Call(name, lambda: all_gather(out, x, group=group), nothing, x, (out,))


def in_place(name: str, group: dist.ProcessGroup, x: torch.Tensor, held: torch.Tensor) -> Call:
    """Gloo's or NCCL's all-reduce of ``held``, which is loaded from ``x``."""
    return Call(name, lambda: dist.all_reduce(held, group=group), lambda: held.copy_(x), held, (held,), overwrites=True)


class SymmetricMemoryOps:
    """PyTorch's all-reduce kernels over its symmetric memory; one buffer for all sizes. Collective to construct."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int, dtype: torch.dtype, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        self._group_name = group.group_name
        self._buffer = symmetric_memory.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
        self._handle = symmetric_memory.rendezvous(self._buffer, self._group_name)

    def call(self, name: str, x: torch.Tensor, out: torch.Tensor) -> Call:
        buffer, group_name, ops = self._buffer[: x.numel()], self._group_name, torch.ops.symm_mem
        if name == "torch_one_shot":
            return Call(
                name, lambda: ops.one_shot_all_reduce_copy_out(buffer, x, "sum", group_name, out), nothing, x, (out,)
            )

        def two_shot() -> None:
            buffer.copy_(x)
            ops.two_shot_all_reduce_out(buffer, "sum", group_name, out)

        return Call(name, two_shot, nothing, x, (out,))


class NcclMemory:
    """Memory that NCCL gave and all ranks registered as one window, where its symmetric kernels work; for all sizes.

    Collective to construct and to close. NCCL falls back to its other kernels, silently, where it has none.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, dtype: torch.dtype, device: torch.device):
        self._group = group
        self._backend = cast(Any, group._get_backend(device))
        # registration needs NCCL's communicator, which the first call makes
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._buffer = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        self._backend.register_mem_pool(self._pool, symm=True)

    def call(self, name: str, x: torch.Tensor) -> Call:
        return in_place(name, self._group, x, self._buffer[: x.numel()].view(x.shape))

    def close(self) -> None:
        self._backend.deregister_mem_pool(self._pool)
