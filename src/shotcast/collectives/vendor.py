"""The vendor library, which serves what no own kernel serves: PyTorch's NCCL for GPUs, Gloo for CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shotcast import wire
from shotcast.errors import ShotcastError, UnsupportedError
from shotcast.wire import CallPlan, Op

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}

# The texts by which Gloo reports a lost peer; it has no error class for that.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")


class Vendor:
    """Calls on a process group, with the ranks in the communicator's order.

    Args:
        group: the process group.
        order: for each rank of the communicator, its rank in the group.
    """

    def __init__(self, group: dist.ProcessGroup, order: Sequence[int]):
        self._group = group
        self._order = list(order)
        self._reordered = self._order != sorted(self._order)

    def run(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None, reduction: str) -> None:
        """Make the call; the arguments are those of :meth:`TritonExecutor.run`.

        Raises:
            UnsupportedError: the library cannot serve the call.
            ShotcastError: the library lost a rank during the call.
        """
        try:
            with torch.no_grad():  # otherwise out would carry the gradient of a copy
                self._run(plan, x, out, reduction)
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, dist.DistError) and not isinstance(error, dist.DistBackendError):
                raise
            library, call = dist.get_backend(self._group), f"{plan.op.label}({reduction}) of {plan.dtype}"
            if any(text in str(error) for text in _LOST):
                raise ShotcastError(f"{library} lost a rank during {call}: {error}") from error
            raise UnsupportedError(f"neither own kernels nor {library} served {call}: {error}") from error

    def _run(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None, reduction: str) -> None:
        group, world_size = self._group, len(self._order)
        if plan.dtype == "bool" and reduction == "sum":
            reduction = "max"  # Gloo adds the bytes, and True + True is not a bool; NCCL takes the maximum as well
        if plan.op is Op.BARRIER:
            dist.barrier(group)
            return
        scale = 1
        if plan.op not in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
            # data that is only moved is sent as bytes, as the libraries know few dtypes
            scale = wire.DTYPES[plan.dtype]
            x = None if x is None else x.view(-1).view(torch.uint8)
            out = None if out is None else out.view(-1).view(torch.uint8)
        if plan.op is Op.SEND:
            assert x is not None
            dist.send(x, group=group, group_dst=self._order[plan.root])
            return
        assert out is not None
        if plan.op is Op.RECV:
            dist.recv(out, group=group, group_src=self._order[plan.root])
            return
        assert x is not None
        if plan.op is Op.ALL_REDUCE:
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            dist.all_reduce(out, REDUCTIONS[reduction], group)
        elif plan.op is Op.BROADCAST:
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            dist.broadcast(out, group=group, group_src=self._order[plan.root])
        elif plan.op is Op.REDUCE_SCATTER:
            parts = [x.view(world_size, -1)[r] for r in self._by_group_rank()]
            dist.reduce_scatter(out.view(-1), [part.contiguous() for part in parts], REDUCTIONS[reduction], group)
        elif plan.op is Op.ALL_GATHER:
            sizes = [size * scale for size in plan.sizes] or [out.numel() // world_size] * world_size
            ends = [sum(sizes[: r + 1]) for r in range(world_size)]
            flat, widest = out.view(-1), max(sizes)
            padded = x.view(-1)
            if padded.numel() < widest:
                padded = torch.cat([padded, padded.new_zeros(widest - padded.numel())])
            parts = [flat.new_empty(widest) for _ in range(world_size)]
            dist.all_gather(parts, padded, group)
            for r, end in enumerate(ends):
                flat[end - sizes[r] : end].copy_(parts[self._order[r]][: sizes[r]])
        else:
            assert plan.op is Op.ALL_TO_ALL
            sent = x.view(world_size, -1)[self._by_group_rank()] if self._reordered else x.view(world_size, -1)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received.view(-1), sent.contiguous().view(-1), group=group)
            out.view(world_size, -1).copy_(received[self._order] if self._reordered else received)

    def _by_group_rank(self) -> list[int]:
        """Return the communicator rank of each group rank."""
        return [self._order.index(r) for r in range(len(self._order))]
