"""Calls of each implementation on fixed tensors, in the form that the harness times.

PyTorch's kernels only work on symmetric memory, so the call includes a copy into it, since callers have ordinary
tensors. PyTorch's multicast operations are not measured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shotcast.bench import implementations
from shotcast.bench.operations import OPERATIONS, ROOT
from shotcast.collectives.reductions import OF_TORCH

NCCL_FAVOURABLE = {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_GRAPH_REGISTER": "1"}
"""Environment variables set on all ranks for NCCL.

By default NCCL guards against capture of one communicator in several graphs at once. No benchmark does that, and the
guard raised the time of 8 KiB from 8.4 to 33 us with 250 calls a graph (4 H200, NCCL 2.28.9). NCCL also maps the
tensors of captured calls by default; we switch that off elsewhere (``collectives/vendor/nccl_library.py``).
"""


def supports(name: str, dtype: torch.dtype, nbytes: int, world_size: int, reduction: str) -> bool:
    """Return whether a baseline supports tensors of this dtype and size."""
    if implementations.is_torch(name):
        # PyTorch's kernels move 16 bytes at a time and have no float16 form.
        return reduction == "sum" and dtype in (torch.float32, torch.bfloat16) and nbytes % (16 * world_size) == 0
    if name == "gloo" and (reduction == "avg" or (dtype == torch.bfloat16 and reduction != "sum")):
        return False
    return dtype not in (torch.int16, torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, slots=True)
class BenchCall:
    """One collective call on fixed tensors."""

    name: str
    run: Callable[[], Any]  # makes the call; on CUDA it enqueues the call, and can be captured
    source: torch.Tensor  # the tensor that the call reads, and that work between calls writes
    # the tensors that hold the results, or that the call may write although this rank gets no result
    results: tuple[torch.Tensor, ...]
    # puts the input in place before a call whose result is compared, if calls destroy it, as
    # ``torch.distributed.all_reduce`` does; None if they do not
    load: Callable[[], Any] | None = None
    # returns the values to compare with the reference, by name; None for ``sum``, the only result
    values: Callable[[], Mapping[str, torch.Tensor]] | None = None

    @property
    def output(self) -> Mapping[str, torch.Tensor]:
        """The current values of the results, by name."""
        return {"sum": self.results[0]} if self.values is None else self.values()

    def wipe(self) -> None:
        """Overwrite the results with values that cannot pass for correct ones."""
        for result in self.results:
            if result.dtype.itemsize == 1:
                result.view(torch.uint8).fill_(0x7F)  # NaN, as float8_e4m3fn
            elif result.is_floating_point():
                result.fill_(float("nan"))
            else:
                result.fill_(torch.iinfo(result.dtype).max)


def own_call(name: str, op: str, comm: Any, x: torch.Tensor, out: torch.Tensor, reduction: str = "sum") -> BenchCall:
    """Build a call of algorithm ``name`` of ``comm``, on ordinary tensors, out of place."""
    method, operation = getattr(comm, op), OPERATIONS[op]
    given: dict[str, Any] = {"root": ROOT} if operation.rooted else {}
    if operation.reduces:
        given["reduction"] = reduction
    if op == "broadcast":
        held = torch.empty_like(x)
        run = functools.partial(method, held, algorithm=name, **given)
        return _broadcast(name, run, comm.rank, x, held)
    call = BenchCall(name, lambda: method(x, out=out, algorithm=name, **given), x, (out,))
    return _without_result(call) if operation.to_root and comm.rank != ROOT else call


def library_call(
    name: str, op: str, group: dist.ProcessGroup, x: torch.Tensor, out: torch.Tensor, reduction: str = "sum"
) -> BenchCall:
    """Build a Gloo or NCCL call through ``torch.distributed``; in-place calls work on a copy of ``x``."""
    of_torch = next(getattr(dist.ReduceOp, kind) for kind, name in OF_TORCH.items() if name == reduction)
    rank = group.rank()
    # PyTorch 2.13 renamed both functions, and the old names warn.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    held = torch.empty_like(x) if op in ("all_reduce", "broadcast", "reduce") else x
    parts = list(out.chunk(group.size())) if op == "gather" and rank == ROOT else None
    given = list(x.chunk(group.size())) if op == "scatter" and rank == ROOT else None
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(held, of_torch, group=group),
        "reduce_scatter": lambda: reduce_scatter(out, x, of_torch, group=group),
        "all_gather": lambda: all_gather(out, x, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
        "broadcast": lambda: dist.broadcast(held, ROOT, group=group),
        "reduce": lambda: dist.reduce(held, ROOT, of_torch, group=group),
        "gather": lambda: dist.gather(x, parts, ROOT, group=group),
        "scatter": lambda: dist.scatter(out, given, ROOT, group=group),
    }
    run, operation = calls[op], OPERATIONS[op]
    if op == "broadcast":
        return _broadcast(name, run, rank, x, held)
    in_place = held is not x
    call = BenchCall(name, run, held, (held if in_place else out,), (lambda: held.copy_(x)) if in_place else None)
    return _without_result(call) if operation.to_root and rank != ROOT else call


def _broadcast(name: str, run: Callable[[], Any], rank: int, x: torch.Tensor, held: torch.Tensor) -> BenchCall:
    """Build a broadcast of ``held``, which the root loads from ``x``."""
    call = BenchCall(name, run, held, (held,))
    return dataclasses.replace(call, load=(lambda: held.copy_(x)) if rank == ROOT else call.wipe)


def _without_result(call: BenchCall) -> BenchCall:
    return dataclasses.replace(call, values=dict)


class SymmetricMemoryOps:
    """PyTorch's all-reduce kernels on its symmetric memory; one buffer for all sizes. Collective to construct."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int, dtype: torch.dtype, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        self._group_name = group.group_name
        self._buffer = symmetric_memory.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
        self._handle = symmetric_memory.rendezvous(self._buffer, self._group_name)

    def call(self, name: str, x: torch.Tensor, out: torch.Tensor) -> BenchCall:
        buffer, group_name, ops = self._buffer[: x.numel()], self._group_name, torch.ops.symm_mem
        if name == "torch_one_shot":
            run = functools.partial(ops.one_shot_all_reduce_copy_out, buffer, x, "sum", group_name, out)
            return BenchCall(name, run, x, (out,))

        def two_shot() -> None:
            buffer.copy_(x)
            ops.two_shot_all_reduce_out(buffer, "sum", group_name, out)

        return BenchCall(name, two_shot, x, (out,))
