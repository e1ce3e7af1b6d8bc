"""Decoding steps on static memory, captured as CUDA graphs: one for each number of sequences, padded up to it.

All that a step reads and writes has a fixed place, so that a replay is one call of the host: blocks and the tokens
drawn last live on the device, and the host sends four numbers a sequence. Rows beyond the sequences of a step belong to
a spare row of the tables, whose block is nobody's.
"""

from __future__ import annotations

import torch

from shotcast.engine import steps
from shotcast.engine.capture import Graphs, Replay
from shotcast.engine.plan import StepPlan
from shotcast.engine.state import State
from shotcast.engine.transfer import pinned
from shotcast.kernels.triton.step_inputs import FIELDS, unpack
from shotcast.layers.batch import Batch, Logits
from shotcast.layers.step_timer import DeviceStepTimer


class StaticDecoding:
    """Runs steps in which every sequence decodes; without CUDA each is computed anew, on the same static memory.

    Args:
        state: of this rank; ``drawn`` is kept up to date with the likeliest tokens.
        sizes: numbers of sequences, ascending; the last is that of all slots.
        graphs: where these are kept.
    """

    def __init__(self, state: State, sizes: tuple[int, ...], graphs: Graphs):
        self._state, self.sizes, self._graphs = state, sizes, graphs
        device, most = state.device, sizes[-1]

        def longs() -> torch.Tensor:
            return torch.zeros(most, dtype=torch.int64, device=device)

        self._packed = torch.zeros(most, FIELDS, dtype=torch.int32, device=device)
        self._packed[:, 0], self._packed[:, 3] = state.spare_row, -1
        self._tokens, self._positions, self._slots, self._rows = longs(), longs(), longs(), longs()
        self._lengths = torch.zeros(most, dtype=torch.int32, device=device)
        self._results: dict[tuple[int, bool], Logits | None] = {}

    def capture(self, stamped: bool) -> None:
        """Have the graphs of all sizes ready, before the first step: memory holds padding."""
        for size in reversed(self.sizes):
            self._ready(size, stamped)

    def run(self, plan: StepPlan, size: int) -> Logits | None:
        """Compute a step that ``steps.bucket_of`` serves with ``size``; on the last stage, logits of its sequences.

        They are valid until the next step.
        """
        count = len(plan.sequences)
        host = pinned((size, FIELDS), torch.int32, self._packed.device)
        steps.packed(plan, size, self._state.spare_row, host.numpy())
        timer = self._state.model.parallel.timer
        key = size, plan.stamped and isinstance(timer, DeviceStepTimer)
        replay = self._ready(*key) if key[1] else self._graphs.made(("decoding", *key))
        self._packed[:size].copy_(host, non_blocking=True)
        replay()
        if key[1]:
            assert isinstance(timer, DeviceStepTimer)
            timer.fetch()
        logits = self._results[key]
        return None if logits is None else logits.rows(slice(0, count))

    def _ready(self, size: int, stamped: bool) -> Replay:
        return self._graphs.ready(("decoding", size, stamped), lambda: self._compute(size, stamped), stamped)

    def _compute(self, size: int, stamped: bool) -> None:
        state, of = self._state, slice(0, size)
        places = self._tokens[of], self._positions[of], self._slots[of], self._lengths[of], self._rows[of]
        tokens, positions, slots, lengths, rows = places
        logits = None if state.logits is None else state.logits.rows(of)
        with state.model.parallel.timer.step():
            unpack(self._packed[of], state.drawn, state.tables, state.block_size, *places)
            batch = Batch(tokens, positions, slots, size, rows, lengths, None, None, state.tables, None, logits)
            result = state.model(batch, state.caches)
            if result is not None:
                state.drawn.index_copy_(0, rows, result.best[:, 0])
        self._results[size, stamped] = result
