"""Steps with prompts, as a whole or in halves (:mod:`shotcast.engine.prefill_forms`), on dynamic memory or as CUDA
graphs.

Without graphs (:class:`PrefillOverlap`), a half is a separate step, whose messages use the algorithms for their size.
Over a network, sums take longer than a core works on them, so the other half of the tokens is computed meanwhile.

A graph (:class:`PrefillGraphs`) serves any mix of prompt chunks and decoding sequences: the tiles
(``kernels/triton/prompt_attention.py``) that the host sends with the tokens, in one copy, say which tokens belong to
which sequence. It ends with the hidden states of the tokens whose logits are needed. These tokens are few and vary in
number, and the head is as large as several layers, so the head has separate graphs. A graph in halves has a branch that
communicates. The halves are the first and the second half of the tokens, padding included, each with separate tiles. A
split sequence is in both: the second half attends to the keys that the first has written to the cache in the same
layer.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from shotcast.engine.cuda_graphs import CudaGraphs, DeviceState
from shotcast.engine.input_batch import (
    InputBatch,
    Int32Array,
    cache_slots,
    max_tiles,
    pack_prefill,
    part_bounds,
    prefill_layout,
)
from shotcast.engine.prefill_forms import HALVES, LEAST_TOKENS, WHOLE, PrefillForms
from shotcast.engine.transfer import pinned_empty
from shotcast.kernels.step_fields import TILE_FIELDS
from shotcast.layers.batch import AttentionTiles, Batch, Logits

_MEASURED_LAYERS = 8
"""The number of layers that a measurement computes, since all layers are alike."""
_MEASURED_TOKENS = 512
_SHARED_DECISION = 0.75
"""Steps of more than this part of the tokens of a step that was measured take its form."""


class PrefillOverlap:
    """Computes steps on dynamic memory in halves, if measurements show a gain. Construction is not collective.

    Args:
        tables: the host's block tables, int32 [slots + 1, blocks].
    """

    def __init__(self, state: DeviceState, forms: PrefillForms, tables: Int32Array, max_num_batched_tokens: int):
        self._state, self._forms, self._tables = state, forms, tables
        # the tables may end beyond the last position that the model knows, within a block of it
        positions_known = (tables.shape[1] - 1) * state.block_size
        self._size = min(_MEASURED_TOKENS, positions_known, max_num_batched_tokens)
        # what was measured says little of much shorter steps
        self._least = max(LEAST_TOKENS[False], self._size // 2)

    def measure(self, batch_of: Callable[[InputBatch], Batch]) -> None:
        """Decide by measuring a step of one prompt. Collective; call this while the cache is empty."""
        state, size = self._state, self._size
        if not self._forms.undecided(size):
            return
        positions = np.arange(size, dtype=np.int32)
        row = np.zeros(1, np.int32)

        def run_of(parts: int) -> Callable[[], Any]:
            slots = cache_slots(self._tables, np.repeat(row, size), positions, state.block_size)
            count = np.array([size], np.int32)
            step = InputBatch(np.zeros(size, np.int32), positions, slots, row, row, count, row, row + 1)
            if parts == WHOLE:
                return partial(state.model, batch_of(step), state.caches)
            return partial(self.run, [batch_of(half) for half in step.halves()])

        self._forms.decide(size, run_of)

    def serves(self, step: InputBatch) -> bool:
        """Return whether the step is computed in halves."""
        if self._forms.parts(self._size) == WHOLE or len(step.tokens) < self._least:
            return False
        return not step.decodes.all()  # a step of decode alone reads all weights for each half

    def run(self, halves: Sequence[Batch]) -> Logits | None:
        """Compute the logits of a step from its halves."""
        controller = self._forms.controller
        assert controller is not None
        return self._state.model.overlapped(halves, self._state.caches, controller)


class PrefillGraphs:
    """Runs steps of any sequences. Without CUDA, each is computed again on the same static memory.

    Args:
        state: the state of this rank; ``last_tokens`` receives the likeliest tokens of every step.
        sizes: numbers of tokens, ascending.
        head_sizes: numbers of tokens that are sampled, ascending; the last is the maximum of a step.
    """

    def __init__(
        self,
        state: DeviceState,
        sizes: tuple[int, ...],
        head_sizes: tuple[int, ...],
        graphs: CudaGraphs,
        forms: PrefillForms,
    ):
        self._state, self._sizes, self._head_sizes, self._graphs = state, sizes, head_sizes, graphs
        self._forms, self._parts = forms, dict.fromkeys(sizes, WHOLE)
        model, device, sampled = state.model, state.device, head_sizes[-1]
        # Halves have tiles of the same length as the whole, so that queries are computed alike.
        self._tile_tokens = {size: model.max_tile_tokens(size) for size in sizes}
        self._layouts = {
            (size, parts): prefill_layout(
                size,
                sampled,
                [max_tiles(stop - first, sampled, tile_tokens) for first, stop in part_bounds(size, parts)],
            )
            for size, tile_tokens in self._tile_tokens.items()
            for parts in (WHOLE, HALVES)
        }
        # a smaller size may have smaller tiles, and so more of them
        words = max(layout.block_updates.start for layout in self._layouts.values()) + 2 * state.block_tables.numel()
        # Zeros mean that a step of any size is padding only, and that its tiles have no tokens.
        self._packed = torch.zeros(words, dtype=torch.int32, device=device)
        self._tokens, self._positions, self._cache_slots = (
            torch.zeros(sizes[-1], dtype=torch.int64, device=device) for _ in range(3)
        )
        self._rows = torch.zeros(sampled, dtype=torch.int64, device=device)
        self._last_hidden = torch.zeros(sampled, model.config.hidden, dtype=model.dtype, device=device)
        self._results: dict[int, Logits] = {}

    def capture(self) -> None:
        """Decide which steps are divided, and capture the graphs of all sizes. Call this before the first step, while
        memory holds only padding."""
        measured, decisions = 0, self._forms.decisions
        for size in reversed(self._sizes):
            if size > measured * _SHARED_DECISION and LEAST_TOKENS[True] <= size < measured:
                decisions.setdefault(size, decisions[measured])
                self._decide(size)
            else:
                self._decide(size)
                measured = size if decisions[size].median_us else 0
        for size in reversed(self._sizes):
            self._graphs.get_or_capture(("prefill", size), partial(self._compute, size, self._parts[size]))
        if self._state.model.parallel.last:
            for size in reversed(self._head_sizes):
                self._graphs.get_or_capture(("head", size), partial(self._compute_head, size))

    def serves(self, batch: InputBatch) -> bool:
        """Return whether the largest graph has room for the step."""
        return len(batch.tokens) <= self._sizes[-1]

    def run(self, batch: InputBatch, block_updates: Int32Array) -> Logits | None:
        """Compute a step. On the last stage, return the logits of the tokens after which it samples, if any.

        The logits are valid until the next step.

        Args:
            block_updates: [updates, 2], entries of the block tables that change before the step: index and block.
        """
        size = self._sizes[bisect.bisect_left(self._sizes, len(batch.tokens))]
        host = self._pack(batch, block_updates, size, self._parts[size])
        replay = self._graphs.get(("prefill", size))
        self._packed[: host.numel()].copy_(host, non_blocking=True)
        replay()
        count = int(batch.num_sampled.sum())
        if not count or not self._state.model.parallel.last:
            return None
        head_size = self._head_sizes[bisect.bisect_left(self._head_sizes, count)]
        self._graphs.get(("head", head_size))()
        return self._results[head_size].rows(slice(0, count))

    def _pack(self, batch: InputBatch, block_updates: Int32Array, size: int, parts: int) -> torch.Tensor:
        """Pack a step of at most ``size`` tokens into host memory."""
        layout = self._layouts[size, parts]
        host = pinned_empty([layout.block_updates.start + block_updates.size], torch.int32, self._packed.device)
        spare = self._state.spare_row, self._state.spare_slot
        pack_prefill(batch, block_updates, self._tile_tokens[size], *spare, layout, host.numpy())
        return host

    def _compute(self, size: int, parts: int, layers: int | None = None) -> None:
        """Compute the packed step up to the head; ``layers`` limits the number of layers."""
        from shotcast.kernels.triton.step_inputs import PackedPrompts, unpack_prompts

        state, packed, layout = self._state, self._packed, self._layouts[size, parts]
        tokens, positions, slots = self._tokens[:size], self._positions[:size], self._cache_slots[:size]
        model = state.model if layers is None else state.model.shortened(layers)
        caches = state.caches[:layers]
        with model.parallel.timer.step():
            inputs = layout.tokens, layout.positions, layout.cache_slots, layout.logits_rows
            changes = layout.num_block_updates, layout.block_updates
            prompts = PackedPrompts(*(packed[part] for part in inputs + changes))
            unpack_prompts(prompts, state.last_tokens, state.block_tables, tokens, positions, slots, self._rows)
            no_rows = self._rows[:0]
            batches = []
            for (first, stop), where in zip(part_bounds(size, parts), layout.tiles, strict=True):
                tiles = AttentionTiles(packed[where].view(-1, TILE_FIELDS), self._tile_tokens[size])
                part = tokens[first:stop], positions[first:stop], slots[first:stop]
                batches.append(Batch(*part, 0, no_rows, no_rows.int(), None, tiles, state.block_tables, None))
            hidden: torch.Tensor | None
            if parts == WHOLE:
                hidden = model.hidden(batches[0], caches)
            else:
                assert self._forms.controller is not None
                by_copies = self._forms.by_copies
                hidden = torch.cat(model.hidden_of_parts(batches, caches, self._forms.controller, by_copies))
            if hidden is not None:
                torch.index_select(hidden, 0, packed[layout.logits_indices], out=self._last_hidden)

    def _decide(self, size: int) -> None:
        """Choose whether to divide steps of a size by timing graphs of the first layers, with prompts that belong to
        no sequence. Collective."""
        if self._forms.undecided(size):
            trial = CudaGraphs(self._state.device, self._state.model.parallel.timer)
            step = self._prompts(size)

            def run_of(parts: int) -> Callable[[], Any]:
                host = self._pack(step, np.empty((0, 2), np.int32), size, parts)

                def run() -> None:
                    self._packed[: host.numel()].copy_(host, non_blocking=True)
                    trial.get_or_capture(parts, partial(self._compute, size, parts, _MEASURED_LAYERS))()

                return run

            try:
                self._forms.decide(size, run_of)
            finally:
                trial.close()
                self._packed.zero_()
            if self._state.device.type == "cuda":
                torch.cuda.empty_cache()  # both graphs take memory of their own
        self._parts[size] = self._forms.parts(size)

    def _prompts(self, size: int) -> InputBatch:
        """Return a step of ``size`` random tokens, or the maximum if that is less, whose sequences share the spare row
        of the block tables."""
        state = self._state
        # the tables may end beyond the last position that the model knows, within a block of it
        longest = max(1, (state.block_tables.shape[1] - 1) * state.block_size)
        count = min(-(-size // longest), self._head_sizes[-1])
        lengths = np.full(count, longest, np.int32)
        lengths[-1] = min(size - (count - 1) * longest, longest)
        starts = (np.cumsum(lengths) - lengths).astype(np.int32)
        total = int(lengths.sum())
        positions = (np.arange(total) - np.repeat(starts, lengths)).astype(np.int32)
        tokens = np.random.default_rng(0).integers(0, state.model.config.vocab, total, dtype=np.int32)
        slots, rows = np.full(total, state.spare_slot, np.int32), np.full(count, state.spare_row, np.int32)
        return InputBatch(tokens, positions, slots, rows, np.zeros_like(rows), lengths, starts, rows * 0)

    def _compute_head(self, size: int) -> None:
        state, part = self._state, slice(0, size)
        out = None if state.logits is None else state.logits.rows(part)
        with state.model.parallel.timer.step():
            self._results[size] = logits = state.model.logits(self._last_hidden[part], out)
            state.last_tokens.index_copy_(0, self._rows[part], logits.best[:, 0])
