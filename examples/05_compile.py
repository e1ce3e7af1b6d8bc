"""Compile a tensor-parallel layer by torch.compile: one graph, the bits of eager code.

    python examples/05_compile.py
    torchrun --nproc-per-node 2 examples/05_compile.py

The method of the communicator is called as anywhere else. With a C++ compiler at hand the model is compiled by
Inductor, otherwise traced only.
"""

import shutil

import torch
import torch.distributed as dist
from torch import nn

import shotcast


class Mlp(nn.Module):
    """Two linear layers over all ranks: the first divided by columns, the second by rows."""

    def __init__(self, comm: shotcast.Communicator, hidden: int):
        super().__init__()
        self.comm = comm
        torch.manual_seed(0)  # the same weights on all ranks, of which each keeps its part
        up, down = torch.randn(hidden, 4 * hidden), torch.randn(4 * hidden, hidden)
        self.up = nn.Parameter(up.chunk(comm.world_size, 1)[comm.rank].contiguous().to(comm.device))
        self.down = nn.Parameter(down.chunk(comm.world_size)[comm.rank].contiguous().to(comm.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.comm.all_reduce((x @ self.up).relu() @ self.down)


def work() -> str:
    with shotcast.Communicator() as comm:
        model = Mlp(comm, 32)
        compiled = torch.compile(model, fullgraph=True, backend="inductor" if shutil.which("g++") else "aot_eager")
        x = torch.ones(4, 32, device=comm.device)
        y, z = model(x), compiled(x)
        grads = torch.autograd.grad(y.sum(), model.parameters()), torch.autograd.grad(z.sum(), model.parameters())
        same_gradients = all(torch.equal(eager, graph) for eager, graph in zip(*grads, strict=True))
        return f"rank {comm.rank}: the same results: {torch.equal(y, z)}, the same gradients: {same_gradients}"


if __name__ == "__main__":
    # torchrun starts a process for each rank; without it, this process starts them
    for line in [work()] if dist.is_torchelastic_launched() else shotcast.spawn(work, 2):
        print(line)
