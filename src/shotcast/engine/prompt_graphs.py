"""Steps with prompts on static memory, captured as CUDA graphs: one for each of some numbers of tokens, padded up.

A graph is the same for any mix of chunks of prompts and sequences that decode: which tokens are whose stands in tiles
(``kernels/triton/prompt_attention.py``) that the host sends with the tokens, in one copy. It ends with the rows whose
logits are wanted. These are few, and any number, and the head is as large as several layers; so it has graphs of its
own.
"""

from __future__ import annotations

import bisect
from functools import partial

import torch

from shotcast.engine import steps
from shotcast.engine.capture import Graphs
from shotcast.engine.state import State
from shotcast.engine.transfer import pinned
from shotcast.kernels.triton.prompt_attention import TILE_FIELDS
from shotcast.kernels.triton.step_inputs import unpack_prompts
from shotcast.layers.batch import AttentionTiles, Batch, Logits


class StaticPrompts:
    """Runs steps of any sequences; without CUDA each is computed anew, on the same static memory.

    Args:
        state: of this rank; ``drawn`` is kept up to date with the likeliest tokens.
        sizes: numbers of tokens, ascending.
        heads: numbers of sequences that draw, ascending; the last is that of all slots.
        graphs: where these are kept.
    """

    def __init__(self, state: State, sizes: tuple[int, ...], heads: tuple[int, ...], graphs: Graphs):
        self._state, self._sizes, self._heads, self._graphs = state, sizes, heads, graphs
        model, device, sequences = state.model, state.device, heads[-1]
        self._most = {size: model.tile(size) for size in sizes}
        self._layouts = {
            size: steps.prompt_layout(size, sequences, steps.tile_room(size, sequences, most))
            for size, most in self._most.items()
        }
        # a smaller size may have smaller tiles, and so more of them
        room = max(layout.filled.start for layout in self._layouts.values()) + 2 * state.tables.numel()
        # As it stands now, a step of any size is padding alone, all of whose tiles are of no tokens.
        self._packed = torch.zeros(room, dtype=torch.int32, device=device)
        self._tokens, self._positions, self._slots = (
            torch.zeros(sizes[-1], dtype=torch.int64, device=device) for _ in range(3)
        )
        self._rows = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._last = torch.zeros(sequences, model.config.hidden, dtype=model.dtype, device=device)
        self._results: dict[int, Logits] = {}

    def capture(self) -> None:
        """Have the graphs of all sizes ready, before the first step: memory holds padding."""
        for size in reversed(self._sizes):
            self._graphs.ready(("prompts", size), partial(self._compute, size))
        if self._state.model.parallel.last:
            for size in reversed(self._heads):
                self._graphs.ready(("head", size), partial(self._compute_head, size))

    def serves(self, of: steps.Places) -> bool:
        """Whether the step is not too long."""
        return len(of.tokens) <= self._sizes[-1]

    def run(self, of: steps.Places, cells: steps.Ints) -> Logits | None:
        """Compute a step. On the last stage, logits of the sequences that draw, if any; valid until the next step.

        Args:
            cells: [cells, 2], of the tables, to be filled before: place and block.
        """
        size = self._sizes[bisect.bisect_left(self._sizes, len(of.tokens))]
        layout = self._layouts[size]
        host = pinned([layout.filled.start + cells.size], torch.int32, self._packed.device)
        spare = self._state.spare_row, self._state.spare_slot
        steps.pack_prompts(of, cells, self._most[size], *spare, layout, host.numpy())
        replay = self._graphs.made(("prompts", size))
        self._packed[: host.numel()].copy_(host, non_blocking=True)
        replay()
        count = int(of.drawing.sum())
        if not count or not self._state.model.parallel.last:
            return None
        head = self._heads[bisect.bisect_left(self._heads, count)]
        self._graphs.made(("head", head))()
        logits = self._results[head]
        return logits.rows(slice(0, count))

    def _compute(self, size: int) -> None:
        state, packed, layout = self._state, self._packed, self._layouts[size]
        tokens, positions, slots = self._tokens[:size], self._positions[:size], self._slots[:size]
        with state.model.parallel.timer.step():
            unpack_prompts(
                packed[layout.tokens],
                packed[layout.positions],
                packed[layout.slots],
                packed[layout.drawn_rows],
                packed[layout.cells],
                packed[layout.filled],
                state.drawn,
                state.tables,
                tokens,
                positions,
                slots,
                self._rows,
            )
            table = packed[layout.tiles].view(-1, TILE_FIELDS)
            nobody = self._rows[:0]
            tiles = AttentionTiles(table, self._most[size])
            batch = Batch(tokens, positions, slots, 0, nobody, nobody.int(), None, tiles, state.tables, None)
            hidden = state.model.hidden(batch, state.caches)
            if hidden is not None:
                torch.index_select(hidden, 0, packed[layout.drawn], out=self._last)

    def _compute_head(self, size: int) -> None:
        state, of = self._state, slice(0, size)
        out = None if state.logits is None else state.logits.rows(of)
        with state.model.parallel.timer.step():
            self._results[size] = logits = state.model.logits(self._last[of], out)
            state.drawn.index_copy_(0, self._rows[of], logits.best[:, 0])
