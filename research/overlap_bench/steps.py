"""The matmuls and messages of a rank: their memory, and whether results are right.

A message contains what the matmul of its step wrote. Before a form is checked, all of that is overwritten with NaN, so
a message sent too early is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from matmuls import Product

from overlap_bench.config import REDUCE_SCATTER_ALL_GATHER, OverlapConfig
from shotcast.collectives.communicator import Communicator
from shotcast.units import align_up

Allocate = Callable[[int, torch.dtype], torch.Tensor]
_SHIFT = 8
"""Rows by which the left operands of two steps differ: whole units of memory, so kernels are the same."""


def library_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Multiply by the vendor's library as it is."""
    return torch.mm(a, b, out=out)


class Steps:
    """The products and messages of a rank, each step with memory of its own.

    Args:
        config: the setting.
        comm: the ranks.
        nbytes: the bytes of a message, before it is rounded up to whole units of all ranks.
        repeat: products of a step.
        allocate: returns the memory of messages: this many elements.

    Attributes:
        nbytes: the bytes of a message.
        sent, received: what each message reads, and writes.
        products: what each product writes; a part of ``sent``, or the other way round.
    """

    def __init__(
        self, config: OverlapConfig, comm: Communicator, nbytes: int, repeat: int, allocate: Allocate | None = None
    ):
        self.config, self.comm, self.repeat = config, comm, repeat
        self._dtype = getattr(torch, config.dtype)
        rows, columns, depth = config.gemm
        self._generator = torch.Generator(comm.device).manual_seed(1 + comm.rank)
        item = self._dtype.itemsize
        if config.whole:
            nbytes = rows * (depth if config.gathers_first else columns) * item
        unit = 16 * comm.world_size
        self.nbytes = max(unit, align_up(nbytes, unit))
        count = self.nbytes // item
        self._part = count // comm.world_size
        self._count = self._part if config.op == "all_gather" else count
        self._outputs = rows * columns
        self._lefts = None if config.gathers_first else self._random((rows + _SHIFT * config.steps, depth))
        self.b = self._random((depth, columns))
        self._keep = [self._random((max(0, self._count - self._written),)) for _ in range(config.steps)]
        self._exacts: dict[int, torch.Tensor] = {}  # of elsewhere() too
        self._lay_out(allocate or self._empty)

    @property
    def _written(self) -> int:
        """The elements of a message that its product writes."""
        return 0 if self.config.gathers_first else min(self._count, self._outputs)

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.comm.device).to(self._dtype)

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self.comm.device)

    def _lay_out(self, allocate: Allocate) -> None:
        rows, columns, _ = self.config.gemm
        numbers = range(self.config.steps)
        first = self.config.gathers_first
        size = self._count if first else max(self._count, self._outputs)
        self._storages = [allocate(size, self._dtype) for _ in numbers]
        self.sent = [storage[-self._count :] for storage in self._storages]
        written = [self._empty(self._outputs, self._dtype) if first else storage for storage in self._storages]
        self.products = [one[: self._outputs].view(rows, columns) for one in written]
        received = self._part if self.config.op == "reduce_scatter" else self._part * self.comm.world_size
        self.received = [allocate(received, self._dtype) for _ in numbers]
        self.shards = (
            [allocate(self._part, self._dtype) for _ in numbers] if self.config.op == REDUCE_SCATTER_ALL_GATHER else []
        )
        self.fill()

    def elsewhere(self, allocate: Allocate) -> Steps:
        """Return the same products and messages in memory of their own."""
        other = Steps.__new__(Steps)
        other.__dict__ |= self.__dict__
        other._lay_out(allocate)
        return other

    def left(self, number: int) -> torch.Tensor:
        """Return the left operand of a product."""
        rows, _, depth = self.config.gemm
        if self._lefts is None:
            return self.received[number].view(rows, depth)
        return self._lefts[_SHIFT * number : _SHIFT * number + rows]

    def multiply(self, number: int, product: Callable[..., object] | Product = library_product) -> None:
        """Compute the products of a step."""
        for _ in range(self.repeat):
            product(self.left(number), self.b, self.products[number])

    def multiply_all(self, product: Callable[..., object] | Product = library_product) -> None:
        """Compute the products of all steps, and send nothing."""
        for number in range(self.config.steps):
            self.multiply(number, product)

    def communicate(self, comm: Communicator, number: int, sms: int | None = None, algorithm: str = "auto") -> None:
        """Send the message of a step by ours."""
        sent, received = self.sent[number], self.received[number]
        if self.config.op == REDUCE_SCATTER_ALL_GATHER:
            comm.reduce_scatter(sent, out=self.shards[number], sms=sms, algorithm=algorithm)
            comm.all_gather(self.shards[number], out=received, sms=sms, algorithm=algorithm)
        else:
            getattr(comm, self.config.op)(sent, out=received, sms=sms, algorithm=algorithm)

    # -- right or wrong ------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Put in place what messages have besides products."""
        for storage, keep in zip(self._storages, self._keep, strict=True):
            storage.zero_()
            if keep.numel():
                storage[-keep.numel() :].copy_(keep)

    def load(self) -> None:
        """Overwrite all results, and put in place what messages have besides products."""
        self.fill()
        for written in (*self.products, *self.received, *self.shards):
            written.fill_(float("nan"))

    def wrong(self, in_place: bool = False, average: bool = False, fused: bool = False) -> str:
        """Return what is wrong with the last results; empty if all are right but for rounding. Collective.

        Args:
            in_place: the messages were reduced where they were.
            average: reductions were divided by the number of ranks.
            fused: only what follows last was written: the message, or the product where it reads the message.
        """
        faults = []
        for number in range(self.config.steps):
            exact = self._exact(number)
            first = self.config.gathers_first
            if first or not (in_place or fused):
                slack = 2 * self._eps * exact.abs() + self._slack
                if not _within(self.products[number], exact, slack):
                    faults.append(f"product {number}")
            if first and fused:
                continue
            values, bound = self._results(exact.flatten(), number)
            scale = self.comm.world_size if average else 1
            found = self.sent[number] if in_place else self.received[number]
            if not _within(found, values / scale, bound / scale):
                faults.append(f"message {number}")
        return f"wrong results: {', '.join(faults)}" if faults else ""

    @property
    def _eps(self) -> float:
        return torch.finfo(self._dtype).eps

    @property
    def _slack(self) -> float:
        """The error of a product that cancels: that of its sums on the way, in float32, and of terms rounded before."""
        depth = self.config.gemm[2]
        return 2 * self._eps * math.sqrt(depth) + 4 * torch.finfo(torch.float32).eps * depth

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.double() if self.config.device == "cpu" else x.float()

    def _exact(self, number: int) -> torch.Tensor:
        """Return the product of a step in a wider type; it is kept, as each form is compared with it."""
        if number not in self._exacts:
            self._exacts[number] = self._wide(self._left_of_all(number)) @ self._wide(self.b)
        return self._exacts[number]

    def _left_of_all(self, number: int) -> torch.Tensor:
        """Return the left operand as it has to be."""
        if not self.config.gathers_first:
            return self.left(number)
        rows, _, depth = self.config.gemm
        return self.comm.all_gather(self._keep[number]).view(rows, depth)

    def _results(self, product: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a message has to give this rank, and by how much it may be off."""
        world, op = self.comm.world_size, self.config.op
        own = torch.cat((product[product.numel() - self._written :], self._wide(self._keep[number])))
        whole = self._wide(self.comm.all_gather(own.to(self._dtype))).view(world, -1)
        bound = 2 * self._eps * whole.abs()
        bound[:, : self._written] += self._slack
        if op == "all_gather":
            return whole.view(-1), bound.view(-1)
        if op == "all_to_all":
            values, bound = (x.view(world, world, -1)[:, self.comm.rank].reshape(-1) for x in (whole, bound))
            return values, bound
        values, bound = whole.sum(0), (bound + world * self._eps * whole.abs()).sum(0)
        if op == "reduce_scatter":
            values, bound = (x.view(world, -1)[self.comm.rank] for x in (values, bound))
        return values, bound


def _within(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> bool:
    return bool(((found.to(exact.dtype).view(exact.shape) - exact).abs() <= bound).all())
