"""A model's step in halves on emulated streams: right whatever stream is late, wrong without any one of its waits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_streams import EmulatedStreams
from test_controller import Rank, Waits

from shotcast.layers.batch import Batch
from shotcast.models.causal_lm import CausalLM
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import StreamLanes

LAYERS, PARTS = 2, 2
NAN = float("nan")


class Kernels:
    """The kernels of a model with one value a part. ``enqueue`` takes what a kernel does, to run it some time later.

    Outputs are NaN until their kernel has run. As in the model, the norm is written where the partial sums were.
    """

    def __init__(self, enqueue: Callable[[Callable[[], Any]], Any], by_copies: list[bool]):
        self._enqueue, self._by_copies = enqueue, by_copies
        self.caches = [torch.full((PARTS,), NAN, dtype=torch.float64) for _ in range(LAYERS)]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._compute(lambda: tokens + 1)

    def attend(self, normed: torch.Tensor, cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Write this part to the cache, and read what the parts up to this one have written there."""
        part = int(batch.positions[0])

        def values() -> torch.Tensor:
            cache[part] = normed[0]
            return cache[: part + 1].sum()[None] * 3

        return self._compute(values)

    def feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        return self._compute(lambda: normed * 5 + 1)

    def reduce(self, x: torch.Tensor, residual: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._by_copies.append(others[-1])

        def values() -> None:
            residual.add_(2 * x)
            x.copy_(torch.remainder(residual, 1009) / 7)

        self._enqueue(values)
        return x, residual

    def _compute(self, values: Callable[[], torch.Tensor]) -> torch.Tensor:
        out = torch.full((1,), NAN, dtype=torch.float64)
        self._enqueue(lambda: out.copy_(values()))
        return out

    def model(self) -> CausalLM:
        made: Any = object.__new__(CausalLM)
        block = SimpleNamespace(
            attend=self.attend, feed_forward=self.feed_forward, mlp_input=self.reduce, normed_input=self.reduce
        )
        made.blocks, made.embeddings, made.final_norm, made._eps = [block] * LAYERS, self, None, 0.0
        made.parallel = SimpleNamespace(reduce_norm=self.reduce, comm=Rank("cpu"))
        return made  # type: ignore[no-any-return]

    def batches(self) -> list[Any]:
        return [
            SimpleNamespace(tokens=torch.tensor([10.0 + part], dtype=torch.float64), positions=torch.tensor([part]))
            for part in range(PARTS)
        ]


def expected() -> list[float]:
    """Return the values of a step whose kernels run one after the other, where they are enqueued."""
    kernels = Kernels(lambda work: work(), [])
    model, values = kernels.model(), []
    for part, batch in enumerate(kernels.batches()):
        normed, residual = kernels.reduce(kernels.embed(batch.tokens), torch.zeros(1, dtype=torch.float64), None)
        for block, cache in zip(model.blocks, kernels.caches, strict=True):
            normed, residual = kernels.reduce(block.attend(normed, cache, batch), residual, None)  # type: ignore[arg-type]
            normed, residual = kernels.reduce(block.feed_forward(normed), residual, None)
        values.append(float(normed))
        assert part == len(values) - 1
    return values


def on_streams(order: tuple[int, int], left_out: int | None) -> tuple[bool, int]:
    """Run the step in halves; return whether its results are right, and the number of waits."""
    streams = EmulatedStreams()
    lanes = StreamLanes(Rank("cpu"), streams=streams)  # type: ignore[arg-type]
    waits = Waits(lanes, left_out)
    kernels = Kernels(streams.enqueue, [])
    batches = kernels.batches()
    wanted = [batch.tokens.clone() for batch in batches]
    for batch in batches:
        batch.tokens.fill_(NAN)
    streams.enqueue(lambda: [batch.tokens.copy_(one) for batch, one in zip(batches, wanted, strict=True)])
    found = kernels.model().hidden_of_parts(batches, kernels.caches, Controller(lanes))  # type: ignore[arg-type]
    seen: list[float] = []
    streams.enqueue(lambda: seen.extend(float(one) for one in found))
    streams.run(order)
    return seen == expected(), waits.made


def test_every_wait_of_a_step_in_halves_is_needed() -> None:
    orders = ((0, 1), (1, 0))
    for order in orders:
        right, made = on_streams(order, None)
        assert right
    sums = PARTS * (2 * LAYERS + 1)
    assert made == sums + (sums - PARTS) + 1  # for what is summed, for the sums, and for the last of them
    for left_out in range(made):
        assert not all(on_streams(order, left_out)[0] for order in orders), f"wait {left_out} is not needed"


@pytest.mark.parametrize("copy_engines", [False, True])
def test_all_sums_go_the_same_way(copy_engines: bool) -> None:
    streams, asked = EmulatedStreams(), list[bool]()
    kernels = Kernels(streams.enqueue, asked)
    controller = Controller(StreamLanes(Rank("cpu"), streams=streams))  # type: ignore[arg-type]
    kernels.model().hidden_of_parts(kernels.batches(), kernels.caches, controller, copy_engines)  # type: ignore[arg-type]
    assert asked == [copy_engines] * (PARTS * (2 * LAYERS + 1))
