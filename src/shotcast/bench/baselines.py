"""What the own algorithms are compared with, bound to tensors so that the harness can call and time any of them alike.

CPU: Gloo. CUDA: NCCL as it chooses (``nccl``), NCCL held to its ring or tree (``nccl_ring``, ``nccl_tree``), and the
kernels that PyTorch builds on symmetric memory (``torch_one_shot``, ``torch_two_shot``). The latter work on symmetric
memory alone, so the copy into it is part of the call: callers have ordinary tensors. Multicast operations are not
among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shotcast import wire

NCCL_ALGO = {"nccl_ring": "Ring", "nccl_tree": "Tree"}
"""NCCL reads its variable NCCL_ALGO when a communicator starts, so each of these has ranks of its own."""

NCCL_FAVOURABLE = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
"""Set for all ranks: by default NCCL guards against one communicator in several graphs at once, which no benchmark has,
and which took it from 8.4 to 33 us for 8 KiB with 250 calls a graph (4 H200, NCCL 2.28.9)."""


def names(op: str, device: str) -> tuple[str, ...]:
    """Baselines there are for an operation."""
    if device == "cpu":
        return ("gloo",)
    if op == "all_reduce":
        return ("nccl", "nccl_ring", "nccl_tree", "torch_one_shot", "torch_two_shot")
    return ("nccl", "nccl_ring")  # NCCL has no tree for these


def serves(name: str, dtype: str, nbytes: int, world_size: int) -> bool:
    """False where a baseline does not take such a tensor."""
    if name.startswith("torch_"):
        # PyTorch's kernels move 16 bytes at a time and have no float16 form.
        return dtype in ("float32", "bfloat16") and nbytes % (16 * world_size) == 0
    return True


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call on fixed tensors.

    Attributes:
        run: makes the call; for CUDA it enqueues and can be captured.
        load: puts the input in place. Needed again before each call whose result counts when ``overwrites`` is set.
        result: where the call leaves its result.
        overwrites: the call destroys its input, as ``torch.distributed.all_reduce`` does.
    """

    name: str
    run: Callable[[], Any]
    load: Callable[[], Any]
    result: torch.Tensor
    overwrites: bool = False


def _nothing() -> None:
    pass


def own(name: str, op: str, comm: Any, x: torch.Tensor, out: torch.Tensor) -> Call:
    """A call of ``comm`` with the algorithm ``name``; ordinary tensors, out of place."""
    method = getattr(comm, op)
    return Call(name, lambda: method(x, out=out, algorithm=name), _nothing, out)


def library(name: str, op: str, group: dist.ProcessGroup, x: torch.Tensor, out: torch.Tensor) -> Call:
    """A call of Gloo or NCCL through ``torch.distributed``."""
    if op == "all_reduce":
        held = torch.empty_like(x)
        return Call(name, lambda: dist.all_reduce(held, group=group), lambda: held.copy_(x), held, overwrites=True)
    if op == "reduce_scatter":
        # PyTorch 2.13 renamed both, and the old names warn.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return Call(name, lambda: reduce_scatter(out, x, group=group), _nothing, out)
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Call(name, lambda: all_gather(out, x, group=group), _nothing, out)


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
                name, lambda: ops.one_shot_all_reduce_copy_out(buffer, x, "sum", group_name, out), _nothing, out
            )

        def two_shot() -> None:
            buffer.copy_(x)
            ops.two_shot_all_reduce_out(buffer, "sum", group_name, out)

        return Call(name, two_shot, _nothing, out)


def is_own(name: str) -> bool:
    return name in (*wire.ALGORITHMS, "auto")
