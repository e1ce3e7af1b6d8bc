"""A group of NCCL that notes what it is asked for, and tensors for it, on machines without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class FakeNccl:
    """Notes calls in ``calls``; the ``fails_at``-th message raises. Synchronous calls have no work (PyTorch 2.8)."""

    def __init__(self, fails_at: int = -1):
        self.calls: list[Any] = []
        self._fails_at, self._messages = fails_at, 0

    def _message(self, op: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        assert len(tensors) == 1
        self.calls.append((op, peer, tag))
        self._messages += 1
        if self._messages - 1 == self._fails_at:
            raise RuntimeError("an error of the library")
        return self._work()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        assert len(tensors) == 1
        self.calls.append(("allreduce", opts.asyncOp))
        return self._work() if opts.asyncOp else None

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.calls.append(("allreduce_coalesced", opts.asyncOp))
        return self._work() if opts.asyncOp else None

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, opts: Any) -> Any:
        self.calls.append(("_reduce_scatter_base", opts.asyncOp))
        return self._work() if opts.asyncOp else None

    def part(self, name: str, rank: int, world_size: int) -> FakeNccl:
        """Make a group of some of the ranks: this one, which notes its name, this rank there and the size."""
        self.calls.append((name, rank, world_size))
        return self

    def _work(self) -> Any:
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: True, is_success=lambda: True)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._message("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._message("recv", tensors, peer, tag)

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> Any:
        self.calls.append("end")
        return self._work()

    def shutdown(self) -> None:
        """Do nothing."""


class _OnGpu(torch.Tensor):
    is_cpu, is_cuda = False, True
    device = torch.device("cuda")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def on_gpu(count: int = 2) -> torch.Tensor:
    """Return a tensor that says that it lies on a GPU."""
    return torch.zeros(count).as_subclass(_OnGpu)
