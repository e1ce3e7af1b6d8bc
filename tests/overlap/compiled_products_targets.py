"""Functions that the ranks of tests/overlap/test_compiled_products.py run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shotcast
from shotcast.collectives.communicator import Communicator
from shotcast.overlap import all_gather_matmul, lanes_of, matmul_all_reduce, matmul_reduce_scatter

ROWS, HIDDEN, INNER = 24, 16, 12


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Return numbers whose products and sums are exact, so that all ways have the same bits."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


class Block(nn.Module):
    """Gathered rows times columns, then times rows and summed: rows of this rank in and out, and a sum of all."""

    def __init__(self, comm: Communicator):
        super().__init__()
        self._comm = comm
        self.up = nn.Parameter(whole_numbers(HIDDEN, INNER, seed=10 + comm.rank))
        self.gate = nn.Parameter(whole_numbers(HIDDEN, INNER, seed=20 + comm.rank))
        self.down = nn.Parameter(whole_numbers(INNER, HIDDEN, seed=30 + comm.rank))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        done = all_gather_matmul(self._comm, x, [self.up, self.gate], return_gathered=True)
        up, gate = done.products
        inner = torch.clamp(up, -3, 3) * torch.clamp(gate, -2, 2)
        own = matmul_reduce_scatter(self._comm, inner, self.down)
        out = torch.empty_like(inner[:, :1] @ self.down[:1])
        matmul_all_reduce(self._comm, inner.t().contiguous().t(), self.down, out=out, way="sequential")
        return x + own, out, done.gathered


def fullgraph(backend: str) -> None:
    """Compare a layer of products, compiled and eager, under no_grad."""
    with shotcast.Communicator(device="cpu", timeout_s=120) as comm, torch.no_grad():
        block = Block(comm)
        x = whole_numbers(ROWS // comm.world_size, HIDDEN, seed=40 + comm.rank)
        for got, wanted in zip(torch.compile(block, fullgraph=True, backend=backend)(x), block(x), strict=True):
            assert torch.equal(got, wanted)
        comm.check()


def gradients(backend: str) -> None:
    """Compare the gradients of summed products, compiled and eager."""
    with shotcast.Communicator(device="cpu", timeout_s=120) as comm:

        def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return matmul_all_reduce(comm, a, b).square().sum() + matmul_reduce_scatter(comm, a.sin(), b).sum()

        found = []
        for run in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
            leaves = [whole_numbers(8, 6, seed=comm.rank), whole_numbers(6, 10, seed=5 + comm.rank)]
            leaves = [leaf.requires_grad_() for leaf in leaves]
            run(*leaves).backward()
            found.append([leaf.grad for leaf in leaves])
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted)


def opcheck() -> list[str]:
    """Run PyTorch's own checks of schemas, fake kernels and traces; return the texts of calls that are refused."""
    said = []
    with shotcast.Communicator(device="cpu", timeout_s=120) as comm:
        n, name = comm.world_size, comm.name
        a, b = whole_numbers(4 * n, 6, seed=1), whole_numbers(6, 3, seed=2)
        ops = torch.ops.shotcast
        torch.library.opcheck(ops.matmul_reduce_scatter.default, (a, b, name, n, "auto"))
        torch.library.opcheck(ops.matmul_all_reduce.default, (a, b.t().contiguous().t(), name, "auto"))
        for gathers in (False, True):
            torch.library.opcheck(ops.all_gather_matmul.default, (a, [b, b[:, :1]], name, n, gathers, "auto", None))
        lanes = lanes_of(comm)
        wrong = (
            lambda: all_gather_matmul(lanes, a, b, way="plain").products[0],
            lambda: matmul_all_reduce(comm, a, b[:5]),
            lambda: matmul_all_reduce(comm, a, b, out=a),
            lambda: matmul_reduce_scatter(comm, a[1:], b),
            lambda: matmul_all_reduce(comm, a, b, way="other"),
        )
        for call in wrong:
            with pytest.raises(Exception) as caught:  # noqa: PT011  Dynamo raises errors of its own with the text
                torch.compile(call, fullgraph=True, backend="aot_eager")()
            said.append(str(caught.value))
        lanes.close()
    return said
