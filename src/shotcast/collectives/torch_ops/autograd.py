"""Derivatives of :mod:`shotcast.collectives.ops` in the form that PyTorch calls.

A call is differentiated if a tensor that it reads or writes requires grad. Then the call creates a new tensor, which is
copied to the output, so PyTorch's rules for copies apply. A derivative runs its calls on a communicator or, in a graph,
as operators that name the communicator. Operators could serve eager calls too, at three times the host cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shotcast.collectives.interface import Collectives
from shotcast.collectives.ops import OPS, Gradients, OpSpec, plain, refused

# mypy sees torch.autograd.Function as untyped


class _Recorded(torch.autograd.Function):
    """An operation on a communicator."""

    @staticmethod
    def forward(ctx: Any, spec: OpSpec, comm: Collectives, operands: dict[str, Any], *tensors: Any) -> Any:
        given = {name: None if x is None else x.detach() for name, x in zip(spec.tensors, tensors, strict=True)}
        result = spec.make(comm, operands | given)
        _keep(ctx, spec, operands, result)
        ctx.spec, ctx.by = spec, functools.partial(_eagerly, comm)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        return None, None, None, *_gradients(ctx, ctx.spec, grads)


def record(spec: OpSpec, comm: Collectives, operands: dict[str, Any]) -> Any:
    """Run an operation and record it for autograd; return its results, which are new tensors."""
    return _Recorded.apply(spec, comm, operands, *(operands[name] for name in spec.tensors))


def written(spec: OpSpec, comm: Collectives, out: torch.Tensor, operands: dict[str, Any]) -> torch.Tensor:
    """Record an operation, copy its result to ``out``, which has been checked, and return ``out``."""
    x = operands["x"]
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        operands["x"] = x.clone()  # the derivative may need what the copy overwrites
    return out.copy_(record(spec, comm, operands))


def in_graph(spec: OpSpec, comm: str, operands: dict[str, Any]) -> Any:
    """Run an operation as an operator."""
    given = spec.defaults | operands | {"comm": comm}
    return getattr(torch.ops.shotcast, spec.name)(*[given[name] for name in spec.operands])


def of_operator(spec: OpSpec) -> tuple[Callable[..., None], Callable[..., Gradients]]:
    """Return two functions for an operator: one that saves the context of its backward, and the backward."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        operands = dict(zip(spec.operands, inputs, strict=True))
        _keep(ctx, spec, operands, output)
        ctx.by = functools.partial(_traced, operands["comm"])

    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        gradients = _gradients(ctx, spec, grads)
        return *gradients, *(None,) * (len(spec.operands) - len(gradients))

    return keep, backward


def _keep(ctx: Any, spec: OpSpec, operands: dict[str, Any], result: Any) -> None:
    """Save what a derivative needs: non-tensor operands, and the tensors that the operation saves."""
    ctx.operands = {name: value for name, value in operands.items() if name not in spec.tensors}
    saved = spec.saves(result, **operands)
    ctx.saved = [name for name, value in saved.items() if isinstance(value, torch.Tensor)]
    ctx.operands.update({name: value for name, value in saved.items() if name not in ctx.saved})
    ctx.save_for_backward(*(saved[name] for name in ctx.saved))


def _gradients(ctx: Any, spec: OpSpec, grads: tuple[torch.Tensor, ...]) -> Gradients:
    assert spec.derivative is not None
    saved = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
    by = functools.partial(ctx.by, ctx.operands)
    found = spec.derivative(by, *map(plain, grads), **ctx.operands, **saved)
    return found if isinstance(found, tuple) else (found,)


def _eagerly(comm: Collectives, before: dict[str, Any], name: str, *tensors: torch.Tensor, **operands: Any) -> Any:
    spec = OPS[name]
    given = before | operands | dict(zip(spec.tensors, tensors, strict=True))
    if spec.derivative not in (None, refused) and torch.is_grad_enabled():
        return record(spec, comm, given)
    return spec.make(comm, given)


def _traced(comm: str, before: dict[str, Any], name: str, *tensors: torch.Tensor, **operands: Any) -> Any:
    spec = OPS[name]
    return in_graph(spec, comm, before | operands | dict(zip(spec.tensors, tensors, strict=True)))
