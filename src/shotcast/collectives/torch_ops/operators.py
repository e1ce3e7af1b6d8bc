"""The collectives as PyTorch operators, ``torch.ops.shotcast.*``, which torch.compile puts in its graphs.

:class:`~shotcast.collectives.communicator.Communicator` calls these while it is traced. Eager calls bypass them, as an
operator costs the host as much again as the call. An operator takes only numbers, strings and tensors, so a
communicator is given by its name, together with the numbers that shapes depend on: ``world_size`` and, for uneven
parts, ``rank``. Compiled code is cached by the contents of a graph, and ranks share the cache.

Operators write to new tensors. They take any strides, as a compiler may choose the layout of a tensor. They are
ordered: a compiler runs all calls of a graph, used or not, in the order of the program. Otherwise it would drop unused
calls and reorder others depending on sizes, which may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shotcast.collectives.arguments import output, rows_per_rank, without_gradient, writable
from shotcast.collectives.interface import Collectives
from shotcast.collectives.norm_operands import Fp8Normed, norm_rows
from shotcast.collectives.torch_ops import autograd, autograd_norm, inductor
from shotcast.collectives.torch_ops.communicators import named
from shotcast.errors import ConfigError, UnsupportedError

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The tensors of an Fp8Normed, all four: those that the caller gave or did not request are empty."""

_library = torch.library.Library("shotcast", "DEF")

OPERATORS: list[str] = []
"""The names of the operators in ``torch.ops.shotcast``."""


def operator(schema: str, shaped: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define ``shotcast::schema``, run by the decorated function; ``shaped`` returns results of the right shapes."""
    name = schema[: schema.index("(")]
    _library.define(schema)
    try:
        torch.library._register_effectful_op(f"shotcast::{name}", torch.library.EffectType.ORDERED, lib=_library)
        obstacle = ""
    except AttributeError as error:  # there is no public name for it
        obstacle = str(error)

    def traced(*args: Any, **kwargs: Any) -> Any:
        if obstacle:
            raise UnsupportedError(f"PyTorch {torch.__version__} cannot order operators in a graph: {obstacle}")
        inductor.order(OPERATORS)
        return shaped(*args, **kwargs)

    torch.library.register_fake(f"shotcast::{name}", traced, lib=_library)
    OPERATORS.append(name)

    def run_by(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(name, function, "CompositeExplicitAutograd")
        return function

    return run_by


# -- operators --------------------------------------------------------------------------------------------------------


def _like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _part(x: torch.Tensor, comm: str, world_size: int, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((rows_per_rank(x, world_size, "reduce_scatter"), *x.shape[1:]))


def _joined(x: torch.Tensor, comm: str, world_size: int, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0] * world_size, *x.shape[1:]))


def _joined_uneven(x: torch.Tensor, comm: str, sizes: Sequence[int], *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((sum(sizes), *x.shape[1:]))


def _received(
    x: torch.Tensor, comm: str, sent: Sequence[int], received: Sequence[int], *_: Any, **__: Any
) -> torch.Tensor:
    return x.new_empty((sum(received), *x.shape[1:]))


def normed(x: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results of the right shapes."""
    return x.new_empty(residual.shape), residual.new_empty(residual.shape)


def normed_of_all(x: torch.Tensor, residual: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results of the right shapes; the last two operands are ``gather`` and ``algorithm``."""
    return x.new_empty(x.shape if others[-2] else residual.shape), residual.new_empty(residual.shape)


def quantized(*operands: Any) -> Quantized:
    """Return results of the right shapes; see :func:`quantized_of_all`."""
    return quantized_of_all(*(*operands[:-1], False, operands[-1]))


def quantized_of_all(x: torch.Tensor, residual: torch.Tensor, *others: Any) -> Quantized:
    """Return results of the right shapes; the last operands begin with ``scale``."""
    scale, _comm, _eps, with_normed, gather, _algorithm = others[-6:]
    shape = x.shape if gather else residual.shape
    found = (*shape[:-1], 1) if scale is None else 0
    return (
        x.new_empty(shape, dtype=torch.float8_e4m3fn),
        x.new_empty(found, dtype=torch.float32),
        residual.new_empty(residual.shape),
        x.new_empty(shape if with_normed else 0),
    )


def _nothing(*_: Any, **__: Any) -> None:
    return None


@operator("all_reduce(Tensor x, str comm, str algorithm, str reduction, int? sms=None) -> Tensor", _like)
def _all_reduce(x: torch.Tensor, comm: str, algorithm: str, reduction: str, sms: int | None = None) -> torch.Tensor:
    return named(comm).all_reduce(x.contiguous(), algorithm=algorithm, reduction=reduction, sms=sms)


@operator(
    "reduce_scatter(Tensor x, str comm, int world_size, str algorithm, str reduction, bool strict=True, "
    "int? sms=None) -> Tensor",
    _part,
)
def _reduce_scatter(
    x: torch.Tensor,
    comm: str,
    world_size: int,
    algorithm: str,
    reduction: str,
    strict: bool = True,
    sms: int | None = None,
) -> torch.Tensor:
    """Run a reduce_scatter; unless ``strict``, take another algorithm if this one cannot serve."""
    x, by = x.contiguous(), named(comm)
    algorithm = algorithm if strict else autograd.where_legal(by, x, algorithm, sms)
    return by.reduce_scatter(x, algorithm=algorithm, reduction=reduction, sms=sms)


@operator("all_gather(Tensor x, str comm, int world_size, str algorithm, int? sms=None) -> Tensor", _joined)
def _all_gather(x: torch.Tensor, comm: str, world_size: int, algorithm: str, sms: int | None = None) -> torch.Tensor:
    return named(comm).all_gather(x.contiguous(), algorithm=algorithm, sms=sms)


@operator(
    "all_gather_uneven(Tensor x, str comm, SymInt[] sizes, int rank, str algorithm, int? sms=None) -> Tensor",
    _joined_uneven,
)
def _all_gather_uneven(
    x: torch.Tensor, comm: str, sizes: Sequence[int], rank: int, algorithm: str, sms: int | None = None
) -> torch.Tensor:
    by = named(comm)
    if rank != by.rank:
        raise ConfigError(f"all_gather_uneven was compiled on rank {rank} and runs on rank {by.rank}")
    return by.all_gather(x.contiguous(), sizes=sizes, algorithm=algorithm, sms=sms)


@operator("all_to_all(Tensor x, str comm, str algorithm, int? sms=None) -> Tensor", _like)
def _all_to_all(x: torch.Tensor, comm: str, algorithm: str, sms: int | None = None) -> torch.Tensor:
    return named(comm).all_to_all(x.contiguous(), algorithm=algorithm, sms=sms)


@operator(
    "all_to_all_uneven(Tensor x, str comm, SymInt[] sent, SymInt[] received, int rank, str algorithm) -> Tensor",
    _received,
)
def _all_to_all_uneven(
    x: torch.Tensor, comm: str, sent: Sequence[int], received: Sequence[int], rank: int, algorithm: str
) -> torch.Tensor:
    by = named(comm)
    if rank != by.rank:
        raise ConfigError(f"all_to_all_uneven was compiled on rank {rank} and runs on rank {by.rank}")
    return by.all_to_all(x.contiguous(), algorithm=algorithm, input_sizes=sent, output_sizes=received)


@operator("broadcast(Tensor x, str comm, int root, str algorithm) -> Tensor", _like)
def _broadcast(x: torch.Tensor, comm: str, root: int, algorithm: str) -> torch.Tensor:
    return autograd.broadcast_copy(named(comm), x, root, algorithm)


@operator("send(Tensor x, str comm, int dst) -> ()", _nothing)
def _send(x: torch.Tensor, comm: str, dst: int) -> None:
    named(comm).send(x.contiguous(), dst)


@operator("recv(Tensor x, str comm, int src) -> Tensor", _like)
def _recv(x: torch.Tensor, comm: str, src: int) -> torch.Tensor:
    """Receive into a new tensor like ``x``."""
    return named(comm).recv(x.new_empty(x.shape), src)


@operator("all_reduce_gradient(Tensor x, Tensor grad, str comm, str reduction, int? sms=None) -> Tensor", _like)
def _all_reduce_gradient(
    x: torch.Tensor, grad: torch.Tensor, comm: str, reduction: str, sms: int | None = None
) -> torch.Tensor:
    return autograd.all_reduce_gradient(named(comm), x, grad.contiguous(), reduction, sms)


@operator("reduce_scatter_gradient(Tensor x, Tensor grad, str comm, str reduction, int? sms=None) -> Tensor", _like)
def _reduce_scatter_gradient(
    x: torch.Tensor, grad: torch.Tensor, comm: str, reduction: str, sms: int | None = None
) -> torch.Tensor:
    return autograd.reduce_scatter_gradient(named(comm), x, grad.contiguous(), reduction, sms)


@operator("sum_at_root(Tensor x, str comm, int root) -> Tensor", _like)
def _sum_at_root(x: torch.Tensor, comm: str, root: int) -> torch.Tensor:
    return autograd.sum_at_root(named(comm), x.contiguous(), root)


@operator("barrier(str comm) -> ()", _nothing)
def _barrier(comm: str) -> None:
    named(comm).barrier()


@operator(
    "all_reduce_rms_norm(Tensor x, Tensor residual, Tensor weight, str comm, float eps, str algorithm)"
    " -> (Tensor, Tensor)",
    normed,
)
def _all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, comm: str, eps: float, algorithm: str
) -> tuple[torch.Tensor, torch.Tensor]:
    call = named(comm).all_reduce_rms_norm
    return call(x.contiguous(), residual.contiguous(), weight.contiguous(), eps, algorithm)


@operator(
    "all_reduce_rms_norm_fp8(Tensor x, Tensor residual, Tensor weight, Tensor? scale, str comm, float eps, "
    "bool with_normed, str algorithm) -> (Tensor, Tensor, Tensor, Tensor)",
    quantized,
)
def _all_reduce_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    comm: str,
    eps: float,
    with_normed: bool,
    algorithm: str,
) -> Quantized:
    call = named(comm).all_reduce_rms_norm_fp8
    operands = x.contiguous(), residual.contiguous(), weight.contiguous()
    return all_four(call(*operands, eps, scale, with_normed, algorithm), scale)


@operator(
    "reduce_scatter_rms_norm(Tensor x, Tensor residual, Tensor weight, str comm, float eps, bool gather, "
    "str algorithm) -> (Tensor, Tensor)",
    normed_of_all,
)
def _reduce_scatter_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, comm: str, eps: float, gather: bool, algorithm: str
) -> tuple[torch.Tensor, torch.Tensor]:
    call = named(comm).reduce_scatter_rms_norm
    return call(x.contiguous(), residual.contiguous(), weight.contiguous(), eps, gather, algorithm)


@operator(
    "reduce_scatter_rms_norm_fp8(Tensor x, Tensor residual, Tensor weight, Tensor? scale, str comm, float eps, "
    "bool with_normed, bool gather, str algorithm) -> (Tensor, Tensor, Tensor, Tensor)",
    quantized_of_all,
)
def _reduce_scatter_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    comm: str,
    eps: float,
    with_normed: bool,
    gather: bool,
    algorithm: str,
) -> Quantized:
    call = named(comm).reduce_scatter_rms_norm_fp8
    operands = x.contiguous(), residual.contiguous(), weight.contiguous()
    return all_four(call(*operands, eps, scale, with_normed, gather, algorithm), scale)


def all_four(result: Fp8Normed, scale: torch.Tensor | None) -> Quantized:
    """Return the tensors of ``result`` that the call made, and empty ones for the others."""
    quantized, found, new_residual, normed = result
    if scale is not None:
        found = found.new_empty(0)
    return quantized, found, new_residual, new_residual.new_empty(0) if normed is None else normed


def register_derivatives(derivatives: Mapping[str, tuple[Callable[..., None], Callable[..., Any]]]) -> None:
    """Register how operators save the context of a backward, and that, by their names."""
    for name, (keep, backward) in derivatives.items():
        torch.library.register_autograd(f"shotcast::{name}", backward, setup_context=keep, lib=_library)


register_derivatives(autograd.OPERATORS | autograd_norm.OPERATORS)

# -- calls of a communicator ------------------------------------------------------------------------------------------


def written(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Copy ``result`` to ``out``, which has been checked, and return it.

    A compiler removes the copy if nothing else uses ``out``.
    """
    return out.copy_(result)


def kept(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return a copy of ``x`` if a derivative needs its values, which the copy to ``out`` may overwrite."""
    return x.clone() if reduction not in autograd.LINEAR and x.requires_grad and torch.is_grad_enabled() else x


def all_reduce(
    comm: Collectives, x: torch.Tensor, out: torch.Tensor | None, algorithm: str, reduction: str, sms: int | None
) -> torch.Tensor:
    """Run :meth:`Communicator.all_reduce` as an operator."""
    if out is not None:
        output(x, out, x.shape)
        x = kept(x, reduction)
    result = torch.ops.shotcast.all_reduce(x, comm.name, algorithm, reduction, sms)
    return result if out is None else written(out, result)


def reduce_scatter(
    comm: Collectives, x: torch.Tensor, out: torch.Tensor | None, algorithm: str, reduction: str, sms: int | None
) -> torch.Tensor:
    """Run :meth:`Communicator.reduce_scatter` as an operator."""
    rows = rows_per_rank(x, comm.world_size, "reduce_scatter")
    if out is not None:
        output(x, out, (rows, *x.shape[1:]))
        x = kept(x, reduction)
    result = torch.ops.shotcast.reduce_scatter(x, comm.name, comm.world_size, algorithm, reduction, True, sms)
    return result if out is None else written(out, result)


def all_gather(
    comm: Collectives,
    x: torch.Tensor,
    out: torch.Tensor | None,
    sizes: Sequence[int] | None,
    algorithm: str,
    sms: int | None,
) -> torch.Tensor:
    """Run :meth:`Communicator.all_gather` as operators; ``x`` has a dimension, and ``sizes`` have been checked."""
    if out is not None:
        output(x, out, (x.shape[0] * comm.world_size if sizes is None else sum(sizes), *x.shape[1:]))
    if sizes is None:
        result = torch.ops.shotcast.all_gather(x, comm.name, comm.world_size, algorithm, sms)
    else:
        result = torch.ops.shotcast.all_gather_uneven(x, comm.name, sizes, comm.rank, algorithm, sms)
    return result if out is None else written(out, result)


def all_to_all(
    comm: Collectives, x: torch.Tensor, out: torch.Tensor | None, algorithm: str, sms: int | None
) -> torch.Tensor:
    """Run :meth:`Communicator.all_to_all` as an operator."""
    if out is not None:
        output(x, out, x.shape)
    result = torch.ops.shotcast.all_to_all(x, comm.name, algorithm, sms)
    return result if out is None else written(out, result)


def all_to_all_uneven(
    comm: Collectives,
    x: torch.Tensor,
    out: torch.Tensor | None,
    algorithm: str,
    sent: tuple[int, ...],
    received: tuple[int, ...],
) -> torch.Tensor:
    """Run :meth:`Communicator.all_to_all` with sizes, which have been checked, as an operator."""
    if out is not None:
        output(x, out, (sum(received), *x.shape[1:]))
    result = torch.ops.shotcast.all_to_all_uneven(x, comm.name, sent, received, comm.rank, algorithm)
    return result if out is None else written(out, result)


def broadcast(comm: Collectives, x: torch.Tensor, root: int, algorithm: str) -> torch.Tensor:
    """Run :meth:`Communicator.broadcast` as an operator."""
    writable(x, "x")
    return written(x, torch.ops.shotcast.broadcast(x, comm.name, root, algorithm))


def send(comm: Collectives, x: torch.Tensor, dst: int) -> None:
    """Run :meth:`Communicator.send` as an operator."""
    torch.ops.shotcast.send(x.detach(), comm.name, dst)


def recv(comm: Collectives, x: torch.Tensor, src: int) -> torch.Tensor:
    """Run :meth:`Communicator.recv` as an operator."""
    writable(x, "x")
    return written(x, torch.ops.shotcast.recv(x.detach(), comm.name, src))


def barrier(comm: Collectives) -> None:
    """Run :meth:`Communicator.barrier` as an operator."""
    torch.ops.shotcast.barrier(comm.name)


def all_reduce_rms_norm(
    comm: Collectives,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    algorithm: str,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run :meth:`Communicator.all_reduce_rms_norm` as an operator."""
    norm_rows("all_reduce_rms_norm", comm.device, x, residual, weight, eps, 1)
    operands = x, residual, weight
    normed, new_residual = torch.ops.shotcast.all_reduce_rms_norm(*operands, comm.name, eps, algorithm)
    return (normed, new_residual) if out is None else norms_written("all_reduce_rms_norm", out, normed, new_residual)


def all_reduce_rms_norm_fp8(
    comm: Collectives,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    with_normed: bool,
    algorithm: str,
    out: Fp8Normed | None,
) -> Fp8Normed:
    """Run :meth:`Communicator.all_reduce_rms_norm_fp8` as an operator."""
    norm_rows("all_reduce_rms_norm_fp8", comm.device, x, residual, weight, eps, 1)
    without_gradient("all_reduce_rms_norm_fp8", x=x, residual=residual, weight=weight, scale=scale)
    operands = x.detach(), residual.detach(), weight.detach(), None if scale is None else scale.detach()
    made = torch.ops.shotcast.all_reduce_rms_norm_fp8(*operands, comm.name, eps, with_normed, algorithm)
    return fp8_written("all_reduce_rms_norm_fp8", out, made, scale, with_normed)


def reduce_scatter_rms_norm(
    comm: Collectives,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gather: bool,
    algorithm: str,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run :meth:`Communicator.reduce_scatter_rms_norm` as an operator."""
    name = "reduce_scatter_rms_norm"
    norm_rows(name, comm.device, x, residual, weight, eps, comm.world_size)
    operands = x, residual, weight
    normed, new_residual = torch.ops.shotcast.reduce_scatter_rms_norm(*operands, comm.name, eps, gather, algorithm)
    return (normed, new_residual) if out is None else norms_written(name, out, normed, new_residual)


def reduce_scatter_rms_norm_fp8(
    comm: Collectives,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    with_normed: bool,
    gather: bool,
    algorithm: str,
    out: Fp8Normed | None,
) -> Fp8Normed:
    """Run :meth:`Communicator.reduce_scatter_rms_norm_fp8` as an operator."""
    norm_rows("reduce_scatter_rms_norm_fp8", comm.device, x, residual, weight, eps, comm.world_size)
    without_gradient("reduce_scatter_rms_norm_fp8", x=x, residual=residual, weight=weight, scale=scale)
    operands = x.detach(), residual.detach(), weight.detach(), None if scale is None else scale.detach()
    made = torch.ops.shotcast.reduce_scatter_rms_norm_fp8(*operands, comm.name, eps, with_normed, gather, algorithm)
    return fp8_written("reduce_scatter_rms_norm_fp8", out, made, scale, with_normed)


def norms_written(
    name: str, out: tuple[torch.Tensor, torch.Tensor], normed: torch.Tensor, new_residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy results to ``out``, which is checked first, and return it."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise ConfigError(f"{name}: out is (normed, new_residual)")
    return _checked_written(out[0], normed), _checked_written(out[1], new_residual)


def fp8_written(
    name: str, out: Fp8Normed | None, made: Quantized, scale: torch.Tensor | None, with_normed: bool
) -> Fp8Normed:
    """Return the results that an operator made, copied to ``out`` if it is given."""
    quantized, found, new_residual, normed = made
    if out is None:
        given = found if scale is None else scale
        return Fp8Normed(quantized, given, new_residual, normed if with_normed else None)
    if not isinstance(out, tuple) or len(out) != 4:
        raise ConfigError(f"{name}: out is (quantized, scale, new_residual, normed)")
    return Fp8Normed(
        _checked_written(out[0], quantized),
        _checked_written(out[1], found) if scale is None else scale,
        _checked_written(out[2], new_residual),
        _checked_written(out[3], normed) if with_normed else None,
    )


def _checked_written(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    if out is None:
        raise ConfigError(f"out must be {list(result.shape)} of {result.dtype}; it is None")
    return written(output(result, out, result.shape), result)
