"""The plain operations to measure: each rank's input and output, how they are counted, and the expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation as a benchmark sees it. Parts are the N equal parts of the whole tensor, one for each rank."""

    takes_part: bool = False  # a rank gives one part, otherwise the whole tensor
    gives_part: bool = False  # a rank gets one part, otherwise the whole tensor
    reduces: bool = False
    rooted: bool = False  # it has a root
    to_root: bool = False  # the root alone gets a result
    # bytes that pass a link over bytes of the tensor, for N ranks, as nccl-tests counts the bus bandwidth
    links: Callable[[int], float] = lambda n: (n - 1) / n

    @property
    def divided(self) -> bool:
        """True if the tensor is divided among the ranks."""
        return self.links(2) == 0.5


OPERATIONS = {
    "all_reduce": Operation(reduces=True, links=lambda n: 2 * (n - 1) / n),
    "reduce_scatter": Operation(gives_part=True, reduces=True),
    "all_gather": Operation(takes_part=True),
    "all_to_all": Operation(),
    "broadcast": Operation(rooted=True, links=lambda n: 1),
    "reduce": Operation(reduces=True, rooted=True, to_root=True, links=lambda n: 1),
    "gather": Operation(takes_part=True, rooted=True, to_root=True),
    "scatter": Operation(gives_part=True, rooted=True),
}
ROOT = 0
"""The root of operations that have one."""


def expected(
    op: str, reduction: str, rank: int, world_size: int, input_of: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a rank's expected result in float64, and the largest error that any order of operations may cause.

    With u the spacing of the dtype at 1, N ranks, and every partial result rounded to the dtype: ``|error| <= N * u *
    sum_r |x_r|`` for sums, and 1/N of it for averages. For products it is ``N * u * |product| + N * d * prod_r max(1,
    |x_r|)``, since a partial product may be subnormal; d is the spacing of subnormals. Everything else is exact:
    copies, extrema, and integers, which wrap around.

    Args:
        input_of: returns the tensor that a rank gives.
    """
    operation = OPERATIONS[op]
    if not operation.reduces:
        result = _copied(op, rank, world_size, input_of).double()
        return result, torch.zeros_like(result)
    dtype = input_of(0).dtype
    floats = dtype.is_floating_point
    own_part = (lambda x: x.view(world_size, -1)[rank]) if operation.gives_part else (lambda x: x)
    inputs = [
        own_part(input_of(other).reshape(-1)).to(torch.float64 if floats else torch.int64)
        for other in range(world_size)
    ]
    stacked = torch.stack(inputs)
    unit = world_size * torch.finfo(dtype).eps if floats else 0.0
    if reduction in ("sum", "avg"):
        share = world_size if reduction == "avg" else 1
        result, bound = stacked.sum(0) / share if floats else stacked.sum(0), stacked.abs().sum(0) * unit / share
    elif reduction == "prod":
        result = stacked.prod(0)
        spacing = unit * torch.finfo(dtype).smallest_normal if floats else 0.0
        bound = result.abs() * unit + spacing * stacked.abs().clamp(min=1).prod(0)
    else:
        result = stacked.amax(0) if reduction == "max" else stacked.amin(0)
        bound = torch.zeros_like(result)
    # integers wrap around as the dtype does
    return (result if floats else result.to(dtype)).double(), bound.double()


def _copied(op: str, rank: int, world_size: int, input_of: Callable[[int], torch.Tensor]) -> torch.Tensor:
    if op == "broadcast":
        return input_of(ROOT)
    if op == "scatter":
        return input_of(ROOT).view(world_size, -1)[rank]
    if op == "all_to_all":
        return torch.cat([input_of(other).view(world_size, -1)[rank] for other in range(world_size)])
    return torch.cat([input_of(other) for other in range(world_size)])
