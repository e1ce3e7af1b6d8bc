"""Decoding steps on static memory, captured as CUDA graphs: one for each number of sequences, padded up to it.

All that a step reads and writes has a fixed place, so that a replay is one call of the host: blocks and the tokens
drawn last live on the device, and the host sends four numbers a sequence. Rows beyond the sequences of a step belong to
a spare row of the tables, whose block is nobody's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from shotcast.engine import steps
from shotcast.engine.plan import StepPlan
from shotcast.engine.transfer import pinned
from shotcast.kernels.steps import FIELDS, unpack
from shotcast.layers.attention import KeyValueCache
from shotcast.layers.batch import Batch, Logits
from shotcast.layers.clock import DeviceClock
from shotcast.models.llama import Llama

logger = logging.getLogger(__name__)

Replay = Callable[[], object]


class StaticDecoding:
    """Runs steps in which every sequence decodes; without CUDA each is computed anew, on the same static memory.

    Args:
        model, caches: this rank's; the caches have a block more than is given out, the last.
        tables: int32 [slots + 1, blocks]; the last row holds that block.
        drawn: int64 [slots + 1], of each slot the token drawn last; kept up to date with the likeliest.
        sizes: numbers of sequences, ascending.
    """

    def __init__(
        self,
        model: Llama,
        caches: list[KeyValueCache],
        tables: torch.Tensor,
        drawn: torch.Tensor,
        sizes: tuple[int, ...],
    ):
        self._model, self._caches, self._tables, self._drawn = model, caches, tables, drawn
        self.sizes = sizes
        self._spare = tables.shape[0] - 1
        device, most = tables.device, sizes[-1]

        def longs() -> torch.Tensor:
            return torch.zeros(most, dtype=torch.int64, device=device)

        self._packed = torch.zeros(most, FIELDS, dtype=torch.int32, device=device)
        self._packed[:, 0], self._packed[:, 3] = self._spare, -1
        self._tokens, self._positions, self._slots, self._rows = longs(), longs(), longs(), longs()
        self._lengths = torch.zeros(most, dtype=torch.int32, device=device)
        self._logits: Logits | None = None
        if model.parallel.last and device.type == "cuda":
            values = torch.empty(most, model.config.vocab, device=device)
            self._logits = Logits(values, torch.empty(most, 2, dtype=torch.int64, device=device))
        self._results: dict[tuple[int, bool], Logits | None] = {}
        self._replays: dict[tuple[int, bool], Replay] = {}
        self._pool: Any = None

    def capture(self, stamped: bool) -> None:
        """Have the graphs of all sizes ready, largest first, so that the others use its memory."""
        started = time.perf_counter()
        for size in reversed(self.sizes):
            self._ready(size, stamped)
        kind = "stamped CUDA graphs" if stamped else "CUDA graphs"
        logger.info("captured %d %s in %.1f s", len(self.sizes), kind, time.perf_counter() - started)

    def run(self, plan: StepPlan, size: int) -> Logits | None:
        """Compute a step that ``steps.bucket_of`` serves with ``size``; on the last stage, logits of its sequences.

        They are valid until the next step.
        """
        count = len(plan.sequences)
        host = pinned((size, FIELDS), torch.int32, self._packed.device)
        steps.packed(plan, size, self._spare, host.numpy())
        key = size, plan.stamped and isinstance(self._model.parallel.clock, DeviceClock)
        replay = self._ready(*key)
        self._packed[:size].copy_(host, non_blocking=True)
        replay()
        if key[1]:
            clock = self._model.parallel.clock
            assert isinstance(clock, DeviceClock)
            clock.fetch()
        logits = self._results[key]
        return None if logits is None else Logits(logits.values[:count], logits.best[:count])

    def close(self) -> None:
        """Let go of the graphs, which must be gone before what they communicate by. Waits for the device."""
        if self._packed.is_cuda:
            torch.cuda.synchronize(self._packed.device)
        self._replays.clear()
        self._results.clear()

    def _ready(self, size: int, stamped: bool) -> Replay:
        key = size, stamped
        if key not in self._replays:
            self._replays[key] = self._captured(size, stamped)
        return self._replays[key]

    def _compute(self, size: int, stamped: bool) -> None:
        of = slice(0, size)
        tables = self._tables
        places = self._tokens[of], self._positions[of], self._slots[of], self._lengths[of], self._rows[of]
        tokens, positions, slots, lengths, rows = places
        logits = None if self._logits is None else Logits(self._logits.values[of], self._logits.best[of])
        with self._model.parallel.clock.step():
            unpack(self._packed[of], self._drawn, tables, self._caches[0].block_size, *places)
            batch = Batch(tokens, positions, slots, size, rows, lengths, None, tables, None, logits)
            result = self._model(batch, self._caches)
            if result is not None:
                self._drawn.index_copy_(0, rows, result.best[:, 0])
        self._results[size, stamped] = result

    def _captured(self, size: int, stamped: bool) -> Replay:
        if self._packed.device.type != "cuda":
            return lambda: self._compute(size, stamped)
        clock = self._model.parallel.clock
        assert isinstance(clock, DeviceClock)
        if not stamped:
            # In a step of padding alone: kernels are compiled, libraries set up, and ranks brought together.
            self._compute(size, stamped)
        else:
            clock.calibrate()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        clock.stamping = stamped
        try:
            # NCCL's watchdog thread asks for events meanwhile; only this thread's calls must be capturable.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._compute(size, stamped)
        finally:
            clock.stamping = False
        self._pool = graph.pool()
        if not stamped:
            graph.replay()  # the first takes longer
        return graph.replay
