"""Steps with prompts on static memory, captured as CUDA graphs: one graph for each of some numbers of tokens, padded.

One graph serves any mix of prompt chunks and decoding sequences: the tiles (``kernels/triton/prompt_attention.py``)
that the host sends with the tokens, in one copy, say which tokens belong to which sequence. The graph ends with the
hidden states of the tokens whose logits are needed. These are few, in any number, and the head is as large as several
layers, so the head has graphs of its own.
"""

from __future__ import annotations

import bisect
from functools import partial

import torch

from shotcast.engine.cuda_graphs import CudaGraphs
from shotcast.engine.device_state import DeviceState
from shotcast.engine.input_batch import InputBatch, Int32Array, max_tiles, pack_prefill, prefill_layout
from shotcast.engine.transfer import pinned_empty
from shotcast.kernels.triton.prompt_attention import TILE_FIELDS
from shotcast.kernels.triton.step_inputs import unpack_prompts
from shotcast.layers.batch import AttentionTiles, Batch, Logits


class PrefillGraphs:
    """Runs steps of any sequences. Without CUDA, each is computed again on the same static memory.

    Args:
        state: the state of this rank; ``last_tokens`` gets the likeliest tokens of every step.
        sizes: numbers of tokens, ascending.
        head_sizes: numbers of sequences that sample a token, ascending; the last is the number of slots.
        graphs: where the graphs are kept.
    """

    def __init__(self, state: DeviceState, sizes: tuple[int, ...], head_sizes: tuple[int, ...], graphs: CudaGraphs):
        self._state, self._sizes, self._head_sizes, self._graphs = state, sizes, head_sizes, graphs
        model, device, sequences = state.model, state.device, head_sizes[-1]
        self._tile_tokens = {size: model.max_tile_tokens(size) for size in sizes}
        self._layouts = {
            size: prefill_layout(size, sequences, max_tiles(size, sequences, tile_tokens))
            for size, tile_tokens in self._tile_tokens.items()
        }
        # a smaller size may have smaller tiles, and so more of them
        words = max(layout.block_updates.start for layout in self._layouts.values()) + 2 * state.block_tables.numel()
        # Zeros mean that a step of any size is padding only, and that its tiles have no tokens.
        self._packed = torch.zeros(words, dtype=torch.int32, device=device)
        self._tokens, self._positions, self._cache_slots = (
            torch.zeros(sizes[-1], dtype=torch.int64, device=device) for _ in range(3)
        )
        self._rows = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._last_hidden = torch.zeros(sequences, model.config.hidden, dtype=model.dtype, device=device)
        self._results: dict[int, Logits] = {}

    def capture(self) -> None:
        """Capture the graphs of all sizes. Call this before the first step, while memory holds padding only."""
        for size in reversed(self._sizes):
            self._graphs.get_or_capture(("prefill", size), partial(self._compute, size))
        if self._state.model.parallel.last:
            for size in reversed(self._head_sizes):
                self._graphs.get_or_capture(("head", size), partial(self._compute_head, size))

    def serves(self, batch: InputBatch) -> bool:
        """Return whether the largest graph has room for the step."""
        return len(batch.tokens) <= self._sizes[-1]

    def run(self, batch: InputBatch, block_updates: Int32Array) -> Logits | None:
        """Compute a step. On the last stage, return the logits of the sequences that sample a token, if any.

        The logits are valid until the next step.

        Args:
            batch: the step.
            block_updates: [updates, 2], entries of the block tables that change before the step: index and block.
        """
        size = self._sizes[bisect.bisect_left(self._sizes, len(batch.tokens))]
        layout = self._layouts[size]
        host = pinned_empty([layout.block_updates.start + block_updates.size], torch.int32, self._packed.device)
        spare = self._state.spare_row, self._state.spare_slot
        pack_prefill(batch, block_updates, self._tile_tokens[size], *spare, layout, host.numpy())
        replay = self._graphs.get(("prefill", size))
        self._packed[: host.numel()].copy_(host, non_blocking=True)
        replay()
        count = int(batch.sample_mask.sum())
        if not count or not self._state.model.parallel.last:
            return None
        head_size = self._head_sizes[bisect.bisect_left(self._head_sizes, count)]
        self._graphs.get(("head", head_size))()
        return self._results[head_size].rows(slice(0, count))

    def _compute(self, size: int) -> None:
        state, packed, layout = self._state, self._packed, self._layouts[size]
        tokens, positions, slots = self._tokens[:size], self._positions[:size], self._cache_slots[:size]
        with state.model.parallel.timer.step():
            unpack_prompts(
                packed[layout.tokens],
                packed[layout.positions],
                packed[layout.cache_slots],
                packed[layout.logits_rows],
                packed[layout.num_block_updates],
                packed[layout.block_updates],
                state.last_tokens,
                state.block_tables,
                tokens,
                positions,
                slots,
                self._rows,
            )
            tiles = AttentionTiles(packed[layout.tiles].view(-1, TILE_FIELDS), self._tile_tokens[size])
            no_rows = self._rows[:0]
            batch = Batch(tokens, positions, slots, 0, no_rows, no_rows.int(), None, tiles, state.block_tables, None)
            hidden = state.model.hidden(batch, state.caches)
            if hidden is not None:
                torch.index_select(hidden, 0, packed[layout.logits_indices], out=self._last_hidden)

    def _compute_head(self, size: int) -> None:
        state, part = self._state, slice(0, size)
        out = None if state.logits is None else state.logits.rows(part)
        with state.model.parallel.timer.step():
            self._results[size] = logits = state.model.logits(self._last_hidden[part], out)
            state.last_tokens.index_copy_(0, self._rows[part], logits.best[:, 0])
