"""Layers of a Llama model for the benchmark of training: whole, or divided between ranks by a chosen pair of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shotcast.models.presets import preset

Divide = Callable[[nn.Linear], nn.Module]
Begin = Callable[[torch.Tensor], Callable[[], Any]]
"""Begins to sum a tensor over the ranks, in place, and returns what waits for it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a layer, and how much of it is trained at a time.

    Attributes:
        parts: the ranks among which layers can be divided: heads and columns are in memory by rank.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    sequences: int
    length: int
    parts: int = 1

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


def shape_of(name: str, layers: int, tokens: int, length: int, parts: int) -> Shape:
    """Return the shape of a preset, such as ``llama-3.1-8b``, or ``tiny``."""
    length = min(length, tokens)
    if name == "tiny":
        return Shape(32, 64, 4, 2, 8, layers, tokens // length, length, parts)
    model = preset(name)
    sizes = (model.hidden, model.intermediate, model.heads, model.kv_heads, model.head_dim)
    return Shape(*sizes, layers, tokens // length, length, parts)


class Layer(nn.Module):
    """A decoder layer: attention and a gated feed-forward part, each behind a norm and beside a residual.

    Args:
        shape: the sizes.
        column: divides a linear layer by its outputs; None to leave it whole.
        row: divides a linear layer by its inputs.
    """

    def __init__(self, shape: Shape, column: Divide | None = None, row: Divide | None = None):
        super().__init__()
        self.shape = shape
        heads = shape.heads * shape.head_dim
        kv_heads = shape.kv_heads * shape.head_dim
        column, row = column or nn.Identity(), row or nn.Identity()
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2))
        self.qkv = column(nn.Linear(shape.hidden, heads + 2 * kv_heads, bias=False))
        self.o = row(nn.Linear(heads, shape.hidden, bias=False))
        self.gate_up = column(nn.Linear(shape.hidden, 2 * shape.inner, bias=False))
        self.down = row(nn.Linear(shape.inner, shape.hidden, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self._attended(self.qkv(self.norms[0](x))))
        gate, up = self._by_part(self.gate_up(self.norms[1](x)), 2 * self.shape.inner).chunk(2, -1)
        out: torch.Tensor = x + self.down((F.silu(gate) * up).flatten(-2))
        return out

    def _by_part(self, x: torch.Tensor, whole: int) -> torch.Tensor:
        """Return [..., parts that are here, width of a part]."""
        return x.unflatten(-1, (-1, whole // self.shape.parts))

    def _attended(self, qkv: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        by_part = self._by_part(qkv, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        heads, kv_heads = (count // shape.parts for count in (shape.heads, shape.kv_heads))
        rows = by_part.unflatten(-1, (-1, shape.head_dim))  # [tokens, parts, heads, head_dim]
        q, k, v = (one.flatten(1, 2) for one in rows.split((heads, kv_heads, kv_heads), 2))
        q, k, v = (one.unflatten(0, (shape.sequences, shape.length)).transpose(1, 2) for one in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.transpose(1, 2).flatten(0, 1).flatten(1)


class Model(nn.Sequential):
    """Layers with the same weights for equal seeds, however they are divided."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, *divide: Divide):
        torch.manual_seed(0)
        with torch.device(device):
            previous = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                super().__init__(*(Layer(shape, *divide) for _ in range(shape.layers)))
            finally:
                torch.set_default_dtype(previous)


class Divided(nn.Module):
    """A part of a linear layer, whose sums over ranks are made by ``begin``.

    Args:
        linear: the whole layer.
        rank, ranks: which part this is.
        by_columns: it has a part of the outputs, and sums the gradient of its input; else a part of the inputs, and
            sums its output.
        begin: begins a sum. The gradient of the weights is computed before it is waited for.
    """

    def __init__(self, linear: nn.Linear, rank: int, ranks: int, by_columns: bool, begin: Begin):
        super().__init__()
        part = linear.weight.chunk(ranks, 0 if by_columns else 1)[rank]
        self.weight = nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format))
        self._function, self._begin = _Column if by_columns else _Row, begin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._function.apply(x, self.weight, self._begin)
        return out


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, begin: Begin) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.begin = begin
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        wait = ctx.begin(dx)
        dw = dy.t() @ x
        wait()
        return dx, dw, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, begin: Begin) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = F.linear(x, weight)
        begin(out)()
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x, None
