"""The operations, each defined once: operands, result shape, the call that runs it, and its derivative.

Everything else derives from that: the argument checks of the Communicator's methods (``calls/caller.py``), the autograd
functions (``torch_ops/autograd.py``), and PyTorch's operators with their fake kernels (``torch_ops/operators.py``).

A derivative is the transpose of the linear map that the call computes, or of its slope. The tensors must require grad
on all ranks or on none, since derivatives are collectives too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shotcast.collectives.arguments import rows_per_rank
from shotcast.collectives.norm_operands import MEMBERS, norm_results
from shotcast.errors import UnsupportedError
from shotcast.wire import Op

Shape = tuple[int, ...]
Gradients = tuple[torch.Tensor | None, ...]
By = Callable[..., Any]
"""``by(name, *tensors, **operands)`` runs an operation; omitted operands default to the forward call's."""

LINEAR = ("sum", "avg")
"""Reductions whose derivative does not need their inputs."""
_FACTS = ("comm", "world_size", "rank", "parts", "shape", "strict")
"""Operands that a Communicator's methods do not take: the communicator, and the numbers that shapes depend on."""
_DEFAULTS = {"True": True, "None": None}


@dataclass(frozen=True, eq=False)
class OpSpec:
    """An operation. All functions take its operands by name, and ignore others."""

    # of the operator, as PyTorch has it; tensors come first. A communicator is a name, beside the numbers that shapes
    # depend on: `world_size`; `rank`, for uneven parts; `parts`, 0 for no result on this rank
    schema: str
    op: Op | None = None  # its code; None for an operation that consists of others
    # returns the shape of the result. Raises ConfigError for operands that it has none for
    shape: Callable[..., Shape] = lambda x, **_: x.shape
    # returns the byte of the larger of `x` and `out` at which the smaller may begin; None where `x` is not read
    own_at: Callable[..., int | None] = lambda **_: 0
    in_place: bool = True  # whether `out` may be `x`
    call: Callable[..., Any] | None = None  # makes it on a communicator; the method of its name, unless given
    results: Callable[..., Any] | None = None  # returns new tensors for the results
    # returns what the derivative needs of the result and the operands
    saves: Callable[..., dict[str, Any]] = lambda result, **_: {}
    # returns the gradients of the tensors, in their order, from `by` and those of the results
    derivative: Callable[..., Any] | None = None
    name: str = field(init=False)  # this and those below: of the schema
    operands: tuple[str, ...] = field(init=False)
    tensors: tuple[str, ...] = field(init=False)
    defaults: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        name, _, rest = self.schema.partition("(")
        operands = [operand.split() for operand in rest.partition(")")[0].split(", ")]
        names = [operand.partition("=") for _, operand in operands]
        found = {
            "name": name,
            "operands": tuple(operand for operand, _, _ in names),
            "tensors": tuple(operand for kind, operand in operands if kind.startswith("Tensor")),
            "defaults": {operand: _DEFAULTS[default] for operand, _, default in names if default},
        }
        for attribute, value in found.items():
            object.__setattr__(self, attribute, value)

    @property
    def method(self) -> str:
        """The name of the method that runs the operation."""
        return self.name.removesuffix("_uneven")

    def make(self, comm: Any, operands: dict[str, Any]) -> Any:
        """Run the operation on a communicator; extra ``operands`` are ignored."""
        operands = self.defaults | operands
        if self.call is not None:
            return self.call(comm, **operands)
        method = getattr(comm, self.method)
        return method(**{name: operands[name] for name in self.operands if name not in _FACTS})

    def empty(self, operands: dict[str, Any]) -> Any:
        """Return new tensors for the results; None if there are none."""
        if self.results is not None:
            return self.results(**operands)
        return operands["x"].new_empty(self.shape(**operands)) if self.schema.endswith("Tensor") else None


# -- shapes, and places of a rank's own part --------------------------------------------------------------------------


def _part(x: torch.Tensor, world_size: int, *, name: str, **_: Any) -> Shape:
    return (rows_per_rank(x, world_size, name), *x.shape[1:])


def _parts(x: torch.Tensor, world_size: int, **_: Any) -> Shape:
    return (x.shape[0] * world_size, *x.shape[1:])


def _rows(x: torch.Tensor, sizes: Sequence[int], **_: Any) -> Shape:
    return (sum(sizes), *x.shape[1:])


def _share_before(x: torch.Tensor, world_size: int, rank: int, **_: Any) -> int:
    return rank * (x.nbytes // world_size)


def _rows_before(x: torch.Tensor, sizes: Sequence[int], rank: int, **_: Any) -> int:
    return sum(sizes[:rank]) * math.prod(x.shape[1:]) * x.element_size()


# -- calls that are more than a method --------------------------------------------------------------------------------


def _reduce_scatter(
    comm: Any, x: torch.Tensor, algorithm: str, reduction: str, strict: bool, sms: int | None, **_: Any
) -> Any:
    """Run a reduce_scatter; unless ``strict``, fall back to another algorithm if this one cannot serve it.

    An algorithm that gathers a dtype may be unable to add it.
    """
    if not strict and algorithm not in comm.candidates(x, "reduce_scatter", sms):
        algorithm = "auto"
    return comm.reduce_scatter(x, algorithm=algorithm, reduction=reduction, sms=sms)


def _broadcast(comm: Any, x: torch.Tensor, root: int, algorithm: str, sms: int | None = None, **_: Any) -> Any:
    out = x.new_empty(x.shape)
    if comm.rank == root:
        out.copy_(x.detach())
    return comm.broadcast(out, root, algorithm, sms)


def _sum_at_root(comm: Any, x: torch.Tensor, root: int, **_: Any) -> torch.Tensor:
    """Return the sum over all ranks at ``root``, zeros elsewhere."""
    total: torch.Tensor = comm.all_reduce(x)
    return total if comm.rank == root else torch.zeros_like(total)


def _all_reduce_gradient(
    comm: Any, x: torch.Tensor, grad: torch.Tensor, reduction: str, sms: int | None, **_: Any
) -> torch.Tensor:
    """Return the gradient of a ``max``, ``min`` or ``prod`` of all ranks' ``x``, computed by :func:`_slopes`."""
    parts = comm.all_gather(x.contiguous().view(1, *x.shape), sms=sms)  # [N, ...]
    return _slopes(parts, comm.all_reduce(grad, sms=sms), reduction)[comm.rank].clone()


def _reduce_scatter_gradient(
    comm: Any, x: torch.Tensor, grad: torch.Tensor, reduction: str, sms: int | None, **_: Any
) -> Any:
    """Return the gradient of this rank's ``x``; ``grad`` is the gradient of its part of the result."""
    parts = comm.all_to_all(x.contiguous(), sms=sms).view(comm.world_size, *grad.shape)  # what the part is made of
    return comm.all_to_all(_slopes(parts, grad, reduction).view(x.shape), sms=sms)


def _spread(
    comm: Any, grad: torch.Tensor, shape: Sequence[int], root: int, reduction: str = "sum", **_: Any
) -> torch.Tensor:
    """Return the gradient of each rank's part of a sum or an average at ``root``.

    ``grad`` is the gradient of the result, of this shape at the root and empty elsewhere.
    """
    whole = grad.clone() if comm.rank == root else grad.new_zeros(tuple(shape)) + grad.sum()
    return _share(comm.broadcast(whole, root), reduction, comm.world_size)


def _reduce_gradient(
    comm: Any, x: torch.Tensor, grad: torch.Tensor, root: int, reduction: str, **_: Any
) -> torch.Tensor:
    """Return the gradient of ``x``; ``grad`` is the gradient of the result at the root, empty elsewhere."""
    whole = _spread(comm, grad, x.shape, root)
    parts = comm.all_gather(x.contiguous().view(1, *x.shape))
    return _slopes(parts, whole, reduction)[comm.rank].clone()


def _scattered(comm: Any, x: torch.Tensor, root: int, shape: Sequence[int], algorithm: str, **_: Any) -> Any:
    """Return this rank's part of the root's tensor; the other ranks pass an empty one."""
    if comm.rank != root:
        x = x.new_zeros((shape[0] * comm.world_size, *shape[1:])) + x.sum()
    return comm.scatter(x, root, algorithm=algorithm)


def _gathered_or_zeros(comm: Any, x: torch.Tensor, root: int, algorithm: str, **_: Any) -> torch.Tensor:
    """Return the parts of all ranks at the root, and zeros of that shape elsewhere."""
    whole: torch.Tensor = comm.gather(x, root, algorithm=algorithm)
    return whole if comm.rank == root else x.new_zeros(_parts(x, comm.world_size)) + whole.sum()


# -- derivatives ------------------------------------------------------------------------------------------------------


def _of_reduce_scatter(
    by: By, grad: torch.Tensor, reduction: str, world_size: int, x: torch.Tensor | None = None, **_: Any
) -> Any:
    """y_i = sum_r x_r[i], so dx_i = (dy_0, ..., dy_{N-1}), divided by N for the average."""
    if reduction in LINEAR:
        return _share(by("all_gather", grad), reduction, world_size)
    return by("reduce_scatter_gradient", x, grad)


def _of_all_gather_uneven(by: By, grad: torch.Tensor, sizes: Sequence[int], rank: int, **_: Any) -> torch.Tensor:
    """Sum all of dy and take this rank's part, since uneven parts have no reduce_scatter."""
    total: torch.Tensor = by("all_reduce", grad, algorithm="auto", reduction="sum")
    start = sum(sizes[:rank])
    return total[start : start + sizes[rank]].clone()


def _of_norm(
    by: By,
    d_normed: torch.Tensor,
    d_residual: torch.Tensor,
    new_residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    biased: bool,
    *,
    layer: bool,
    **_: Any,
) -> Gradients:
    """Return the gradients of x, residual, weight and bias, through the norm, the residual add and the sum.

    With y = r / rms(r), the gradient of r is (g - y mean(g y)) / rms(r), where g is the gradient of y; in float32. The
    same holds for r minus its mean, which also subtracts the mean of the gradient.
    """
    by = functools.partial(by, algorithm="auto", reduction="sum")
    d_normed = d_normed.float()
    rows = new_residual.float()
    if layer:
        rows = rows - rows.mean(-1, keepdim=True)
    inverse = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    unit = rows * inverse
    d_unit = d_normed * weight.float()
    d_rows = inverse * (d_unit - unit * (d_unit * unit).mean(-1, keepdim=True))
    if layer:
        d_rows = d_rows - d_rows.mean(-1, keepdim=True)
    d_residual = (d_rows + d_residual.float()).to(new_residual.dtype)
    d_weight = (d_normed * unit).view(-1, weight.shape[0]).sum(0).to(weight.dtype)
    d_x = by("all_reduce", plain(d_residual))
    if not layer:
        return d_x, d_residual, d_weight
    d_bias = d_normed.view(-1, weight.shape[0]).sum(0).to(weight.dtype) if biased else None
    return d_x, d_residual, d_weight, d_bias


def refused(*_: Any, **__: Any) -> Any:
    """Raise UnsupportedError: in a graph, single-operator derivatives are not differentiable, unlike in eager calls."""
    raise UnsupportedError(
        "max, min, prod and calls with a root have no second derivative in a graph; make the call eagerly"
    )


def plain(grad: torch.Tensor) -> torch.Tensor:
    """Materialize a gradient for calls: autograd conjugates and negates lazily."""
    return grad.resolve_conj().resolve_neg().contiguous()


def _share(grad: torch.Tensor, reduction: str, world_size: int) -> torch.Tensor:
    """Return the gradient of a rank's part of a sum or an average, given the gradient of the whole."""
    return grad if reduction == "sum" else grad / world_size


def _slopes(parts: torch.Tensor, grad: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the gradients of ``parts`` [N, ...] given the gradient of their reduction, as PyTorch defines them.

    A maximum or minimum divides its gradient equally among the parts that attain it (``torch.amax``); the slope of a
    part of a product is the product of the others.
    """
    if reduction == "prod":
        one = torch.ones_like(parts[:1])
        before = torch.cat([one, parts[:-1]]).cumprod(0)
        after = torch.cat([one, parts.flip(0)[:-1]]).cumprod(0).flip(0)
        return (before * after).conj() * grad
    reached = parts == (parts.amax(0) if reduction == "max" else parts.amin(0))
    return reached * grad / reached.sum(0)


def _reduced(result: torch.Tensor, x: torch.Tensor, reduction: str, **_: Any) -> dict[str, Any]:
    return {"shape": x.shape} | ({} if reduction in LINEAR else {"x": x})


# -- the table --------------------------------------------------------------------------------------------------------

ALL_REDUCE = OpSpec(
    "all_reduce(Tensor x, str comm, str algorithm, str reduction, int? sms=None) -> Tensor",
    Op.ALL_REDUCE,
    saves=_reduced,
    # y_i = sum_r x_r, so dx_i = sum_r dy_r; the average is analogous
    derivative=lambda by, grad, reduction, x=None, **_: (
        by("all_reduce", grad) if reduction in LINEAR else by("all_reduce_gradient", x, grad)
    ),
)
REDUCE_SCATTER = OpSpec(
    "reduce_scatter(Tensor x, str comm, int world_size, str algorithm, str reduction, bool strict=True, int? sms=None)"
    " -> Tensor",
    Op.REDUCE_SCATTER,
    functools.partial(_part, name="reduce_scatter"),
    _share_before,
    call=_reduce_scatter,
    saves=_reduced,
    derivative=_of_reduce_scatter,
)
ALL_GATHER = OpSpec(
    "all_gather(Tensor x, str comm, int world_size, str algorithm, int? sms=None) -> Tensor",
    Op.ALL_GATHER,
    _parts,
    lambda x, rank, **_: rank * x.nbytes,
    # y = (x_0, ..., x_{N-1}) on all ranks, so dx_i = sum_r dy_r[i]
    derivative=lambda by, grad, **_: by("reduce_scatter", grad, reduction="sum", strict=False),
)
ALL_GATHER_UNEVEN = OpSpec(
    "all_gather_uneven(Tensor x, str comm, SymInt[] sizes, int rank, str algorithm, int? sms=None) -> Tensor",
    Op.ALL_GATHER,
    _rows,
    _rows_before,
    derivative=_of_all_gather_uneven,
)
ALL_TO_ALL = OpSpec(
    "all_to_all(Tensor x, str comm, str algorithm, int? sms=None) -> Tensor",
    Op.ALL_TO_ALL,
    in_place=False,
    # y_i = (x_0[i], ..., x_{N-1}[i]), so dx_i = (dy_0[i], ..., dy_{N-1}[i])
    derivative=lambda by, grad, **_: by("all_to_all", grad),
)
ALL_TO_ALL_UNEVEN = OpSpec(
    "all_to_all_uneven(Tensor x, str comm, SymInt[] input_sizes, SymInt[] output_sizes, int rank, str algorithm)"
    " -> Tensor",
    Op.ALL_TO_ALL_UNEVEN,
    lambda x, output_sizes, **_: _rows(x, output_sizes),
    in_place=False,
    derivative=lambda by, grad, input_sizes, output_sizes, **_: by(
        "all_to_all_uneven", grad, input_sizes=output_sizes, output_sizes=input_sizes
    ),
)
BROADCAST = OpSpec(
    "broadcast(Tensor x, str comm, int root, str algorithm, int? sms=None) -> Tensor",
    Op.BROADCAST,
    call=_broadcast,
    # y_i = x_root, so dx_root = sum_r dy_r, and dx_i = 0 elsewhere
    derivative=lambda by, grad, **_: by("sum_at_root", grad),
)
REDUCE = OpSpec(
    "reduce(Tensor x, str comm, int root, int parts, str algorithm, str reduction) -> Tensor",
    Op.REDUCE,
    lambda x, parts, **_: x.shape if parts else (0, *x.shape[1:]),
    saves=_reduced,
    # y_root = sum_r x_r, so dx_i = dy_root; for other reductions, times the slope
    derivative=lambda by, grad, reduction, shape, x=None, **_: (
        by("spread", grad, shape=shape) if reduction in LINEAR else by("reduce_gradient", x, grad)
    ),
)
GATHER = OpSpec(
    "gather(Tensor x, str comm, int root, int parts, str algorithm) -> Tensor",
    Op.GATHER,
    lambda x, parts, **_: _parts(x, parts),
    lambda x, rank, **_: rank * x.nbytes,
    saves=lambda result, x, **_: {"shape": x.shape},
    # y_root = (x_0, ..., x_{N-1}), so dx_i = dy_root[i]; other ranks run backward through an empty tensor
    derivative=lambda by, grad, **_: by("scattered", grad),
)
SCATTER = OpSpec(
    "scatter(Tensor x, str comm, int root, int world_size, str algorithm) -> Tensor",
    Op.SCATTER,
    functools.partial(_part, name="scatter"),
    lambda root, rank, **operands: _share_before(rank=rank, **operands) if rank == root else None,
    # y_i = x_root[i], so dx_root = (dy_0, ..., dy_{N-1}), and dx_i = 0 elsewhere
    derivative=lambda by, grad, **_: by("gathered_or_zeros", grad),
)
SEND = OpSpec("send(Tensor x, str comm, int dst) -> ()", Op.SEND)
RECV = OpSpec(
    "recv(Tensor x, str comm, int src) -> Tensor",
    Op.RECV,
    call=lambda comm, x, src, **_: comm.recv(x.new_empty(x.shape), src),
)
BARRIER = OpSpec("barrier(str comm) -> ()", Op.BARRIER)


def _norm(kind: str, fp8: bool) -> OpSpec:
    layer = kind == "layer"
    operands = ["Tensor x", "Tensor residual", "Tensor weight"]
    operands += ["Tensor? bias"] * layer + ["Tensor? scale"] * fp8 + ["str comm", "float eps"]
    operands += ["bool with_normed"] * fp8 + ["str algorithm"]
    name, results = f"all_reduce_{kind}_norm{'_fp8' * fp8}", ", ".join(["Tensor"] * (4 if fp8 else 2))

    def saves(
        result: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        return {"new_residual": result[1], "weight": weight, "biased": bias is not None}

    def call(comm: Any, **operands: Any) -> tuple[torch.Tensor, ...]:
        given = {operand: operands[operand] for operand in spec.operands if operand not in _FACTS}
        made: tuple[torch.Tensor, ...] = getattr(comm, name)(**given)
        if not fp8:
            return made
        quantized, found, new_residual, normed = made
        if operands["scale"] is not None:
            found = found.new_empty(0)
        return quantized, found, new_residual, new_residual.new_empty(0) if normed is None else normed

    def empty(x: torch.Tensor, **operands: Any) -> tuple[torch.Tensor, ...]:
        quantize = ("dynamic" if operands["scale"] is None else "static") if fp8 else ""
        found = norm_results(x, quantize, operands.get("with_normed", True))
        none = {"scale": ((0,), torch.float32), "normed": ((0,), x.dtype)}
        kinds = [(none | found)[member] for member in MEMBERS[fp8]]
        return tuple(x.new_empty(size, dtype=dtype) for size, dtype in kinds)

    derivative = None if fp8 else functools.partial(_of_norm, layer=layer)
    schema = f"{name}({', '.join(operands)}) -> ({results})"
    op = Op[f"ALL_REDUCE_{kind}_NORM".upper()]
    spec = OpSpec(schema, op, call=call, results=empty, saves=saves, derivative=derivative)
    return spec


_ROOTED = "str comm, int root"
OPS = {
    spec.name: spec
    for spec in (
        *(ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_GATHER_UNEVEN, ALL_TO_ALL, ALL_TO_ALL_UNEVEN),
        *(BROADCAST, REDUCE, GATHER, SCATTER, SEND, RECV, BARRIER),
        *(_norm(kind, fp8) for kind in ("rms", "layer") for fp8 in (False, True)),
        OpSpec(
            "all_reduce_gradient(Tensor x, Tensor grad, str comm, str reduction, int? sms=None) -> Tensor",
            call=_all_reduce_gradient,
            derivative=refused,
        ),
        OpSpec(
            "reduce_scatter_gradient(Tensor x, Tensor grad, str comm, str reduction, int? sms=None) -> Tensor",
            call=_reduce_scatter_gradient,
            derivative=refused,
        ),
        OpSpec(
            f"sum_at_root(Tensor x, {_ROOTED}) -> Tensor",
            call=_sum_at_root,
            # y_root = sum_r x_r, and y_i = 0 elsewhere, so dx_i = dy_root
            derivative=lambda by, grad, **_: by("broadcast", grad, algorithm="auto"),
        ),
        OpSpec(
            f"reduce_gradient(Tensor x, Tensor grad, {_ROOTED}, str reduction) -> Tensor",
            call=_reduce_gradient,
            derivative=refused,
        ),
        OpSpec(
            "spread(Tensor grad, str comm, SymInt[] shape, int root, str reduction) -> Tensor",
            call=_spread,
            results=lambda grad, shape, **_: grad.new_empty(tuple(shape)),
            derivative=refused,
        ),
        OpSpec(
            f"scattered(Tensor x, {_ROOTED}, SymInt[] shape, str algorithm) -> Tensor",
            shape=lambda shape, **_: tuple(shape),
            call=_scattered,
            derivative=refused,
        ),
        OpSpec(
            f"gathered_or_zeros(Tensor x, {_ROOTED}, int world_size, str algorithm) -> Tensor",
            shape=_parts,
            call=_gathered_or_zeros,
            derivative=refused,
        ),
    )
}
"""The operations by name, as in ``torch.ops.shotcast``."""
