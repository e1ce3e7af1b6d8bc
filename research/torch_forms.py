"""Forms by PyTorch's symmetric memory: low-contention collectives, fused products and async tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

import torch_symmetric
from overlap_bench.config import REDUCE_SCATTER_ALL_GATHER
from overlap_bench.form import Candidate, Candidates, Form, in_one, run_steps
from overlap_bench.library import Groups
from overlap_bench.steps import Steps

from shotcast.errors import UnsupportedError


def forms(steps: Steps, groups: Groups) -> Candidates:
    """Yield the forms that serve the operation, and this shape of it."""
    config = steps.config
    if config.op in ("all_gather", "reduce_scatter", REDUCE_SCATTER_ALL_GATHER):
        yield Candidate("torch low contention", lambda: _low_contention(steps, groups))
    if config.whole and config.op in ("all_gather", "reduce_scatter"):
        name = torch_symmetric.GATHER_MATMUL if config.gathers_first else torch_symmetric.MATMUL_SCATTER
        yield Candidate(f"torch {name}", lambda: _fused(steps, groups))
        yield Candidate("torch async TP", lambda: _async_tensor_parallel(steps, groups, name))


def _low_contention(steps: Steps, groups: Groups) -> Form:
    group = groups.of()
    own = steps.elsewhere(torch_symmetric.allocator(group, steps.comm.device))
    name, op = str(group.group_name), steps.config.op

    def begin(number: int) -> Callable[[], None]:
        found = own.sent[number]
        if op != "all_gather":
            found = torch_symmetric.low_contention_reduce_scatter(found, name)
        if op != "reduce_scatter":  # the same stream of PyTorch carries both
            found = torch_symmetric.low_contention_all_gather(found, name)
        own.received[number] = found

        def wait() -> None:
            torch_symmetric.wait(found)

        return wait

    begin(0)()
    return Form(lambda: run_steps(own, begin, True), own, average="reduce" in op)


def _fused(steps: Steps, groups: Groups) -> Form:
    name, first = str(groups.of().group_name), steps.config.gathers_first
    multiply = torch_symmetric.all_gather_matmul if first else torch_symmetric.matmul_reduce_scatter
    return in_one(steps, lambda a, b: multiply(a, b, name))


def _async_tensor_parallel(steps: Steps, groups: Groups, wanted: str) -> Form:
    group, first = groups.of(), steps.config.gathers_first
    torch_symmetric.enable(group)
    multiply = torch_symmetric.async_tensor_parallel(first, group)
    form = in_one(steps, multiply)
    form.run()  # compiles
    seen = torch_symmetric.operators_seen(form.run)
    if not any(wanted in name for name in seen):
        raise UnsupportedError(f"the compiler did not make {wanted} of it")
    return form
