"""A tensor-parallel layer under torch.compile: one graph, the bits of eager code.

    python examples/05_compile.py

The method of the communicator is called as anywhere else. With a C++ compiler at hand the model is compiled by
Inductor, otherwise traced only.
"""

import shutil

import torch
from torch import nn

import shotcast


class Mlp(nn.Module):
    """Two linear layers over all ranks: the first cut by columns, the second by rows."""

    def __init__(self, comm: shotcast.Communicator, hidden: int):
        super().__init__()
        self.comm = comm
        torch.manual_seed(0)  # the same weights on all ranks, of which each keeps its part
        self.up = nn.Parameter(torch.randn(hidden, 4 * hidden).chunk(comm.world_size, 1)[comm.rank].contiguous())
        self.down = nn.Parameter(torch.randn(4 * hidden, hidden).chunk(comm.world_size)[comm.rank].contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.comm.all_reduce((x @ self.up).relu() @ self.down)


def work() -> tuple[bool, bool]:
    """Whether results, and whether gradients, are equal bit by bit."""
    with shotcast.Communicator(device="cpu") as comm:
        model = Mlp(comm, 32)
        compiled = torch.compile(model, fullgraph=True, backend="inductor" if shutil.which("g++") else "aot_eager")
        x = torch.ones(4, 32)
        y, z = model(x), compiled(x)
        grads = torch.autograd.grad(y.sum(), model.parameters()), torch.autograd.grad(z.sum(), model.parameters())
        return torch.equal(y, z), all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


if __name__ == "__main__":
    for rank, (results, gradients) in enumerate(shotcast.spawn(work, 2)):
        print(f"rank {rank}: the same results: {results}, the same gradients: {gradients}")
