"""Training of one small model divided in several ways between four ranks, and by one process alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from group_targets import backend
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, LAYERS, BATCH, STEPS, RATE = 16, 4, 8, 4, 0.5
MICROBATCHES = 4

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""Trains on inputs and targets; returns the loss before that, or None where other ranks have it."""
Trained = tuple[list[float], dict[str, list[float]]]
"""The losses of the steps, and the parameters after them, of which a rank may have some."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def data(step: int, shards: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return the inputs and the targets of a step, in as many shards."""
    x, y = torch.randn(2, BATCH * 4, WIDTH, generator=torch.Generator().manual_seed(step))
    return x.chunk(shards), y.chunk(shards)


def numbers(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[float]]:
    whole = ((name, getattr(value, "full_tensor", lambda v=value: v)()) for name, value in named)
    return {name: value.detach().cpu().flatten().tolist() for name, value in whole}


def eager(model: nn.Module, foreach: bool | None = None) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=foreach)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def alone() -> Trained:
    """Train in this process, on all data."""
    model = blocks()
    step = eager(model)
    losses = [step(*(part[0] for part in data(number, 1))) for number in range(STEPS)]
    return [float(loss) for loss in losses if loss is not None], numbers(model.named_parameters())


def divided(how: str, name: str = "shotcast", device: str = "cpu") -> Trained:
    """Train as one of four ranks, by a backend; each device of this host has as many ranks as the others."""
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(place)
    with backend(120, name):
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("outer", "inner"))
        if how == "pipeline":
            return pipeline(mesh, place)
        model, shards, shard = blocks().to(place), 4, dist.get_rank()
        if how == "hsdp":
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif how == "fsdp2 with prefetch":
            prefetched(model, init_device_mesh(device, (4,)))
        else:
            assert how == "tensor and data parallel"
            shards, shard = 2, mesh.get_local_rank("outer")
            for block in model:
                parallelize_module(block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                fully_shard(block, mesh=mesh["outer"])
            fully_shard(model, mesh=mesh["outer"])
        losses, step = [], eager(model, foreach=True)
        for number in range(STEPS):
            loss = step(*(parts[shard].to(place) for parts in data(number, shards)))
            assert loss is not None
            dist.all_reduce(loss)
            losses.append(loss.item() / 4)
        return losses, numbers(model.named_parameters())


def prefetched(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Divide a model by FSDP2 whose blocks gather the parameters of those that come after them, twice at once."""
    parts: list[FSDPModule] = [fully_shard(block, mesh=mesh) for block in model]
    fully_shard(model, mesh=mesh)
    for at, part in enumerate(parts):
        part.set_modules_to_forward_prefetch(parts[at + 1 : at + 3])
        part.set_modules_to_backward_prefetch(parts[max(at - 2, 0) : at][::-1])


def pipeline(mesh: DeviceMesh, place: torch.device) -> Trained:
    """Train with a half of the blocks, whose messages pass beside sums of the ranks with the same half."""
    stage_at, shard = mesh.get_local_rank("inner"), mesh.get_local_rank("outer")
    stages, peers = mesh["inner"].get_group(), mesh["outer"].get_group()
    first = stage_at * LAYERS // 2
    part = blocks()[first : first + LAYERS // 2].to(place)  # with the names of the whole
    stage = PipelineStage(part, stage_at, 2, place, group=stages)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=RATE)
    losses = []
    for number in range(STEPS):
        x, y = (parts[shard].to(place) for parts in data(number, 2))
        optimizer.zero_grad()
        beside = torch.full([1 << 18], float(shard + 1), device=place)
        going = dist.all_reduce(beside, group=peers, async_op=True)
        microlosses: list[torch.Tensor] = []
        if stage_at == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=microlosses)
        assert going is not None
        going.wait()
        assert bool((beside == 3).all())
        gradients = [parameter.grad for parameter in part.parameters()]
        assert None not in gradients
        for work in [dist.all_reduce(one, group=peers, async_op=True) for one in gradients if one is not None]:
            assert work is not None
            work.wait()
        torch._foreach_div_(gradients, 2)
        optimizer.step()
        loss = torch.stack(microlosses).mean() if microlosses else torch.zeros((), device=place)
        dist.all_reduce(loss)
        losses.append(loss.item() / 2)
    return losses, numbers(part.named_parameters())
