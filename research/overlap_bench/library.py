"""Forms by NCCL and Gloo, as ``torch.distributed`` calls them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist

from overlap_bench.config import (
    LIBRARY,
    LIBRARY_COMMUNICATION,
    LIBRARY_PLAIN,
    LIBRARY_PRIORITY,
    OverlapConfig,
)
from overlap_bench.form import Candidate, Candidates, Form, run_steps
from overlap_bench.steps import Steps, library_product

GROUP_TIMEOUT_S = 90


class Messages:
    """The messages of a process group.

    Args:
        steps: what they move.
        group: the ranks.
    """

    def __init__(self, steps: Steps, group: dist.ProcessGroup | None):
        self.steps, self._group = steps, group
        self.in_place = steps.config.op == "all_reduce"
        self.average = steps.config.device == "cuda" and "reduce" in steps.config.op
        self._sum = dist.ReduceOp.AVG if self.average else dist.ReduceOp.SUM

    def begin(self, number: int) -> Callable[[], Any]:
        """Begin a message."""
        sent, received = self.steps.sent[number], self.steps.received[number]
        op, group = self.steps.config.op, self._group
        if op == "all_reduce":
            return self._wait(dist.all_reduce(sent, self._sum, group=group, async_op=True))
        if op == "all_gather":
            return self._wait(_all_gather(received, sent, group=group, async_op=True))
        if op == "reduce_scatter":
            return self._wait(_reduce_scatter(received, sent, self._sum, group=group, async_op=True))
        if op == "all_to_all":
            return self._wait(_all_to_all(received, sent, group=group, async_op=True))
        shard = self.steps.shards[number]
        first = _reduce_scatter(shard, sent, self._sum, group=group, async_op=True)
        if self.steps.config.device == "cuda":  # both calls are on one stream of NCCL
            return self._wait(_all_gather(received, shard, group=group, async_op=True))

        def both() -> None:
            first.wait()
            _all_gather(received, shard, group=group)

        return both

    def _wait(self, work: Any) -> Callable[[], Any]:
        return cast(Callable[[], Any], work.wait)

    def form(self, overlap: bool, product: Callable[..., object] = library_product) -> Form:
        """Return the form with these messages; the first one is made now, so that a group that fails is known."""
        self.begin(0)()
        return Form(
            lambda: run_steps(self.steps, self.begin, overlap, product),
            self.steps,
            in_place=self.in_place,
            average=self.average,
        )

    def alone(self) -> Form:
        """Return the messages without products."""
        self.begin(0)()

        def run() -> None:
            for wait in [self.begin(number) for number in range(self.steps.config.steps)]:
                wait()

        return Form(run, self.steps, whole=False)


# PyTorch 2.13 renamed these functions, and the old names warn
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_to_all = dist.all_to_all_single


class Groups:
    """The process groups of a measurement, each made when it is first needed, on all ranks."""

    def __init__(self, config: OverlapConfig):
        self._config = config
        self._made: dict[tuple[bool, int], dist.ProcessGroup] = {}

    def of(self, priority: bool = False, max_ctas: int = 0) -> dist.ProcessGroup:
        """Return the group with these options of NCCL."""
        key = (priority, max_ctas)
        if key not in self._made:
            self._made[key] = self._new(*key)
        return self._made[key]

    def _new(self, priority: bool, max_ctas: int) -> dist.ProcessGroup:
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        if self._config.device == "cpu":
            return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority)
        if max_ctas:
            options.config.max_ctas = max_ctas
        return cast(dist.ProcessGroup, dist.new_group(backend="nccl", timeout=timeout, pg_options=options))


def alone(steps: Steps, groups: Groups) -> Candidate:
    """Return the library's messages alone."""
    return Candidate(LIBRARY_COMMUNICATION, lambda: Messages(steps, groups.of()).alone())


def forms(steps: Steps, groups: Groups) -> Candidates:
    """Yield the forms of the library."""
    yield Candidate(LIBRARY, form_of(steps, groups, overlap=False))
    yield Candidate(LIBRARY_PLAIN, form_of(steps, groups))
    if steps.config.device == "cuda":
        yield Candidate(LIBRARY_PRIORITY, form_of(steps, groups, priority=True))


def form_of(
    steps: Steps,
    groups: Groups,
    product: Callable[..., object] = library_product,
    overlap: bool = True,
    **settings: Any,
) -> Callable[[], Form]:
    """Return what builds the form of messages on a group with these settings."""
    return lambda: Messages(steps, groups.of(**settings)).form(overlap, product)
