"""Linear layers for training, divided between ranks, that communicate during their products.

The ranks of a column-parallel layer compute different outputs; it sums the gradient of its input over the ranks during
the product for the weight gradient. The ranks of a row-parallel layer compute parts of each output's sum; it sums some
rows during the product of the next rows. The other pass of each layer needs no communication. As in Megatron-LM (arXiv
1909.08053), one layer of each kind forms a block.

With sequence parallelism (arXiv 2205.05198), activations between blocks are divided by rows. A column-parallel layer
gathers rows during their product, and a row-parallel layer leaves each rank the sums of its rows. In the backward pass,
each does to gradients what the other does to activations. Rows are gathered again for the weight gradient, so each rank
stores only its rows.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shotcast.collectives.communicator import Communicator
from shotcast.errors import ConfigError
from shotcast.overlap import schedule
from shotcast.overlap.adaptive import Adaptive, bucket
from shotcast.overlap.chains import in_place_sum
from shotcast.overlap.controller import Controller, numbered
from shotcast.overlap.lanes import Lanes, lanes_of
from shotcast.overlap.policy import AUTO, PLAIN, SEQUENTIAL

CHUNKS = (2, 4, 8)
"""The numbers of chunks into which a row-parallel layer may divide its rows."""
_LEAST_ROWS = 16
"""The minimum rows per chunk: smaller products are too short to hide anything."""
_SCATTERED_CHUNKS, _LEAST_SCATTERED_ROWS = 4, 64
"""The most chunks of a rank's rows of a sum, on CPU ranks, and the fewest rows in one."""

_WAYS = AUTO, SEQUENTIAL, PLAIN, *(f"{count} chunks" for count in CHUNKS)

Gradients = tuple[torch.Tensor | None, ...]


class _Divided(nn.Module):
    """The shared part of the layers: their part of the weights, and the choice of a mode."""

    bias: torch.Tensor | None

    def __init__(
        self,
        ranks: Communicator | Lanes,
        linear: nn.Linear,
        way: str = AUTO,
        sequence_parallel: bool = False,
        sms: int | None = None,
    ):
        super().__init__()
        if way not in _WAYS:
            raise ConfigError(f"way is {way!r}; it takes {', '.join(_WAYS)}")
        self.sequence_parallel, self._sms = sequence_parallel, sms
        self._lanes = ranks if isinstance(ranks, Lanes) else lanes_of(ranks)
        self._controller = Controller(self._lanes)
        self._comm = self._lanes.communicators[0]
        self.adaptive = Adaptive(self._comm, way)
        self._take(linear)

    @abstractmethod
    def _take(self, linear: nn.Linear) -> None:
        """Take this rank's part of the whole layer."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Divided:
        """Return a copy with separate parameters, on the same lanes."""
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

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape ``x`` to a matrix of contiguous rows along its last dimension."""
        if x.dim() < 2:
            raise ConfigError(f"sequence parallelism divides the first of two or more dimensions, not {list(x.shape)}")
        return x.reshape(-1, x.shape[-1]).contiguous()

    def _gathered(self, rows: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], Any]]:
        """Return the modes of multiplying the rows of all ranks by a weight; each yields the product and the rows.

        Each rank's rows are multiplied separately, so that the bits do not depend on the mode.
        """
        ranks, own = self._comm.world_size, self._comm.rank
        gathered = rows.new_empty(ranks, *rows.shape)
        out = rows.new_empty(ranks, rows.shape[0], weight.shape[1])

        def gather(comm: Communicator) -> None:
            comm.all_gather(rows, out=gathered.flatten(0, 1), sms=self._sms)

        def multiply(rank: int) -> None:
            torch.mm(rows if rank == own else gathered[rank], weight, out=out[rank])

        def sequential() -> tuple[torch.Tensor, torch.Tensor]:
            gather(self._comm)
            for rank in range(ranks):
                multiply(rank)
            return out.flatten(0, 1), gathered.flatten(0, 1)

        def plain() -> tuple[torch.Tensor, torch.Tensor]:
            computations = {"compute 0": lambda: None, "compute 1": lambda: multiply(own)}
            self._controller.run(schedule.beside(), computations, {"communicate 0": gather})
            for rank in range(own + 1, own + ranks):
                multiply(rank % ranks)
            return out.flatten(0, 1), gathered.flatten(0, 1)

        return {SEQUENTIAL: sequential, PLAIN: plain} if ranks > 1 else {SEQUENTIAL: sequential}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's outputs, in autocast's dtype."""
        operands: tuple[torch.Tensor | None, ...] = (x, self.weight, self.bias)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            operands = tuple(None if one is None else one.to(dtype) for one in operands)
        with torch.autocast(kind, enabled=False):
            out: torch.Tensor = _Linear.apply(*operands, self)
        return out

    @abstractmethod
    def outputs(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the layer's outputs, without autograd."""

    @abstractmethod
    def backward(self, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, needs: tuple[bool, ...]) -> Gradients:
        """Return the gradients of the input, the weight and the bias, as far as the first three ``needs`` say."""


class _Linear(torch.autograd.Function):
    """The forward and backward of a layer."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: _Divided
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer.outputs(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        return (*ctx.layer.backward(x, weight, dy, ctx.needs_input_grad), None)


class ColumnParallelLinear(_Divided):
    """A linear layer in which every rank computes some outputs: [..., inputs] to [..., outputs / ranks].

    Args:
        ranks: a communicator; or lanes that several layers share, from :func:`shotcast.overlap.lanes_of`.
        linear: the whole layer, the same on all ranks.
        way: ``auto``, which measures at the first backward with about that many rows; or ``sequential`` or ``plain``.
            With sequence parallelism, forwards are measured too.
        sequence_parallel: the rows of the input are divided equally among the ranks: [rows / ranks, ..., inputs] to
            [rows, ..., outputs / ranks].
        sms: the most SMs that a collective may occupy, as for :meth:`Communicator.all_reduce`.

    Attributes:
        adaptive: its ``decisions`` say what was chosen, by rows (up to a power of two) and dtype, and why.

    Raises:
        ConfigError: the outputs are not divisible among the ranks.
    """

    def _take(self, linear: nn.Linear) -> None:
        part = self._part(linear.out_features, "outputs")
        self._keep(linear, linear.weight[part], None if linear.bias is None else linear.bias[part])

    def outputs(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute this rank's outputs for ``x``: the same on all ranks or, with sequence parallelism, its own rows."""
        if not self.sequence_parallel:
            return F.linear(x, weight, bias)
        rows = self._rows(x)
        ways = self._gathered(rows, weight.t())
        product, _ = self.adaptive.run(("forward", bucket(rows.shape[0]), rows.dtype), ways)
        out: torch.Tensor = product.view(self._comm.world_size * x.shape[0], *x.shape[1:-1], weight.shape[0])
        if bias is not None:
            out += bias
        return out

    def backward(self, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, needs: tuple[bool, ...]) -> Gradients:
        """Return the gradients of the input, summed over the ranks, and of this rank's weights and bias.

        With sequence parallelism, the input is this rank's rows: the rows of all ranks are gathered during the product
        for the input's gradient, and the sums of this rank's rows are computed during that for the weights.
        """
        by_rows, ranks = self.sequence_parallel, self._comm.world_size
        rows, inputs = dy.reshape(-1, dy.shape[-1]), self._rows(x) if by_rows else x.reshape(-1, x.shape[-1])
        gathered = inputs.new_empty(ranks * len(inputs), inputs.shape[1]) if by_rows and needs[1] else inputs
        scattered = torch.empty_like(inputs) if by_rows and needs[0] else None
        found: dict[str, torch.Tensor] = {}

        def gather(comm: Communicator) -> None:
            if gathered is not inputs:
                comm.all_gather(inputs, out=gathered, sms=self._sms)

        def of_input() -> None:
            if needs[0]:
                found["dx"] = rows @ weight

        def sum_over_ranks(comm: Communicator) -> None:
            if scattered is not None:
                comm.reduce_scatter(found["dx"], out=scattered, sms=self._sms)
            elif needs[0]:
                in_place_sum(comm, found["dx"], self._sms)

        def of_parameters() -> tuple[torch.Tensor | None, torch.Tensor | None]:
            return (rows.t() @ gathered if needs[1] else None), (rows.sum(0) if needs[2] else None)

        def sequential() -> tuple[torch.Tensor | None, torch.Tensor | None]:
            gather(self._comm)
            of_input()
            sum_over_ranks(self._comm)
            return of_parameters()

        def plain() -> Any:
            computations = {"compute 0": of_input, "compute 1": of_parameters}
            plan = schedule.gather_and_scatter() if by_rows else schedule.beside()
            messages = (gather, sum_over_ranks) if by_rows else (sum_over_ranks,)
            communications = {f"communicate {number}": message for number, message in enumerate(messages)}
            return self._controller.run(plan, computations, communications)["compute 1"]

        ways: dict[str, Callable[[], Any]] = {SEQUENTIAL: sequential}
        if ranks > 1 and (needs[0] or needs[1] if by_rows else needs[0] and needs[1]):
            ways[PLAIN] = plain
        dw, db = self.adaptive.run((bucket(rows.shape[0]), rows.dtype, needs), ways)
        dx = scattered if by_rows else found.get("dx")
        return None if dx is None else dx.view(x.shape), dw, db


class RowParallelLinear(_Divided):
    """A linear layer in which every rank has some inputs: [..., inputs / ranks] to the sum, [..., outputs].

    Rows may be divided into chunks, each of which is summed during the product of the next. The library may round
    products of fewer rows differently; sums over ranks have the same bits for any chunks.

    Args:
        ranks: as for :class:`ColumnParallelLinear`.
        linear: the whole layer, the same on all ranks.
        way: ``auto``, which measures at the first forward with about that many rows; or ``sequential``, or ``2
            chunks``, ``4 chunks`` or ``8 chunks``. With sequence parallelism, backwards are measured too, and the other
            mode is ``plain``, in the forward only on CPU ranks.
        sequence_parallel: the rows of the sums are divided equally among the ranks: [rows, ..., inputs / ranks] to
            [rows / ranks, ..., outputs].
        sms: as for :class:`ColumnParallelLinear`.

    Attributes:
        adaptive: its ``decisions`` say what was chosen, by rows (up to a power of two) and dtype, and why.

    Raises:
        ConfigError: the inputs are not divisible among the ranks.
    """

    def _take(self, linear: nn.Linear) -> None:
        part = self._part(linear.in_features, "inputs")
        self._keep(linear, linear.weight[:, part], linear.bias)

    def outputs(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the outputs from this rank's inputs, on all ranks or, with sequence parallelism, for its own rows."""
        if self.sequence_parallel:
            out = self.scattered(x, weight.t())
        else:
            out = self.product(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
        if bias is not None:
            out += bias
        return out

    def scattered(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply [rows, ..., inputs / ranks] by [inputs / ranks, outputs] and sum this rank's rows over the ranks."""
        rows, ranks = self._rows(x), self._comm.world_size
        if x.shape[0] % ranks:
            raise ConfigError(f"{x.shape[0]} rows are not divisible among {ranks} ranks")
        out = self.adaptive.run(("forward", bucket(rows.shape[0]), rows.dtype), self._scattered(rows, weight))
        return out.view(x.shape[0] // ranks, *x.shape[1:-1], weight.shape[1])

    def _scattered(self, rows: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
        """Return the modes of multiplying by a weight and summing this rank's rows over the ranks.

        CPU ranks work in chunks, each of which is summed during the product of the next. Both modes multiply the same
        chunks, so the bits do not depend on the mode.
        """
        ranks = self._comm.world_size
        each = rows.shape[0] // ranks
        blocks, out = rows.view(ranks, each, rows.shape[1]), rows.new_empty(each, weight.shape[1])
        count = min(_SCATTERED_CHUNKS, each // _LEAST_SCATTERED_ROWS) if self._comm.device.type == "cpu" else 1
        size = max(1, -(-each // max(1, count)))
        chunks = [slice(first, min(first + size, each)) for first in range(0, each, size)]

        def multiply(chunk: slice) -> torch.Tensor:
            part = rows.new_empty(ranks, chunk.stop - chunk.start, weight.shape[1])
            for source, target in zip(blocks, part, strict=True):
                torch.mm(source[chunk], weight, out=target)
            return part

        def sequential() -> torch.Tensor:
            product = torch.cat([multiply(chunk) for chunk in chunks], 1) if len(chunks) > 1 else rows @ weight
            self._comm.reduce_scatter(product.view(-1, weight.shape[1]), out=out, sms=self._sms)
            return out

        def plain() -> torch.Tensor:
            parts: dict[int, torch.Tensor] = {}

            def compute(number: int) -> None:
                parts[number] = multiply(chunks[number])

            def communicate(number: int, comm: Communicator) -> None:
                comm.reduce_scatter(parts[number].flatten(0, 1), out=out[chunks[number]], sms=self._sms)

            self._controller.run(schedule.chain(len(chunks)), *numbered(len(chunks), compute, communicate))
            return out

        return {SEQUENTIAL: sequential, PLAIN: plain} if ranks > 1 and len(chunks) > 1 else {SEQUENTIAL: sequential}

    def backward(self, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, needs: tuple[bool, ...]) -> Gradients:
        """Return the gradients of this rank's inputs and weights, and of the bias.

        With sequence parallelism, ``dy`` is of this rank's rows, and the rows of all ranks are gathered.
        """
        inputs = x.reshape(-1, x.shape[-1])
        if not self.sequence_parallel:
            rows = dy.reshape(-1, dy.shape[-1])
            dx = (rows @ weight).view(x.shape) if needs[0] else None
            return dx, rows.t() @ inputs if needs[1] else None, rows.sum(0) if needs[2] else None
        rows = self._rows(dy)
        dx = gathered = None
        if needs[0]:
            ways = self._gathered(rows, weight)
            product, gathered = self.adaptive.run(("backward", bucket(rows.shape[0]), rows.dtype), ways)
            dx = product.view(x.shape)
        elif needs[1] or needs[2]:
            gathered = self._comm.all_gather(rows, sms=self._sms)
        dw = gathered.t() @ inputs if gathered is not None and needs[1] else None
        db = gathered.sum(0) if gathered is not None and needs[2] else None
        return dx, dw, db

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply [rows, inputs / ranks] by [inputs / ranks, outputs] and sum over the ranks: [rows, outputs]."""

        def in_chunks(count: int) -> torch.Tensor:
            out = x.new_empty(x.shape[0], weight.shape[1])
            parts = list(zip(x.chunk(count), out.chunk(count), strict=True))
            if count == 1:
                in_place_sum(self._comm, torch.mm(x, weight, out=out), self._sms)
                return out

            def compute(number: int) -> None:
                rows, product = parts[number]
                torch.mm(rows, weight, out=product)

            def communicate(number: int, comm: Communicator) -> None:
                in_place_sum(comm, parts[number][1], self._sms)

            self._controller.run(schedule.chain(len(parts)), *numbered(len(parts), compute, communicate))
            return out

        ways: dict[str, Callable[[], torch.Tensor]] = {SEQUENTIAL: lambda: in_chunks(1)}
        for count in CHUNKS:
            if self._comm.world_size > 1 and x.shape[0] >= count * _LEAST_ROWS:
                ways[f"{count} chunks"] = lambda count=count: in_chunks(count)  # type: ignore[misc]

        return self.adaptive.run((bucket(x.shape[0]), x.dtype), ways)
