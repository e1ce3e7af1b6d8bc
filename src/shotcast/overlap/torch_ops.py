"""Products that overlap with collectives as PyTorch operators, which torch.compile puts in its graphs.

They are as those of :mod:`shotcast.collectives.torch_ops.operators`: ordered, with a communicator by its name, and with
results that are new tensors of any strides. They have no derivatives: a call with gradients to be computed is traced as
PyTorch's product and a collective, as an eager one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shotcast.collectives.communicator import Communicator
from shotcast.collectives.torch_ops.operators import named, operator, written
from shotcast.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from shotcast.kernels.triton.gemm import GemmConfig


F = TypeVar("F", bound=Callable[..., Any])

_eager: dict[str, Callable[..., Any]] = {}
"""The calls that the operators run, by name."""


def run_eagerly(call: F) -> F:
    """Register a call, under its name, as what the operator of that name runs."""
    _eager[call.__name__] = call
    return call


def _scattered(a: torch.Tensor, b: torch.Tensor, comm: str, world_size: int, *_: Any) -> torch.Tensor:
    return a.new_empty(a.shape[0] // world_size, b.shape[1])


def _summed(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _gathered(
    a_shard: torch.Tensor, weights: Sequence[torch.Tensor], comm: str, world_size: int, return_gathered: bool, *_: Any
) -> list[torch.Tensor]:
    rows = world_size * a_shard.shape[0]
    outs = [a_shard.new_empty(rows, weight.shape[1]) for weight in weights]
    return [*outs, a_shard.new_empty(rows, a_shard.shape[1])] if return_gathered else outs


@operator("matmul_reduce_scatter(Tensor a, Tensor b, str comm, int world_size, str way) -> Tensor", _scattered)
def _matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, comm: str, world_size: int, way: str) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = _eager["matmul_reduce_scatter"](named(comm), a, b, way=way)
    return result


@operator("matmul_all_reduce(Tensor a, Tensor b, str comm, str way) -> Tensor", _summed)
def _matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, comm: str, way: str) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = _eager["matmul_all_reduce"](named(comm), a, b, way=way)
    return result


@operator(
    "all_gather_matmul(Tensor a_shard, Tensor[] weights, str comm, int world_size, bool return_gathered, str way, "
    "int? sms) -> Tensor[]",
    _gathered,
)
def _all_gather_matmul(
    a_shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    comm: str,
    world_size: int,
    return_gathered: bool,
    way: str,
    sms: int | None,
) -> list[torch.Tensor]:
    with torch.no_grad():
        done = _eager["all_gather_matmul"](
            named(comm), a_shard.contiguous(), weights, return_gathered=return_gathered, way=way, sms=sms
        )
    return [*done.products, done.gathered] if done.gathered is not None else list(done.products)


def _without_config(call: str, config: GemmConfig | None) -> None:
    if config is not None:
        raise UnsupportedError(
            f"{call}: an operator of a graph takes no config; leave it None where calls are compiled"
        )


# -- calls that are traced --------------------------------------------------------------------------------------------


def summed(
    comm: Communicator,
    scatters: bool,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    way: str,
    config: GemmConfig | None,
) -> torch.Tensor:
    """Run ``matmul_reduce_scatter`` or ``matmul_all_reduce`` as an operator; ``a`` and ``b`` have been checked."""
    call = "matmul_reduce_scatter" if scatters else "matmul_all_reduce"
    _without_config(call, config)
    shape = (a.shape[0] // (comm.world_size if scatters else 1), b.shape[1])
    if out is not None and (out.shape != shape or out.dtype != a.dtype):
        raise ConfigError(f"out is contiguous, of {a.dtype}, {list(shape)}; not {out.dtype}, {list(out.shape)}")
    operands = (a, b) if out is None else (a, b, out)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        if way not in ("auto", "sequential"):
            raise UnsupportedError(f"{call}: way {way!r} has no gradient")
        product = torch.matmul(a, b)
        result = comm.reduce_scatter(product) if scatters else comm.all_reduce(product)
    elif scatters:
        result = torch.ops.shotcast.matmul_reduce_scatter(a, b, comm.name, comm.world_size, way)
    else:
        result = torch.ops.shotcast.matmul_all_reduce(a, b, comm.name, way)
    return result if out is None else written(out, result)


def gathered(
    comm: Communicator,
    a_shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    return_gathered: bool,
    way: str,
    config: GemmConfig | None,
    sms: int | None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Run ``all_gather_matmul`` as an operator; its arguments have been checked. Returns the products and the rows."""
    _without_config("all_gather_matmul", config)
    if way == "plain":
        raise UnsupportedError("all_gather_matmul: way 'plain' needs lanes, which an operator of a graph does not have")
    results = list(
        torch.ops.shotcast.all_gather_matmul(
            a_shard, list(weights), comm.name, comm.world_size, return_gathered, way, sms
        )
    )
    return (results[:-1], results[-1]) if return_gathered else (results, None)
