"""The collectives as PyTorch operators, ``torch.ops.shotcast.*``, which torch.compile puts in its graphs.

:class:`~shotcast.collectives.communicator.Communicator` calls these while it is traced. Eager calls bypass them,
because an operator doubles the host cost of a call. An operator takes only numbers, strings and tensors, so a
communicator is given by its name, together with the numbers that shapes depend on: ``world_size`` and, for uneven
parts, ``rank``. Compiled code is cached by the contents of a graph, and ranks share the cache.

Operators write to new tensors. They accept any strides, since a compiler may choose the layout of a tensor. They are
ordered: a compiler runs all calls of a graph, used or not, in program order. Otherwise it would drop unused calls and
reorder others depending on sizes, which may differ between ranks.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from shotcast.collectives.arguments import output, without_gradient
from shotcast.collectives.interface import Collectives
from shotcast.collectives.norm_operands import MEMBERS, Fp8Normed, check_rows, norm_members
from shotcast.collectives.ops import LINEAR, OPS, OpSpec
from shotcast.collectives.torch_ops import autograd, inductor
from shotcast.errors import ConfigError, UnsupportedError

_communicators: weakref.WeakValueDictionary[str, Collectives] = weakref.WeakValueDictionary()


def register(comm: Collectives) -> None:
    """Register ``comm`` under its name for as long as it lives."""
    _communicators[comm.name] = comm


def named(name: str) -> Collectives:
    """Return the communicator called ``name``. Raises ConfigError if this process has none."""
    comm = _communicators.get(name)
    if comm is None:
        known = ", ".join(sorted(_communicators)) or "none"
        raise ConfigError(
            f"no communicator of this process is called {name!r} (there are: {known}); the one that a graph was "
            f"compiled with must live as long as the graph is used"
        )
    return comm


_library = torch.library.Library("shotcast", "DEF")

OPERATORS: list[str] = []
"""The names of the operators in ``torch.ops.shotcast``."""


def _register(spec: OpSpec) -> None:
    """Define the operator of an operation: what runs it, the shapes of its results, and its derivative."""
    name = f"shotcast::{spec.name}"
    _library.define(spec.schema)
    try:
        torch.library._register_effectful_op(name, torch.library.EffectType.ORDERED, lib=_library)
        unsupported_reason = ""
    except AttributeError as error:  # there is no public name for it
        unsupported_reason = str(error)

    def run(*args: Any) -> Any:
        operands = dict(zip(spec.operands, args, strict=False))  # without defaults
        comm = named(operands.pop("comm"))
        if operands.get("rank", comm.rank) != comm.rank:
            raise ConfigError(f"{spec.name} was compiled on rank {operands['rank']} and runs on rank {comm.rank}")
        for tensor in spec.tensors:
            if operands[tensor] is not None:
                operands[tensor] = operands[tensor].contiguous()
        return spec.make(comm, operands)

    def empty(*args: Any, **kwargs: Any) -> Any:
        if unsupported_reason:
            raise UnsupportedError(
                f"PyTorch {torch.__version__} cannot order operators in a graph: {unsupported_reason}"
            )
        inductor.order(OPERATORS)
        return spec.empty(dict(zip(spec.operands, args, strict=False)) | kwargs)

    torch.library.register_fake(name, empty, lib=_library)
    _library.impl(spec.name, run, "CompositeExplicitAutograd")
    OPERATORS.append(spec.name)
    if spec.derivative is not None:
        keep, backward = autograd.of_operator(spec)
        torch.library.register_autograd(name, backward, setup_context=keep, lib=_library)


for _spec in OPS.values():
    _register(_spec)

# -- calls of a communicator ------------------------------------------------------------------------------------------


def traced(spec: OpSpec, comm: Collectives, out: torch.Tensor | None, operands: dict[str, Any]) -> torch.Tensor:
    """Run an operation as an operator; its result is copied to ``out`` if given.

    A compiler removes the copy if nothing else uses ``out``.
    """
    if out is not None:
        x = operands["x"]
        output(x, out, spec.shape(**operands), spec.method)
        if operands.get("reduction", "sum") not in LINEAR and x.requires_grad and torch.is_grad_enabled():
            operands["x"] = x.clone()  # the derivative needs values that the copy may overwrite
    result: torch.Tensor = autograd.in_graph(spec, comm.name, operands)
    return result if out is None else out.copy_(result)


def traced_norm(spec: OpSpec, comm: Collectives, out: Any, operands: dict[str, Any]) -> Any:
    """Run a fused operation as an operator, with results copied to ``out``; results it does not produce are None."""
    fp8, scale, bias = spec.derivative is None, operands["scale"], operands["bias"]
    checked = operands["x"], operands["residual"], operands["weight"], operands["eps"], bias
    check_rows(spec.name, comm.device, *checked)
    if fp8:
        tensors = {name: operands[name] for name in spec.tensors}
        without_gradient(spec.name, **tensors)
        operands = operands | {name: None if x is None else x.detach() for name, x in tensors.items()}
    made = dict(zip(MEMBERS[fp8], autograd.in_graph(spec, comm.name, operands), strict=True))
    given = made if out is None else norm_members(spec.name, out, fp8)
    skipped = {"scale": scale} if scale is not None else {}
    if not operands["with_normed"]:
        skipped["normed"] = None
    results = {
        name: skipped[name] if name in skipped else result if out is None else _copied(spec.name, given[name], result)
        for name, result in made.items()
    }
    return Fp8Normed(**results) if fp8 else tuple(results.values())


def _copied(call: str, out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    if out is None:
        raise ConfigError(f"{call}: out must be {list(result.shape)} of {result.dtype}; it is None")
    return output(result, out, result.shape, call).copy_(result)
