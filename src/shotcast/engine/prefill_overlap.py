"""Steps with prompts on memory of their own, in two halves, of which one communicates while the other computes.

Layers of a step wait for sums over the ranks. Over a network these take longer than a core works on them, so the other
half of the tokens is computed meanwhile. A half is a step of its own: its messages take the algorithms for their size.
Whether that pays is measured when the engine starts (:mod:`shotcast.engine.prefill_forms`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from shotcast.engine.device_state import DeviceState
from shotcast.engine.input_batch import InputBatch, Int32Array, cache_slots
from shotcast.engine.prefill_forms import LEAST_TOKENS, Form, PrefillForms
from shotcast.layers.batch import Batch, Logits

_MEASURED_TOKENS = 512


class PrefillOverlap:
    """Computes steps on memory of their own by halves, where that was found to pay. Construction is not collective.

    Args:
        state: the state of this rank.
        forms: decides, once for all sizes of steps.
        tables: the block tables of the host, int32 [slots + 1, blocks].
        max_batch_tokens: the most tokens of a step.
    """

    def __init__(self, state: DeviceState, forms: PrefillForms, tables: Int32Array, max_batch_tokens: int):
        self._state, self._forms, self._tables = state, forms, tables
        least = LEAST_TOKENS[False]
        # the tables may end beyond the last position that the model knows, within a block of it
        positions_known = (tables.shape[1] - 1) * state.block_size
        measured = min(_MEASURED_TOKENS, positions_known, max_batch_tokens)
        self._size = measured if forms.overlap == "auto" else least
        self._least = max(least, self._size // 2)  # what was measured says little of much shorter steps

    def measure(self, batch_of: Callable[[InputBatch], Batch]) -> None:
        """Decide, with a step of one prompt. Collective; to be called while the cache holds nothing.

        Args:
            batch_of: makes the tensors of a step.
        """
        state, size = self._state, self._size
        if not self._forms.undecided(size):
            return
        positions = np.arange(size, dtype=np.int32)
        row = np.zeros(1, np.int32)

        def run_of(form: Form) -> Callable[[], Any]:
            slots = cache_slots(self._tables, np.repeat(row, size), positions, state.block_size)
            count = np.array([size], np.int32)
            step = InputBatch(np.zeros(size, np.int32), positions, slots, row, row, count, row, row + 1)
            if form.parts == 1:
                return partial(state.model, batch_of(step), state.caches)
            return partial(self.run, [batch_of(half) for half in step.halves()])

        self._forms.decide(size, run_of)

    def serves(self, step: InputBatch) -> bool:
        """Return whether the step is computed by halves."""
        if self._forms.form(self._size).parts == 1 or len(step.tokens) < self._least:
            return False
        return not step.decodes.all()  # a step of decode alone reads all weights for each half

    def run(self, halves: Sequence[Batch]) -> Logits | None:
        """Compute the logits of a step from its halves."""
        controller = self._forms.controller
        assert controller is not None
        return self._state.model.overlapped(halves, self._state.caches, controller)
