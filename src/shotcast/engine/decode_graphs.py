"""Decode steps on static memory, captured as CUDA graphs: one graph per number of sequences, with padding.

All inputs and outputs of such a step have fixed addresses, so that a replay is one call of the host: block tables and
the tokens sampled last live on the device, and the host sends four numbers per sequence. Padding rows use a spare row
of the block tables, whose block belongs to no sequence.
"""

from __future__ import annotations

import torch

from shotcast.engine.cuda_graphs import CudaGraphs, Replay
from shotcast.engine.device_state import DeviceState
from shotcast.engine.input_batch import pack_decode
from shotcast.engine.step_plan import StepPlan
from shotcast.engine.transfer import pinned_empty
from shotcast.kernels.step_fields import FIELDS
from shotcast.layers.batch import Batch, Logits
from shotcast.layers.step_timer import DeviceStepTimer


class DecodeGraphs:
    """Runs steps in which every sequence decodes. Without CUDA, each is computed again on the same static memory.

    Args:
        state: the state of this rank; ``last_tokens`` gets the likeliest tokens of every step.
        sizes: numbers of sequences, ascending; the last is the number of slots.
        graphs: where the graphs are kept.
    """

    def __init__(self, state: DeviceState, sizes: tuple[int, ...], graphs: CudaGraphs):
        self._state, self.sizes, self._graphs = state, sizes, graphs
        device, max_rows = state.device, sizes[-1]

        def int64_rows() -> torch.Tensor:
            return torch.zeros(max_rows, dtype=torch.int64, device=device)

        self._packed = torch.zeros(max_rows, FIELDS, dtype=torch.int32, device=device)
        self._packed[:, 0], self._packed[:, 3] = state.spare_row, -1
        self._tokens, self._positions, self._cache_slots, self._rows = (int64_rows() for _ in range(4))
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._results: dict[tuple[int, bool], Logits | None] = {}

    def capture(self, stamped: bool) -> None:
        """Capture the graphs of all sizes. Call this before the first step, while memory holds padding only."""
        for size in reversed(self.sizes):
            self._get_or_capture(size, stamped)

    def run(self, plan: StepPlan, size: int) -> Logits | None:
        """Compute a step. On the last stage, return the logits of its sequences, which are valid until the next step.

        Args:
            plan: a step that decode graphs serve.
            size: its ``decode_capture_size``.
        """
        count = len(plan.sequences)
        host = pinned_empty((size, FIELDS), torch.int32, self._packed.device)
        pack_decode(plan, size, self._state.spare_row, host.numpy())
        timer = self._state.model.parallel.timer
        key = size, plan.stamped and isinstance(timer, DeviceStepTimer)
        replay = self._get_or_capture(*key) if key[1] else self._graphs.get(("decode", *key))
        self._packed[:size].copy_(host, non_blocking=True)
        replay()
        if key[1]:
            assert isinstance(timer, DeviceStepTimer)
            timer.fetch()
        logits = self._results[key]
        return None if logits is None else logits.rows(slice(0, count))

    def _get_or_capture(self, size: int, stamped: bool) -> Replay:
        return self._graphs.get_or_capture(("decode", size, stamped), lambda: self._compute(size, stamped), stamped)

    def _compute(self, size: int, stamped: bool) -> None:
        from shotcast.kernels.triton.step_inputs import unpack

        state, part = self._state, slice(0, size)
        tokens, positions, slots = self._tokens[part], self._positions[part], self._cache_slots[part]
        lengths, rows = self._lengths[part], self._rows[part]
        logits = None if state.logits is None else state.logits.rows(part)
        with state.model.parallel.timer.step():
            unpack(
                self._packed[part],
                state.last_tokens,
                state.block_tables,
                state.block_size,
                tokens,
                positions,
                slots,
                lengths,
                rows,
            )
            batch = Batch(tokens, positions, slots, size, rows, lengths, None, None, state.block_tables, None, logits)
            result = state.model(batch, state.caches)
            if result is not None:
                state.last_tokens.index_copy_(0, rows, result.best[:, 0])
        self._results[size, stamped] = result
