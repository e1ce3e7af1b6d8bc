"""Functions that ranks of tests/bench/test_training.py run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import training
import training_forms
from torch.nn.parallel import DistributedDataParallel
from training_model import Divided, Model, shape_of

import shotcast


def of_whole_and_of_parts() -> tuple[float, float]:
    """Return how far output and gradients of divided layers are off those of the whole layers, in float64."""
    torch.set_num_threads(1)
    with shotcast.Communicator(device="cpu") as comm:
        shape = shape_of("tiny", 2, 16, 8, comm.world_size)
        x = torch.randn(shape.tokens, shape.hidden, generator=torch.Generator().manual_seed(1)).double()

        def begin(x: torch.Tensor) -> Any:
            x.copy_(torch.stack([one.view(x.shape) for one in training_forms.of_all(comm, x)]).sum(0))
            return lambda: None

        def part(by_columns: bool) -> Any:
            return lambda linear: Divided(linear, comm.rank, comm.world_size, by_columns, begin)

        whole = Model(shape, torch.float64, comm.device)
        parts = Model(shape, torch.float64, comm.device, part(True), part(False))
        outputs = [model(x) for model in (whole, parts)]
        for out in outputs:
            out.square().mean().backward()
        mine = []
        for name, parameter in whole.named_parameters():
            gradient = parameter.grad
            kind = name.split(".")[1]
            if kind in ("qkv", "gate_up", "o", "down"):
                gradient = gradient.chunk(comm.world_size, 0 if kind in ("qkv", "gate_up") else 1)[comm.rank]
            mine.append(gradient)
        output = training_forms.distance([outputs[1].detach()], [outputs[0].detach()])
        return output, training_forms.distance(training_forms.gradients(parts), mine)


def not_averaged(setting: training.Setting) -> list[training.Row]:
    """Measure with one gradient of one rank changed, in DDP over the backend."""
    exact = training_forms.gradients

    def wrong(model: Any) -> list[torch.Tensor]:
        found = exact(model)
        own = isinstance(model, DistributedDataParallel) and dist.get_backend(model.process_group) == "shotcast"
        if own and dist.get_rank() == 1:
            found[0] += 1e-3
        return found

    training_forms.gradients = wrong
    return training.rows(setting)
