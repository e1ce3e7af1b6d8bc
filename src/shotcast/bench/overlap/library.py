"""Forms by NCCL and Gloo, as ``torch.distributed`` calls them: as they are, and with each option that may help."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from shotcast.bench.overlap.config import (
    LIBRARY,
    LIBRARY_COMMUNICATION,
    LIBRARY_PLAIN,
    LIBRARY_PRIORITY,
    PUBLISHED,
    OverlapConfig,
)
from shotcast.bench.overlap.form import Candidate, Candidates, Form, run_steps
from shotcast.bench.overlap.own import as_published
from shotcast.bench.overlap.steps import Steps, library_product
from shotcast.hardware.multiprocessor import Multiprocessor
from shotcast.overlap.products import LibraryProduct, ShapedProduct, multiprocessor_of, own_gemm, sms_of

if TYPE_CHECKING:
    from shotcast.kernels.triton.gemm import GemmConfig

CTAS = (4, 8, 16)
GROUP_TIMEOUT_S = 90
_PUBLISHED_TILES = (32, 64)
_PUBLISHED_BLOCKS = (1, 2, 4, 0)
"""Blocks that an SM holds; 0 for as many as fit."""
_BARRIER_BYTES = 256
"""Shared memory that the compiler takes for barriers, 24 bytes in 2026, and more."""


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

    def form(self, overlap: bool, product: Callable[..., object] = library_product, evidence: str = "") -> Form:
        """Return the form with these messages; the first one is made now, so that a group that fails is known."""
        self.begin(0)()
        return Form(
            lambda: run_steps(self.steps, self.begin, overlap, product),
            self.steps,
            in_place=self.in_place,
            average=self.average,
            evidence=evidence,
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
    """Yield the forms of the library as it is."""
    yield Candidate(LIBRARY, _form(steps, groups, overlap=False))
    yield Candidate(LIBRARY_PLAIN, _form(steps, groups))
    if steps.config.device == "cuda":
        yield Candidate(LIBRARY_PRIORITY, _form(steps, groups, priority=True))


def options(steps: Steps, groups: Groups) -> Candidates:
    """Yield the forms of NCCL beside products that leave room, and with fewer thread blocks."""
    yield Candidate("library shaped", _form(steps, groups, ShapedProduct()))
    yield Candidate("library shaped, priority", _form(steps, groups, ShapedProduct(), priority=True))
    published = as_published()
    yield Candidate("library shaped as published", _form(steps, groups, published))
    yield Candidate("library shaped as published, priority", _form(steps, groups, published, priority=True))
    for sms in steps.config.sms:
        yield Candidate(f"library, {sms} SMs left", _form(steps, groups, LibraryProduct(sms), priority=True))
        on = ShapedProduct(sms=sms_of(steps.comm.device) - sms)
        yield Candidate(f"library shaped, {sms} SMs left", _form(steps, groups, on, priority=True))
    for ctas in CTAS:
        yield Candidate(f"library, at most {ctas} CTAs", _form(steps, groups, max_ctas=ctas))


def _form(
    steps: Steps,
    groups: Groups,
    product: Callable[..., object] = library_product,
    overlap: bool = True,
    **settings: Any,
) -> Callable[[], Form]:
    return lambda: Messages(steps, groups.of(**settings)).form(overlap, product)


# -- the published grid -----------------------------------------------------------------------------------------------


def published_tiles(sm: Multiprocessor) -> Iterator[tuple[str, GemmConfig]]:
    """Yield the tiles of the publication (arXiv 2606.09200), padded until an SM holds a chosen number of blocks."""
    gemm = own_gemm()
    for depth in _PUBLISHED_TILES:
        config = gemm.GemmConfig(64, 64, depth, 3, 4)
        for blocks in _PUBLISHED_BLOCKS:
            name = f"64x64x{depth}, {blocks or 'all'} blocks an SM"
            padding = 0
            if blocks:
                room = min(sm.shared_bytes // blocks - sm.reserved_shared_bytes, sm.max_block_shared_bytes)
                padding = (room - _BARRIER_BYTES - gemm.shared_bytes(config)) // sm.shared_unit * sm.shared_unit
            if padding >= 0:
                yield name, gemm.GemmConfig(64, 64, depth, 3, 4, padding_bytes=padding)


def published(steps: Steps, groups: Groups) -> Candidates:
    """Yield the published experiment: small tiles, few blocks an SM, priorities, and NCCL as it is."""
    for name, config in published_tiles(multiprocessor_of(steps.comm.device)):
        product = ShapedProduct(config)

        def products(product: ShapedProduct = product) -> Form:
            return Form(lambda: steps.multiply_all(product), steps, whole=False)

        def form(overlap: bool, priority: bool, product: ShapedProduct = product) -> Form:
            return Messages(steps, groups.of(priority=priority)).form(overlap, product)

        yield Candidate(f"{PUBLISHED} {name}, products alone", products)
        yield Candidate(f"{PUBLISHED} {name}, sequential", functools.partial(form, False, False))
        yield Candidate(f"{PUBLISHED} {name}", functools.partial(form, True, False))
        yield Candidate(f"{PUBLISHED} {name}, priority", functools.partial(form, True, True))
