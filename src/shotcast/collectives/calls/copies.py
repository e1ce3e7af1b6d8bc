"""Copies between all ranks: all_gather, all_to_all and broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shotcast.collectives import ops
from shotcast.collectives.arguments import dense, rank_in, rows_per_rank, valid, writable
from shotcast.collectives.calls.caller import Caller
from shotcast.collectives.torch_ops import autograd
from shotcast.collectives.torch_private import is_traced
from shotcast.errors import ConfigError
from shotcast.wire import Op


class CopyCalls(Caller):
    """Calls that give every rank data of the others."""

    def all_gather(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        sizes: Sequence[int] | None = None,
        algorithm: str = "auto",
        sms: int | None = None,
    ) -> torch.Tensor:
        """Compute ``out = x_0, x_1, ..., x_{N-1}``, joined along the first dimension, on every rank.

        Args:
            x: [k, ...]; with ``sizes``, [sizes[rank], ...].
            out: [N * k, ...]; with ``sizes``, [sum(sizes), ...]; None for a new tensor.
            sizes: the first dimension of each rank's part, the same list on all ranks.
            algorithm: ``auto``, ``one_shot``, ``ring`` or ``vendor``; with ``sms`` ``few_sms`` or
                ``copy_engines``.
            sms: as in :meth:`all_reduce`.

        Returns:
            ``out``. Differentiable.
        """
        key: tuple[Any, ...] = "all_gather", algorithm, sms, type(sms)
        operands = x, out
        if sizes is not None and not is_traced():
            key = *key, *sizes, *map(type, sizes)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done
        x = dense(x, "x", self.device, "all_gather")
        if x.dim() == 0:
            x = x.view(1)
        options: dict[str, Any] = {"algorithm": algorithm, "sms": sms}
        if sizes is None:
            return self._make(ops.ALL_GATHER, x, out, (key, operands), options)
        numbers = all(isinstance(size, int) for size in sizes)
        if len(sizes) != self.world_size or not numbers or min(sizes) < 0 or sizes[self.rank] != x.shape[0]:
            raise ConfigError(
                f"all_gather: sizes must hold {self.world_size} numbers from 0 up, and {x.shape[0]} (the first "
                f"dimension of x) at place {self.rank}; they are {list(sizes)}"
            )
        width = math.prod(x.shape[1:])
        elements = tuple(size * width for size in sizes)
        options["sizes"] = list(sizes)
        return self._make(ops.ALL_GATHER_UNEVEN, x, out, (key, operands), options, elements)

    def all_to_all(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        algorithm: str = "auto",
        sms: int | None = None,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Compute ``out_i = x_0[i], x_1[i], ..., x_{N-1}[i]``, where ``x[i]`` is the i-th of N parts.

        Args:
            x: [N * k, ...]; with sizes, [sum(input_sizes), ...].
            out: like ``x``, or [sum(output_sizes), ...], and does not overlap it; None for a new tensor.
            algorithm: ``auto``, ``one_shot`` or ``vendor``; with ``sms`` ``few_sms`` or
                ``copy_engines``.
            sms: as in :meth:`all_reduce`; parts of different sizes take none.
            input_sizes, output_sizes: how many rows this rank sends to each rank, and receives from each. All ranks
                give both, or none does and parts are equal. Sizes that do not match another rank's raise
                :class:`~shotcast.CollectiveMismatch`.

        Returns:
            ``out``. Differentiable.
        """
        even = input_sizes is None and output_sizes is None
        key, operands = ("all_to_all", algorithm, sms, type(sms)), (x, out)
        if even and (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done
        x = dense(x, "x", self.device, "all_to_all")
        if even:
            rows_per_rank(x, self.world_size, "all_to_all")
            return self._make(ops.ALL_TO_ALL, x, out, (key, operands), {"algorithm": algorithm, "sms": sms})
        if sms is not None:
            raise ConfigError("all_to_all: parts of different sizes keep to no number of SMs; leave sms out")
        sent, received = (
            self._rows_of_each(sizes, name)
            for sizes, name in ((input_sizes, "input_sizes"), (output_sizes, "output_sizes"))
        )
        if x.dim() == 0 or sum(sent) != x.shape[0]:
            raise ConfigError(
                f"all_to_all: input_sizes add up to {sum(sent)} rows, and the shape of x is {list(x.shape)}"
            )
        if sent[self.rank] != received[self.rank]:
            raise ConfigError(
                f"all_to_all: rank {self.rank} sends {sent[self.rank]} rows to itself by input_sizes, and expects "
                f"{received[self.rank]} by output_sizes"
            )
        width = math.prod(x.shape[1:])
        elements = tuple(size * width for size in (*sent, *received))
        options = {"input_sizes": sent, "output_sizes": received, "algorithm": algorithm}
        return self._make(ops.ALL_TO_ALL_UNEVEN, x, out, None, options, elements, 0)

    def _rows_of_each(self, sizes: Sequence[int] | None, name: str) -> tuple[int, ...]:
        if sizes is None or len(sizes) != self.world_size or any(not isinstance(n, int) or n < 0 for n in sizes):
            given = "None" if sizes is None else list(sizes)
            raise ConfigError(
                f"all_to_all: input_sizes and output_sizes are {self.world_size} numbers from 0 up each, or both None; "
                f"{name} is {given}"
            )
        return tuple(sizes)

    def broadcast(self, x: torch.Tensor, root: int, algorithm: str = "auto", sms: int | None = None) -> torch.Tensor:
        """Copy ``x`` of rank ``root`` to ``x`` of every rank, in place, on ``sms`` SMs as in :meth:`all_reduce`.

        Returns ``x``. Differentiable if ``x`` requires grad on all ranks: the gradients are summed for the root.
        """
        key, operands = ("broadcast", root, type(root), algorithm, sms, type(sms)), (x, x)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done
        valid(x, "x", self.device, "broadcast")
        rank_in(root, self.world_size, "root", "broadcast")
        values = {"x": x, "root": root, "algorithm": algorithm, "sms": sms}
        if is_traced():
            writable(x, "x", "broadcast")
            return x.copy_(autograd.in_graph(ops.BROADCAST, self.name, values))
        if x.requires_grad and torch.is_grad_enabled():
            writable(x, "x", "broadcast")
            return autograd.written(ops.BROADCAST, self, x, values)
        self._run(Op.BROADCAST, x, x, algorithm=algorithm, root=root, sms=sms, given=(key, operands))
        return x
