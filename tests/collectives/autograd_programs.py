"""Programs that write tensors by collectives, and the same by plain PyTorch, for tests/collectives/test_autograd.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

import shotcast
from shotcast import Communicator

Tensors = list[torch.Tensor]
Program = Callable[[Communicator, torch.Tensor, torch.Tensor], torch.Tensor]
Reference = Callable[[Tensors, Tensors], Tensors]


def products(xs: Tensors, zs: Tensors) -> Tensors:
    return [x * z for x, z in zip(xs, zs, strict=True)]


def in_place(comm: Communicator, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    y = x * z
    assert comm.all_reduce(y, out=y) is y
    return y


def into_slice(comm: Communicator, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Sum into rows of a tensor that has a history."""
    buffer = z.repeat(2, 1)
    comm.all_reduce(x, out=buffer[: len(z)])
    return buffer * buffer


def own_rows_in_place(comm: Communicator, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Gather into a tensor that holds this rank's part already."""
    whole = torch.cat([x] * comm.world_size)
    comm.all_gather(whole[comm.rank * len(x) : (comm.rank + 1) * len(x)], out=whole)
    return whole


def received(comm: Communicator, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Pass tensors round the ranks; what is received replaces a tensor that has a history, and then has none."""
    y = z * 2
    for sender in range(comm.world_size):
        if comm.rank == sender:
            comm.send(x * 3, (sender + 1) % comm.world_size)
        elif comm.rank == (sender + 1) % comm.world_size:
            comm.recv(y, sender)
    return y * x


PROGRAMS: dict[str, tuple[Program, Reference]] = {
    "in place": (in_place, lambda xs, zs: [sum(products(xs, zs))] * len(xs)),
    "into what has a history": (lambda comm, x, z: comm.all_reduce(x, out=z * 2), lambda xs, zs: [sum(xs)] * len(xs)),
    "into what has none": (
        lambda comm, x, z: comm.all_reduce(x, out=z.detach().clone()),
        lambda xs, zs: [sum(xs)] * len(xs),
    ),
    "a constant": (
        lambda comm, x, z: comm.all_reduce(x.detach(), out=z * 2) * z,
        lambda xs, zs: [sum(xs).detach() * z for z in zs],
    ),
    "into a slice": (into_slice, lambda xs, zs: [torch.cat([sum(xs), z]) ** 2 for z in zs]),
    "all_gather": (
        lambda comm, x, z: comm.all_gather(x, out=torch.cat([z] * comm.world_size)),
        lambda xs, zs: [torch.cat(xs)] * len(xs),
    ),
    "all_gather in place": (own_rows_in_place, lambda xs, zs: [torch.cat(xs)] * len(xs)),
    "all_to_all": (
        lambda comm, x, z: comm.all_to_all(x, out=z.sin()),
        lambda xs, zs: [torch.cat([x.chunk(len(xs))[rank] for x in xs]) for rank in range(len(xs))],
    ),
    "broadcast of the last": (
        lambda comm, x, z: comm.broadcast(x * z, comm.world_size - 1) * z,
        lambda xs, zs: [xs[-1] * zs[-1] * z for z in zs],
    ),
    "broadcast of the first": (
        lambda comm, x, z: x * comm.broadcast(z.sin(), 0),
        lambda xs, zs: [x * zs[0].sin() for x in xs],
    ),
    "received": (received, lambda xs, zs: [(xs[rank - 1] * 3).detach() * x for rank, x in enumerate(xs)]),
}
"""The program of each rank on its x and z, and the same on all ranks' by plain PyTorch."""


def reductions(name: str, reduced: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, tuple[Program, Reference]]:
    """Return programs that reduce by ``name``, where ``reduced`` reduces the first dimension."""

    def new(comm: Communicator, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce(x * z, reduction=name)

    def in_place(comm: Communicator, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y = x * z
        comm.all_reduce(y, out=y, reduction=name)
        return y * z

    def scattered(comm: Communicator, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return comm.reduce_scatter(x, reduction=name)

    def scattered_in_place(comm: Communicator, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y, rows = x * z, len(x) // comm.world_size
        return comm.reduce_scatter(y, out=y[comm.rank * rows : (comm.rank + 1) * rows], reduction=name)

    def of_products(xs: Tensors, zs: Tensors) -> torch.Tensor:
        return reduced(torch.stack(products(xs, zs)))

    return {
        f"{name}": (new, lambda xs, zs: [of_products(xs, zs)] * len(xs)),
        f"{name} in place": (in_place, lambda xs, zs: [of_products(xs, zs) * z for z in zs]),
        f"{name} scattered": (scattered, lambda xs, zs: [*reduced(torch.stack(xs)).chunk(len(xs))]),
        f"{name} scattered in place": (scattered_in_place, lambda xs, zs: [*of_products(xs, zs).chunk(len(xs))]),
    }


PROGRAMS |= reductions("sum", lambda parts: parts.sum(0))
PROGRAMS |= reductions("avg", lambda parts: parts.mean(0))
PROGRAMS |= reductions("max", lambda parts: parts.amax(0))
PROGRAMS |= reductions("min", lambda parts: parts.amin(0))
PROGRAMS |= reductions("prod", lambda parts: parts.prod(0))


def derivatives(outputs: Tensors, first_rank: int, leaves: Tensors) -> Tensors:
    """Return first and second derivatives of a loss of the outputs of ranks from ``first_rank`` on."""
    loss = torch.zeros((), dtype=torch.float64)
    for rank, y in enumerate(outputs, first_rank):
        weight = torch.cos(torch.arange(float(y.numel())) + rank).view(y.shape)
        loss = loss + (y.sin() * weight).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    squares = sum(grad.square().sum() for grad in first)
    return [*first, *torch.autograd.grad(squares, leaves, materialize_grads=True)]


def against_plain_torch(names: list[str]) -> None:
    """Compare values, first and second derivatives of programs with those of their references, in float64."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        rank, size = comm.rank, comm.world_size
        generator = torch.Generator().manual_seed(3)
        values = [torch.randn(2 * size, 3, generator=generator, dtype=torch.float64) for _ in range(2 * size)]
        for number, value in enumerate(values):
            value[0] = values[0][0]  # a maximum that all ranks reach
            value[1, number % 3] = 0
        for name in names:
            program, reference = PROGRAMS[name]
            all_leaves = [value.clone().requires_grad_() for value in values]
            outputs = reference(all_leaves[:size], all_leaves[size:])
            plain = [outputs[rank], *derivatives(outputs, 0, all_leaves)[rank::size]]
            leaves = [values[rank].clone().requires_grad_(), values[size + rank].clone().requires_grad_()]
            output = program(comm, *leaves)
            own = [output, *derivatives([output], rank, leaves)]
            for number, (ours, wanted) in enumerate(zip(own, plain, strict=True)):
                where = f"{name}, tensor {number}"
                torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, at=where: f"{at}: {m}")
