"""The first check of a user-registered algorithm: its results on random tensors against plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from shotcast.collectives import reference
from shotcast.collectives.algorithm import REDUCING, Algorithm, CollectiveProblem, Topology, imported
from shotcast.collectives.choice.candidates import unsupported_reason
from shotcast.units import format_size
from shotcast.wire import DTYPES, Op

Run = Callable[[Op, torch.Tensor, torch.Tensor, str], None]
"""``run(op, x, out, algorithm)`` makes a call and returns when its result is ready."""

_DTYPES = ("float32", "bfloat16", "int32")
_ELEMENTS = (1, 259)
"""Elements per rank: fewer than a tile holds, and a number without convenient divisors."""


def wrong_result(algorithm: Algorithm, topology: Topology, rank: int, device: torch.device, run: Run) -> str:
    """Describe the first wrong result on this rank; empty if there is none.

    Every rank can compute the inputs of all others, so the check needs no communication that could be wrong. All ranks
    make all calls regardless of what they find, since a result may be wrong only on some ranks.
    """
    wrong = ""
    for problem, elements in _problems(algorithm, topology):
        dtype = getattr(torch, problem.dtype)
        inputs = [_input(problem, elements, peer, dtype) for peer in range(topology.world_size)]
        x = inputs[rank].to(device)
        out = torch.full_like(_expected(problem.op, inputs, rank).to(dtype), 77).to(device)
        run(problem.op, x, out, algorithm.name)
        why = _difference(algorithm, problem, inputs, rank, out.cpu())
        if why and not wrong:
            call = f"{problem.op.label} of {problem.dtype}, {format_size(problem.nbytes)}"
            wrong = f"algorithm {algorithm.name} is wrong in its first check, {call}: {why}"
    return wrong


def _problems(algorithm: Algorithm, topology: Topology) -> Iterator[tuple[CollectiveProblem, int]]:
    """Yield the calls to check, with the elements of a rank's part: the calls that the algorithm may serve."""
    for op, dtype, elements in itertools.product(algorithm.forms, _DTYPES, _ELEMENTS):
        problem = CollectiveProblem(op, elements * topology.world_size * DTYPES[dtype], dtype, topology)
        if not unsupported_reason(problem, algorithm.name):
            yield problem, elements


def _input(problem: CollectiveProblem, elements: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Generate a rank's input: uniform in -1..1, integers in -100..100."""
    count = elements if problem.op is Op.ALL_GATHER else elements * problem.topology.world_size
    generator = torch.Generator().manual_seed(1000 * int(problem.op) + rank)
    values = torch.empty(count, device="cpu").uniform_(-1.0, 1.0, generator=generator)
    return values.to(dtype) if dtype.is_floating_point else (100 * values).to(dtype)


def _expected(op: Op, inputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Compute the expected result of a rank in float64."""
    wide = [x.double() for x in inputs]
    if op is Op.ALL_GATHER:
        return torch.cat(wide)
    if op is Op.BROADCAST:
        return wide[0]
    if op is Op.ALL_TO_ALL:
        return torch.cat([x.chunk(len(wide))[rank] for x in wide])
    total = torch.stack(wide).sum(0)
    return total.chunk(len(wide))[rank] if op is Op.REDUCE_SCATTER else total


def _difference(
    algorithm: Algorithm, problem: CollectiveProblem, inputs: Sequence[torch.Tensor], rank: int, out: torch.Tensor
) -> str:
    """Describe how ``out`` differs from the expected result; empty if it does not."""
    op, world_size, layout = problem.op, problem.topology.world_size, problem.topology.layout
    expected = _expected(op, inputs, rank)
    bound = torch.zeros_like(expected)
    if op in REDUCING:
        mine = [x.double().chunk(world_size)[rank] if op is Op.REDUCE_SCATTER else x.double() for x in inputs]
        bound = torch.stack(mine).abs().sum(0) * (world_size * torch.finfo(out.dtype).eps)
        if algorithm.lossy:
            bound += imported(algorithm.error_bound)(mine)
    wrong = ~((out.double() - expected).abs() <= bound)  # a NaN is wrong, too
    if wrong.any():
        index = int(wrong.nonzero()[0])
        return f"element {index} is {out[index].item()}, and should be {expected[index].item()}"
    form = algorithm.forms[op]
    exact = imported(form.reference)(inputs, rank, layout) if form.reference else None
    if exact is None and op in REDUCING and algorithm.keeps_bits(op, problem.topology.shape):
        exact = reference.tree_sum(inputs, layout)
        if op is Op.REDUCE_SCATTER:
            exact = exact.chunk(world_size)[rank]
    if exact is not None and not torch.equal(out, exact):
        index = int((out != exact).nonzero()[0])
        return f"element {index} has other bits than its reference: {out[index].item()}, not {exact[index].item()}"
    return ""
