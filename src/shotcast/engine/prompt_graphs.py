"""Steps with prompts on static memory, captured as CUDA graphs: one for each of some numbers of tokens, padded up.

A graph is the same for any mix of chunks of prompts and sequences that decode: which tokens are whose stands in tiles
(``kernels/prompt_attention.py``) that the host sends with the tokens, in one copy. It ends with the rows whose logits
are wanted. These are few, and any number, and the head is as large as several layers; so it has graphs of its own.
"""

from __future__ import annotations

import bisect
from functools import partial

import torch

from shotcast.engine import steps
from shotcast.engine.capture import Graphs
from shotcast.engine.transfer import pinned
from shotcast.kernels.prompt_attention import TILE_FIELDS
from shotcast.kernels.steps import unpack_prompts
from shotcast.layers.attention import KeyValueCache
from shotcast.layers.batch import Batch, Logits, Tiles
from shotcast.models.llama import Llama


class StaticPrompts:
    """Runs steps of any sequences; without CUDA each is computed anew, on the same static memory.

    Args:
        model, caches, tables, drawn: as of :class:`~shotcast.engine.graphs.StaticDecoding`.
        sizes: numbers of tokens, ascending.
        heads: numbers of sequences that draw, ascending; the last is that of all slots.
        spare_block: of the cache, nobody's.
        graphs: where these are kept.
        logits: of the last of ``heads``, where logits go; None for new tensors.
    """

    def __init__(
        self,
        model: Llama,
        caches: list[KeyValueCache],
        tables: torch.Tensor,
        drawn: torch.Tensor,
        sizes: tuple[int, ...],
        heads: tuple[int, ...],
        spare_block: int,
        graphs: Graphs,
        logits: Logits | None,
    ):
        self._model, self._caches, self._tables, self._drawn = model, caches, tables, drawn
        self._sizes, self._heads = sizes, heads
        self._graphs, self._logits = graphs, logits
        self._spare = tables.shape[0] - 1
        self._spare_slot = spare_block * caches[0].block_size
        device, sequences = tables.device, heads[-1]
        self._most = {size: model.tile(size) for size in sizes}
        self._layouts = {
            size: steps.prompt_layout(size, sequences, steps.tile_room(size, sequences, most))
            for size, most in self._most.items()
        }
        # a smaller size may have smaller tiles, and so more of them
        room = max(layout.filled.start for layout in self._layouts.values()) + 2 * tables.numel()
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
        if self._model.parallel.last:
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
        steps.pack_prompts(of, cells, self._most[size], self._spare, self._spare_slot, layout, host.numpy())
        replay = self._graphs.made(("prompts", size))
        self._packed[: host.numel()].copy_(host, non_blocking=True)
        replay()
        count = int(of.drawing.sum())
        if not count or not self._model.parallel.last:
            return None
        head = self._heads[bisect.bisect_left(self._heads, count)]
        self._graphs.made(("head", head))()
        logits = self._results[head]
        return Logits(logits.values[:count], logits.best[:count])

    def _compute(self, size: int) -> None:
        packed, layout = self._packed, self._layouts[size]
        tokens, positions, slots = self._tokens[:size], self._positions[:size], self._slots[:size]
        with self._model.parallel.clock.step():
            unpack_prompts(
                packed[layout.tokens],
                packed[layout.positions],
                packed[layout.slots],
                packed[layout.drawn_rows],
                packed[layout.cells],
                packed[layout.filled],
                self._drawn,
                self._tables,
                tokens,
                positions,
                slots,
                self._rows,
            )
            table = packed[layout.tiles].view(-1, TILE_FIELDS)
            nobody = self._rows[:0]
            tiles = Tiles(table, self._most[size])
            batch = Batch(tokens, positions, slots, 0, nobody, nobody.int(), None, tiles, self._tables, None)
            hidden = self._model.hidden(batch, self._caches)
            if hidden is not None:
                torch.index_select(hidden, 0, packed[layout.drawn], out=self._last)

    def _compute_head(self, size: int) -> None:
        out = None if self._logits is None else Logits(self._logits.values[:size], self._logits.best[:size])
        with self._model.parallel.clock.step():
            self._results[size] = logits = self._model.logits(self._last[:size], out)
            self._drawn.index_copy_(0, self._rows[:size], logits.best[:, 0])
