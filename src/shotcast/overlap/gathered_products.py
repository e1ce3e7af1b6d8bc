"""All-gather and product in one: rows of the other ranks arrive while those that are there are multiplied.

    products_j = (a_0, a_1, ..., a_{N-1}) @ b_j    on every rank, a_r the rows of rank r

Ways, which all give the same bits:

- ``fused``: our product begins a tile when its rows are there. A few programs, on as many SMs, bring them
  (:mod:`shotcast.transport.triton.gather_matmul`).
- ``plain``: the whole all-gather runs beside the product of this rank's own rows, on lanes.
- ``sequential``: an all-gather, and then the product.

On GPUs, bfloat16 and float16 are multiplied by our product. All else is multiplied by ``torch.mm``, each rank's rows
for themselves, so that its bits do not depend on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from shotcast.collectives.arguments import sm_budget, without_gradient
from shotcast.collectives.choice.select import predicted_us
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.torch_private import is_traced
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.hardware import catalog
from shotcast.overlap import schedule, torch_ops
from shotcast.overlap.adaptive import Cache, bucket
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import Lanes
from shotcast.overlap.policy import AUTO, FUSED, PLAIN, SEQUENTIAL, WORTH, check_way, model_us
from shotcast.overlap.products import ShapedProduct, interprets_kernels, own_gemm, sms_of
from shotcast.transport.kernel_call import KernelCall
from shotcast.wire import Op

if TYPE_CHECKING:
    from shotcast.kernels.triton.gemm import GemmConfig, GemmForm

_ALGORITHM = "few_sms"
"""The algorithm whose programs bring rows."""
GROUP = 8
"""Rows of tiles that are walked through together: they have to be there before the first wave of tiles can end."""
FEW, FEW_OF_MANY = 24, 16
"""Programs that bring rows, of two ranks and of more. From 24 on, those of two ranks fit beside a block of the product;
those of more ranks take SMs of their own."""
_PRODUCT_RATE = 0.77
"""The rate of our product relative to the data sheet's (benchmarks/data/h200/shaped_products.json, after a rest)."""


class GatheredProducts(NamedTuple):
    """The results of :func:`all_gather_matmul`: a product for each weight, and the gathered rows if asked for."""

    products: list[torch.Tensor]
    gathered: torch.Tensor | None


@torch_ops.run_eagerly
def all_gather_matmul(
    ranks: Communicator | Lanes,
    a_shard: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    *,
    return_gathered: bool = False,
    way: str = AUTO,
    config: GemmConfig | None = None,
    sms: int | None = None,
) -> GatheredProducts:
    """Gather the rows of all ranks and multiply them, on every rank: ``(a_0, ..., a_{N-1}) @ b`` for each weight.

    The result has the bits of ``comm.all_gather``, followed by :class:`~shotcast.overlap.products.ShapedProduct`
    (bfloat16 and float16 on GPUs) or by ``torch.mm`` of each rank's rows. It has no derivative;
    :class:`~shotcast.overlap.ColumnParallelLinear` has one.

    Args:
        ranks: a communicator; or lanes, which ``plain`` needs.
        a_shard: contiguous [M / N, K], the rows of this rank; the same shape on all ranks.
        b: a weight [K, n], or several, with contiguous rows or columns.
        return_gathered: also return the gathered rows, [M, K].
        way: the same on all ranks. ``auto`` measures ``fused`` at the first call of about so many rows (up to a power
            of two) where the models say that it is faster than ``sequential``, and takes it if it was, and if the bits
            were equal. A CUDA graph can capture every way after one eager call of the same shape.
        config: the shape of our product's blocks; None for a fast one. Its ``persistent`` is for ``sequential`` alone.
        sms: the most SMs that the all-gather may occupy; None for as many as are thought fast, 0 for copy engines where
            it is a call of its own.

    Raises:
        ConfigError: shapes, dtypes, devices or ``sms`` that do not fit; ``plain`` without lanes.
        UnsupportedError: ``fused`` for a dtype, on ranks or in a product that it does not serve; an operand that
            requires grad, outside ``torch.no_grad()``.
    """
    comm = ranks.communicators[0] if isinstance(ranks, Lanes) else ranks
    weights = [b] if isinstance(b, torch.Tensor) else list(b)
    sm_budget(sms, "all_gather_matmul")
    _check(comm, a_shard, weights)
    for weight in weights:
        without_gradient("all_gather_matmul", a_shard=a_shard, b=weight)
    check_way(way)
    if is_traced():
        return GatheredProducts(*torch_ops.gathered(comm, a_shard, weights, return_gathered, way, config, sms))
    rows, depth = a_shard.shape
    with torch.no_grad():
        gathered = a_shard.new_empty(comm.world_size * rows, depth)
        outs = [a_shard.new_empty(len(gathered), weight.shape[1]) for weight in weights]

        def sequential() -> list[torch.Tensor]:
            comm.all_gather(a_shard, out=gathered, sms=sms)
            _multiply_all(gathered, weights, outs, config, comm.world_size)
            return outs

        def fused() -> list[torch.Tensor]:
            _fused(comm, a_shard, gathered, weights, outs, config, sms)
            return outs

        if way == AUTO:
            ways = {SEQUENTIAL: sequential}
            if choose_way(comm, gathered, weights, config, sms) == FUSED:
                ways[FUSED] = fused
            widths = tuple(weight.shape[1] for weight in weights)
            shape = bucket(len(gathered)), depth, gathered.dtype, widths, config, sms
            Cache.of(comm, __name__).adaptive.run(shape, ways, checked=(FUSED,))
        elif way == FUSED:
            fused()
        elif way == PLAIN:
            if not isinstance(ranks, Lanes):
                raise ConfigError("way 'plain' needs lanes (shotcast.overlap.lanes_of), not a communicator")
            _plain(ranks, a_shard, gathered, weights, outs, config, sms)
        else:
            sequential()
    return GatheredProducts(outs, gathered if return_gathered else None)


def _check(comm: Communicator, a_shard: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    if a_shard.device != comm.device:
        raise ConfigError(f"a_shard is on {a_shard.device}; this communicator serves {comm.device}")
    if a_shard.dim() != 2 or not a_shard.is_contiguous():
        raise ConfigError(f"a_shard is a contiguous matrix, not {list(a_shard.shape)} with strides {a_shard.stride()}")
    for weight in weights:
        if weight.dim() != 2 or weight.shape[0] != a_shard.shape[1]:
            raise ConfigError(f"rows of {a_shard.shape[1]} elements do not fit a weight {list(weight.shape)}")
        if weight.dtype != a_shard.dtype or weight.device != a_shard.device:
            raise ConfigError(f"a_shard has {a_shard.dtype} on {a_shard.device}, and a weight has not")


# -- products ---------------------------------------------------------------------------------------------------------


def uses_own_product(a: torch.Tensor) -> bool:
    """Return whether ``a`` is multiplied by our product, whose bits do not depend on the rows beside."""
    return a.dtype in (torch.bfloat16, torch.float16) and (a.device.type == "cuda" or interprets_kernels())


def _multiply(a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: GemmConfig | None) -> None:
    if uses_own_product(a):
        ShapedProduct(config)(a, weight, out)
    else:
        torch.mm(a, weight, out=out)


def _multiply_all(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    config: GemmConfig | None,
    world_size: int,
) -> None:
    """Multiply gathered rows: all at once, or each rank's for themselves where bits depend on the rows."""
    parts = 1 if uses_own_product(a) or not len(a) else world_size
    for weight, out in zip(weights, outs, strict=True):
        for some, result in zip(a.tensor_split(parts), out.tensor_split(parts), strict=True):
            _multiply(some, weight, result, config)


def _plain(
    lanes: Lanes,
    a_shard: torch.Tensor,
    gathered: torch.Tensor,
    weights: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    config: GemmConfig | None,
    sms: int | None,
) -> None:
    rank, rows = lanes.communicators[0].rank, len(a_shard)

    def multiply(number: int) -> None:
        part = slice(number * rows, (number + 1) * rows)
        for weight, out in zip(weights, outs, strict=True):
            _multiply(a_shard if number == rank else gathered[part], weight, out[part], config)

    def gather(comm: Communicator) -> None:
        with torch.no_grad():
            comm.all_gather(a_shard, out=gathered, sms=sms)

    Controller(lanes).run(
        schedule.beside(), {"compute 0": lambda: None, "compute 1": lambda: multiply(rank)}, {"communicate 0": gather}
    )
    world_size = lanes.communicators[0].world_size
    for number in range(rank + 1, rank + world_size):
        multiply(number % world_size)


def _fused(
    comm: Communicator,
    a_shard: torch.Tensor,
    gathered: torch.Tensor,
    weights: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    config: GemmConfig | None,
    sms: int | None,
) -> None:
    few = few_sms(comm, sms)
    if not serves_fused(comm, gathered, weights, sms):
        why = unsupported_reason(comm, gathered, weights, few)
        raise UnsupportedError(f"all_gather_matmul has no fused form here: {why}")
    if a_shard.data_ptr() % 16:
        a_shard = a_shard.clone()
    form = own_gemm().form_of(gathered, weights[0], outs[0])

    def new_call() -> KernelCall:
        from shotcast.transport.triton import gather_matmul

        shape = comm.explain(gathered, Op.ALL_GATHER.label, _ALGORITHM, sms=few).launch
        return gather_matmul.call_of(form, config or fused_config(form), comm.world_size, shape)

    call = Cache.of(comm, __name__).once(("call", form, config, few), new_call)
    comm._run_kernel(call, a_shard, gathered, weights[0], outs[0])
    _multiply_all(gathered, weights[1:], outs[1:], config, comm.world_size)


def unsupported_reason(comm: Communicator, gathered: torch.Tensor, weights: Sequence[torch.Tensor], sms: int) -> str:
    """Return why no product can begin before all rows have come; empty if one can."""
    if comm.world_size == 1:
        return "there is one rank"
    if not comm.topology.transport.grids:
        return comm.topology.obstacle or "these ranks have no kernels of GPUs"
    if not uses_own_product(gathered):
        return f"own products take bfloat16 and float16 on GPUs, not {gathered.dtype}"
    if not weights or not gathered.numel() or not weights[0].numel():
        return "there is nothing to compute"
    if _ALGORITHM not in comm.candidates(gathered, Op.ALL_GATHER.label, sms):
        return f"{_ALGORITHM} cannot bring the rows"
    return ""


def serves_fused(
    comm: Communicator, gathered: torch.Tensor, weights: Sequence[torch.Tensor], sms: int | None = None
) -> bool:
    """Return whether gathered rows of this shape can be multiplied while they arrive."""
    few = few_sms(comm, sms)
    key = "serves", gathered.shape, gathered.dtype, tuple(weight.shape for weight in weights), few
    return Cache.of(comm, __name__).once(key, lambda: not unsupported_reason(comm, gathered, weights, few))


def fused_config(form: GemmForm) -> GemmConfig:
    """Return the shape of blocks of a product whose rows are arriving."""
    return replace(own_gemm().choose_config(form), group=GROUP)


def few_sms(comm: Communicator, sms: int | None) -> int:
    """Return the number of SMs whose programs bring rows."""
    return sms or (FEW if comm.world_size == 2 else FEW_OF_MANY)


# -- policy -----------------------------------------------------------------------------------------------------------


def choose_way(
    comm: Communicator,
    gathered: torch.Tensor,
    weights: Sequence[torch.Tensor],
    config: GemmConfig | None = None,
    sms: int | None = None,
) -> str:
    """Return the way that the models say is the faster: ``fused`` where that is clear, else ``sequential``."""

    def choose() -> str:
        predicted = predicted_ways(comm, gathered, weights, config, sms)
        return FUSED if predicted and predicted[FUSED] * WORTH <= predicted[SEQUENTIAL] else SEQUENTIAL

    if not serves_fused(comm, gathered, weights, sms):
        return SEQUENTIAL
    key = "way", gathered.shape, gathered.dtype, tuple(weight.shape for weight in weights), config, sms
    return Cache.of(comm, __name__).once(key, choose)


def predicted_ways(
    comm: Communicator,
    gathered: torch.Tensor,
    weights: Sequence[torch.Tensor],
    config: GemmConfig | None = None,
    sms: int | None = None,
) -> dict[str, float]:
    """Predict the microseconds of the ways, from the cost model and the GPU's figures; empty for unknown GPUs."""
    part = catalog.find(comm.topology.part)
    if part is None or not gathered.numel() or not all(weight.numel() for weight in weights):
        return {}
    few, total = few_sms(comm, sms), sms_of(gathered.device)
    call = Op.ALL_GATHER, str(gathered.dtype).removeprefix("torch."), gathered.nbytes
    few_us = predicted_us(comm.topology, *call, _ALGORITHM, few)
    gather_us = model_us(comm, gathered, "all_gather")
    if gather_us is None:  # a library is taken to be as fast as the wires
        gather_us = predicted_us(comm.topology, *call, _ALGORITHM)
    times = [2e-6 * gathered.numel() * one.shape[1] / (part.bf16_tflops * _PRODUCT_RATE) for one in weights]
    shape = config or own_gemm().FAST
    rows = -(-len(gathered) // shape.tile_m)
    tiles = rows * -(-weights[0].shape[1] // shape.tile_n)
    first_us = few_us * min(1.0, GROUP / rows)  # the first wave of tiles waits for its rows
    last_us = times[0] * min(1.0, total / tiles)  # and the last one for the last rows
    lost_us = min(few_us, times[0]) * few / total
    fused_us = max(few_us + last_us, first_us + times[0] + lost_us) + sum(times[1:])
    return {SEQUENTIAL: gather_us + sum(times), FUSED: fused_us}
