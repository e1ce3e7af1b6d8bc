"""Functions that ranks run for the tests of tensors that PyTorch asks the backend for."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shotcast.process_group as process_group
from shotcast.memory.block_heap import BlockHeap
from shotcast.memory.mapped_heap import MappedHeap

STEPS = 4


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def in_heap(group: Any, x: torch.Tensor) -> bool:
    executor = group._on_cpu.comm._executor
    begin, heap = executor._regions[dist.get_rank()], executor._heap
    return bool(begin + heap.start <= x.data_ptr() < begin + heap.end)


def asked_for() -> None:
    """Ask the backend for tensors as PyTorch does, before and after the first call."""
    dist.init_process_group("shotcast")
    try:
        group, cpu = dist.group.WORLD, torch.device("cpu")
        assert group is not None
        backend: Any = group._get_backend(cpu)
        assert backend.supports_tensor_alloc(cpu)
        assert not backend.supports_tensor_alloc(torch.device("cuda", 0))
        early = backend.allocate_tensor(40_000, dtype=torch.float32, device=cpu)
        dist.all_reduce(early.fill_(1))
        late = backend.allocate_tensor(40_000, dtype=torch.bfloat16, device=cpu)
        assert (late.shape, late.dtype, late.device) == ((40_000,), torch.bfloat16, cpu)
        assert not in_heap(group, early)
        assert in_heap(group, late)
        ranks = dist.get_world_size()
        dist.all_reduce(late.fill_(1))
        assert late.eq(ranks).all()
        assert early.eq(ranks).all()
        if dist.get_rank() == 0:  # a rank alone may ask: it is no call
            backend.allocate_tensor(7, dtype=torch.int64, device=cpu)
        dist.barrier()
        part = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            dist.all_reduce(late.fill_(1), group=part)
            assert late.eq(2).all()
    finally:
        dist.destroy_process_group()


def fsdp2(
    from_backend: bool, backend: str = "shotcast", prefetch: bool = False, device: str = "cpu"
) -> tuple[list[str], int, bool]:
    """Train by FSDP2; return digests of the parameters, how many mapped tensors it took, and whether all were own."""
    made = 0
    kind: Any = MappedHeap if device == "cpu" else BlockHeap
    empty = kind.empty

    def counted(heap: Any, *arguments: Any) -> torch.Tensor | None:
        nonlocal made
        made += 1
        tensor: torch.Tensor | None = empty(heap, *arguments)
        return tensor

    kind.empty = counted
    dist.init_process_group(backend)
    try:
        torch.manual_seed(0)
        if device == "cuda":
            torch.cuda.set_device(dist.get_rank())
        model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3)), nn.Linear(200, 7)).to(device)
        parts = [fully_shard(part) for part in model]
        fully_shard(model)
        if from_backend:
            for part in parts:
                part.set_allocate_memory_from_process_group_for_comm(True)
        if prefetch:
            for part, behind in itertools.pairwise(parts):
                part.set_modules_to_forward_prefetch([behind])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(8, 200, generator=generator).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        counts = process_group.counts() if backend == "shotcast" else {}
        ways = {way for op in ("all_gather", "reduce_scatter") for way in counts.get(op, {})}
        return [digest(p.full_tensor()) for p in model.parameters()], made, ways == {"own"}  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
        kind.empty = empty
