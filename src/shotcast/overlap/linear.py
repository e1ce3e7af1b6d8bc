"""Linear layers for training, divided between ranks: they communicate under their own products.

A column-parallel layer, whose ranks compute different outputs, sums the gradient of its input over the ranks under the
product that gives the gradient of its weights. A row-parallel layer, whose ranks compute parts of each output's sum,
sums some rows under the product of the next rows. The other pass of each needs no communication. As in Megatron-LM
(arXiv 1909.08053), one layer of each kind makes a block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shotcast.collectives.communicator import Communicator
from shotcast.errors import ConfigError
from shotcast.overlap import schedule
from shotcast.overlap.adaptive import AUTO, Adaptive
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import Lanes, lanes_of
from shotcast.overlap.policy import PLAIN, SEQUENTIAL, Way, measure, model_us
from shotcast.overlap.schedule import makespan_us

CHUNKS = (2, 4, 8)
"""The numbers of chunks that a row-parallel layer may divide its rows into."""
_LEAST_ROWS = 16
"""Chunks of fewer rows make products too small to hide anything."""

Gradients = tuple[torch.Tensor | None, ...]


class _Divided(nn.Module):
    """The common part of the layers: their part of the weights, and how they choose a way."""

    bias: torch.Tensor | None

    def __init__(self, ranks: Communicator | Lanes, way: str):
        super().__init__()
        self._lanes = ranks if isinstance(ranks, Lanes) else lanes_of(ranks)
        self._controller = Controller(self._lanes)
        self._comm = self._lanes.communicators[0]
        self.adaptive = Adaptive(self._comm, way)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Divided:
        """Return a copy with parameters of its own, on the same lanes."""
        memo |= {id(shared): shared for shared in (self._lanes, self._controller, self._comm)}
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("this layer cannot be pickled, as it is joined with other ranks; save its state_dict()")

    def _part(self, size: int, what: str) -> slice:
        ranks = self._comm.world_size
        if size % ranks:
            raise ConfigError(f"{size} {what} are not divisible among {ranks} ranks")
        each = size // ranks
        return slice(self._comm.rank * each, (self._comm.rank + 1) * each)

    def _keep(self, linear: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        def parameter(x: torch.Tensor, trained: bool) -> nn.Parameter:
            own = x.detach().to(self._comm.device, copy=True).contiguous()
            return nn.Parameter(own, requires_grad=trained)

        self.weight = parameter(weight, linear.weight.requires_grad)
        self.bias = None if bias is None else parameter(bias, linear.bias.requires_grad)

    def _apply_to(self, function: type[torch.autograd.Function], x: torch.Tensor) -> torch.Tensor:
        """Apply a function to ``x``, weight and bias, in the dtype that autocast asks for."""
        operands: tuple[torch.Tensor | None, ...] = (x, self.weight, self.bias)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            operands = tuple(None if one is None else one.to(dtype) for one in operands)
        with torch.autocast(kind, enabled=False):
            out: torch.Tensor = function.apply(*operands, self)
        return out


class ColumnParallelLinear(_Divided):
    """A linear layer of which every rank computes some outputs: [..., inputs] to [..., outputs / ranks].

    Args:
        ranks: a communicator; or lanes that several layers share, from :func:`shotcast.overlap.lanes_of`.
        linear: the whole layer, the same on all ranks.
        way: ``auto``, which measures at the first backward of about so many rows; or ``sequential`` or ``plain``.

    Attributes:
        adaptive: its ``decisions`` say what was chosen, by rows (up to a power of two) and dtype, and why.

    Raises:
        ConfigError: the outputs are not divisible among the ranks.
    """

    def __init__(self, ranks: Communicator | Lanes, linear: nn.Linear, way: str = AUTO):
        super().__init__(ranks, way)
        part = self._part(linear.out_features, "outputs")
        self._keep(linear, linear.weight[part], None if linear.bias is None else linear.bias[part])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's outputs of ``x``, which is the same on all ranks."""
        return self._apply_to(_Column, x)

    def backward(
        self, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, needs: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of the input, summed over the ranks, and of this rank's weights and bias."""
        rows, grads = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])

        def of_input() -> torch.Tensor:
            return rows @ weight

        def of_parameters() -> tuple[torch.Tensor | None, torch.Tensor | None]:
            return (rows.t() @ grads if needs[1] else None), (rows.sum(0) if needs[2] else None)

        if not needs[0]:
            return (None, *of_parameters())

        def sequential() -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
            dx = of_input()
            return (self._comm.all_reduce(dx, out=dx), *of_parameters())

        def plain() -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
            found: dict[str, torch.Tensor] = {}

            def first() -> torch.Tensor:
                found["dx"] = of_input()
                return found["dx"]

            done = self._controller.run(
                schedule.beside(),
                {"compute 0": first, "compute 1": of_parameters},
                {"communicate 0": lambda comm: comm.all_reduce(found["dx"], out=found["dx"])},
            )
            return (done["communicate 0"], *done["compute 1"])

        ways: dict[str, Callable[[], Any]] = {SEQUENTIAL: sequential}
        if needs[1] and self._comm.world_size > 1:
            ways[PLAIN] = plain
        dx, dw, db = self.adaptive.run((_bucket(rows.shape[0]), rows.dtype, needs), ways)
        return dx.view(x.shape), dw, db


class _Column(torch.autograd.Function):
    """The forward and backward of :class:`ColumnParallelLinear`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: ColumnParallelLinear
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        return (*ctx.layer.backward(x, weight, dy, ctx.needs_input_grad), None)


class RowParallelLinear(_Divided):
    """A linear layer of which every rank has some inputs: [..., inputs / ranks] to the sum, [..., outputs].

    Rows may be divided into chunks, of which one is summed under the product of the next. A product of fewer rows may
    be rounded otherwise by the library that computes it; sums over ranks have the same bits in any chunks.

    Args:
        ranks: as for :class:`ColumnParallelLinear`.
        linear: the whole layer, the same on all ranks.
        way: ``auto``, which measures at the first forward of about so many rows; or ``sequential``, or ``2 chunks``,
            ``4 chunks`` or ``8 chunks``.

    Attributes:
        adaptive: its ``decisions`` say what was chosen, by rows (up to a power of two) and dtype, and why.

    Raises:
        ConfigError: the inputs are not divisible among the ranks.
    """

    def __init__(self, ranks: Communicator | Lanes, linear: nn.Linear, way: str = AUTO):
        super().__init__(ranks, way)
        part = self._part(linear.in_features, "inputs")
        self._keep(linear, linear.weight[:, part], linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs from this rank's inputs, on all ranks."""
        return self._apply_to(_Row, x)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply [rows, inputs / ranks] by [inputs / ranks, outputs] and sum over the ranks: [rows, outputs]."""

        def in_chunks(count: int) -> torch.Tensor:
            out = x.new_empty(x.shape[0], weight.shape[1])
            parts = list(zip(x.chunk(count), out.chunk(count), strict=True))
            if count == 1:
                return self._comm.all_reduce(torch.mm(x, weight, out=out), out=out)
            numbers = range(len(parts))
            self._controller.run(
                schedule.chain(len(parts)),
                {f"compute {i}": lambda i=i: torch.mm(parts[i][0], weight, out=parts[i][1]) for i in numbers},  # type: ignore[misc]
                {f"communicate {i}": lambda comm, i=i: _sum(comm, parts[i][1]) for i in numbers},  # type: ignore[misc]
            )
            return out

        ways: dict[str, Callable[[], torch.Tensor]] = {SEQUENTIAL: lambda: in_chunks(1)}
        for count in CHUNKS:
            if self._comm.world_size > 1 and x.shape[0] >= count * _LEAST_ROWS:
                ways[f"{count} chunks"] = lambda count=count: in_chunks(count)  # type: ignore[misc]

        def predict() -> dict[str, float]:
            """Predict each number of chunks from the times of the whole product and sum."""
            out = x.new_empty(x.shape[0], weight.shape[1])
            alone = (Way("product", lambda: torch.mm(x, weight, out=out)), Way("sum", lambda: _sum(self._comm, out)))
            product_us, sum_us = measure(self._comm, alone, 3).values()
            whole_us = model_us(self._comm, out)
            found = {SEQUENTIAL: product_us + sum_us}
            for count in CHUNKS:
                chunk = out.chunk(count)[0]
                part_us = model_us(self._comm, chunk)  # another algorithm may serve a chunk
                share = part_us / whole_us if part_us and whole_us else chunk.shape[0] / out.shape[0]
                times = {f"compute {i}": product_us / count for i in range(count)}
                times |= {f"communicate {i}": sum_us * share for i in range(count)}
                found[f"{count} chunks"] = makespan_us(schedule.chain(count), times)
            return found

        return self.adaptive.run((_bucket(x.shape[0]), x.dtype), ways, predict)


def _bucket(rows: int) -> int:
    """Return the least power of two from ``rows`` on. One decision serves all numbers of rows up to it."""
    return 1 << max(rows - 1, 0).bit_length()


def _sum(comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce(x, out=x)


class _Row(torch.autograd.Function):
    """The forward and backward of :class:`RowParallelLinear`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: RowParallelLinear
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = layer.product(x.reshape(-1, x.shape[-1]), weight.t())
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dw = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None
