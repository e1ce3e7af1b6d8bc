"""Steps with prompts in two halves, of which one communicates while the other computes.

Layers of a step wait for sums over the ranks. Over a network these take longer than a core works on them, so the other
half of the tokens is computed meanwhile. A half is a step of its own: its messages take the algorithms for their size.
Whether that pays is measured when the engine starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from shotcast.engine.device_state import DeviceState
from shotcast.engine.input_batch import InputBatch, Int32Array, cache_slots
from shotcast.layers.batch import Batch, Logits
from shotcast.layers.parallel import Parallel
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import lanes_of
from shotcast.overlap.policy import SEQUENTIAL, Decision, Way, decide

logger = logging.getLogger(__name__)

LEAST_TOKENS = 64
"""Steps of fewer tokens are not divided: products of few rows take nearly as long as those of twice as many."""
_MEASURED_TOKENS = 512
_HALVES = "halves"


def overlap_obstacle(parallel: Parallel, overlap: str) -> str:
    """Return why no step is divided; empty if steps may be."""
    if overlap == "off":
        return "overlap is off"
    if parallel.size == 1 or parallel.stages > 1:
        return "one stage of several ranks has sums to hide"
    if parallel.divides_residual(parallel.size * LEAST_TOKENS):
        return "sequence_parallel divides the residual instead"
    return ""


class PrefillOverlap:
    """Computes steps on memory of their own by halves, where that was found to pay. Construction is not collective.

    Args:
        state: the state of this rank.
        overlap: ``auto`` to measure, ``on`` or ``plain`` for always, ``off`` for never.
        tables: the block tables of the host, int32 [slots + 1, blocks].
        max_batch_tokens: the most tokens of a step.

    Attributes:
        decision: what was decided, and why.
    """

    def __init__(self, state: DeviceState, overlap: str, tables: Int32Array, max_batch_tokens: int):
        self._state, self._tables, self._most = state, tables, max_batch_tokens
        self._least = LEAST_TOKENS
        self._controller: Controller | None = None
        parallel = state.model.parallel
        obstacle = overlap_obstacle(parallel, overlap)
        if (
            not obstacle
            and overlap == "auto"
            and state.device.type == "cpu"
            and not parallel.comm.topology.network.name
        ):
            obstacle = "CPU ranks of one node wait for no network"
        self.decision = Decision(SEQUENTIAL, obstacle, {}, {}, {})
        if not obstacle:
            self._controller = Controller(lanes_of(parallel.comm))
            self.decision = Decision(_HALVES, f"overlap is {overlap}", {}, {}, {})
        self._measures = not obstacle and overlap == "auto"

    def measure(self, batch_of: Callable[[InputBatch], Batch]) -> None:
        """Decide, with a step of one prompt. Collective; to be called while the cache holds nothing.

        Args:
            batch_of: makes the tensors of a step.
        """
        if not self._measures:
            return
        self._measures = False
        state = self._state
        # the tables may end beyond the last position that the model knows, within a block of it
        positions_known = (self._tables.shape[1] - 1) * state.block_size
        tokens = min(_MEASURED_TOKENS, positions_known, self._most)
        if tokens < LEAST_TOKENS:
            self.decision = Decision(SEQUENTIAL, "steps are too short to divide", {}, {}, {})
            return
        self._least = max(LEAST_TOKENS, tokens // 2)  # what was measured says little of much shorter steps
        positions = np.arange(tokens, dtype=np.int32)
        row = np.zeros(1, np.int32)
        slots = cache_slots(self._tables, np.repeat(row, tokens), positions, state.block_size)
        count = np.array([tokens], np.int32)
        step = InputBatch(np.zeros(tokens, np.int32), positions, slots, row, row, count, row, np.array([True]))
        whole, halves = batch_of(step), [batch_of(half) for half in step.halves()]
        assert self._controller is not None
        ways = [
            Way(SEQUENTIAL, partial(state.model, whole, state.caches)),
            Way(_HALVES, partial(state.model.overlapped, halves, state.caches, self._controller)),
        ]
        self.decision = decide(state.model.parallel.comm, ways)
        logger.info("prompts: %s", self.decision)

    def serves(self, step: InputBatch) -> bool:
        """Return whether the step is computed by halves."""
        if self.decision.way != _HALVES or len(step.tokens) < self._least:
            return False
        return bool((step.num_scheduled > 1).any())  # a step of decode alone reads all weights for each half

    def run(self, halves: Sequence[Batch]) -> Logits | None:
        """Compute the logits of a step from its halves."""
        assert self._controller is not None
        return self._state.model.overlapped(halves, self._state.caches, self._controller)

    def close(self) -> None:
        """End the thread of the communication."""
        if self._controller is not None:
            self._controller.lanes.close()
