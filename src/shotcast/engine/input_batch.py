"""A step's inputs as host arrays, packed as the kernels and CUDA graphs read them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shotcast.engine.step_plan import PENDING_TOKEN, StepPlan
from shotcast.kernels.step_fields import TILE_FIELDS

Int32Array = npt.NDArray[np.int32]


def pack_decode(plan: StepPlan, size: int, spare_row: int, out: Int32Array) -> None:
    """Fill ``out`` [size, ``FIELDS``] with a step for a decode graph.

    Padding rows compute token 0 at position 0 of row ``spare_row`` of the block tables, which belongs to no sequence.
    """
    for row, sequence in enumerate(plan.sequences):
        block = sequence.blocks[0] if sequence.blocks else -1
        out[row] = sequence.slot, sequence.num_computed, sequence.tokens[0], block
    out[len(plan.sequences) : size] = spare_row, 0, 0, -1


class InputBatch(NamedTuple):
    """A step as int32 arrays."""

    tokens: Int32Array  # [tokens], token ids; -1 - the row of its sequence for a token that is still being sampled
    positions: Int32Array  # [tokens], the position of each token in its sequence
    cache_slots: Int32Array  # [tokens], the slots of the paged cache for their keys and values
    rows: Int32Array  # [sequences], rows of the block tables
    num_computed: Int32Array  # [sequences], tokens before this step
    num_scheduled: Int32Array  # [sequences], tokens in this step
    query_starts: Int32Array  # [sequences], the index of each sequence's first token among the tokens of the step
    num_sampled: Int32Array  # [sequences], how many of its last tokens a token is sampled after

    @property
    def logits_indices(self) -> Int32Array:
        """The indices of the tokens whose logits are needed."""
        ends = self.query_starts + self.num_scheduled
        return spans(ends - self.num_sampled, self.num_sampled)

    @property
    def decodes(self) -> npt.NDArray[np.bool_]:
        """Bool [sequences]: sequences with one token, and sequences that sample after each of their tokens."""
        return (self.num_scheduled == 1) | (self.num_scheduled == self.num_sampled)

    @property
    def context_lengths(self) -> Int32Array:
        """[sequences], tokens in the cache after this step."""
        return self.num_computed + self.num_scheduled

    def halves(self) -> tuple[InputBatch, InputBatch]:
        """Divide a step of 4 tokens or more into two halves; the first is computed first.

        A split sequence is in both halves: its second part finds the first in the cache. No part of a prompt is a
        single token unless the other half begins with it, so decoding sequences still come first.
        """
        at = len(self.tokens) // 2
        ends = self.query_starts + self.num_scheduled
        if ((self.query_starts == at - 1) & (ends > at)).any():
            at -= 1
        return self.part(0, at), self.part(at, len(self.tokens))

    def part(self, first: int, stop: int) -> InputBatch:
        """Return the tokens from ``first`` up to ``stop``."""
        starts, ends = self.query_starts, self.query_starts + self.num_scheduled
        inside = (starts < stop) & (ends > first)
        begins, stops = np.maximum(starts, first)[inside], np.minimum(ends, stop)[inside]
        part = slice(first, stop)
        return InputBatch(
            self.tokens[part],
            self.positions[part],
            self.cache_slots[part],
            self.rows[inside],
            self.num_computed[inside] + begins - starts[inside],
            stops - begins,
            begins - first,
            np.maximum(0, stops - np.maximum(begins, (ends - self.num_sampled)[inside])),
        )


def build_input_batch(plan: StepPlan, block_tables: Int32Array, block_size: int) -> InputBatch:
    """Build a step's arrays. ``block_tables`` [rows, blocks] already contain the blocks that the plan allocates."""
    sequences = plan.sequences
    fields = [(each.slot, each.num_computed, len(each.tokens), each.num_sampled) for each in sequences]
    rows, num_computed, num_scheduled, num_sampled = np.array(fields, np.int32).T
    ends = np.cumsum(num_scheduled, dtype=np.int32)
    starts = ends - num_scheduled
    tokens = np.empty(ends[-1], np.int32)
    for sequence, start, end in zip(sequences, starts.tolist(), ends.tolist(), strict=True):
        tokens[start:end] = -1 - sequence.slot if sequence.tokens[0] == PENDING_TOKEN else sequence.tokens
    positions = spans(num_computed, num_scheduled)
    slots = cache_slots(block_tables, np.repeat(rows, num_scheduled), positions, block_size)
    return InputBatch(tokens, positions, slots, rows, num_computed, num_scheduled, starts, num_sampled)


def spans(firsts: Int32Array, counts: Int32Array) -> Int32Array:
    """Return the concatenated spans ``first``, ``first + 1``, ..., each of ``count`` numbers."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.arange(counts.sum(), dtype=np.int32) + np.repeat(firsts - ends + counts, counts)


def cache_slots(block_tables: Int32Array, rows: Int32Array, positions: Int32Array, block_size: int) -> Int32Array:
    """Return the cache slots for positions of the sequences in ``rows`` of the block tables."""
    return block_tables[rows, positions // block_size] * block_size + positions % block_size


def max_tiles(tokens: int, sequences: int, tile_tokens: int) -> int:
    """Return the maximum number of attention tiles in a step of this many tokens and sequences, padding included.

    A tile has at most ``tile_tokens`` tokens.
    """
    return min(tokens, tokens // tile_tokens + min(tokens, sequences) + 1)


def attention_tiles(batch: InputBatch, tile_tokens: int, padding: int = 0) -> Int32Array:
    """Split the sequences into tiles of at most ``tile_tokens`` tokens: [tiles, TILE_FIELDS].

    Args:
        padding: tokens after the step's, which attend to nothing.
    """
    padding_row = np.array([0, len(batch.tokens), padding, -1], np.int32)
    fields = np.stack((batch.rows, batch.query_starts, batch.num_scheduled, batch.num_computed), axis=1)
    fields = np.concatenate((fields, padding_row[None]))
    tiles_of_sequence = -(-fields[:, 2] // tile_tokens)
    first_tiles = np.repeat(np.cumsum(tiles_of_sequence) - tiles_of_sequence, tiles_of_sequence)
    offsets = (np.arange(tiles_of_sequence.sum()) - first_tiles) * tile_tokens
    table = np.repeat(fields, tiles_of_sequence, axis=0)
    table[:, 1] += offsets
    table[:, 2] = np.minimum(table[:, 2] - offsets, tile_tokens)
    table[:, 3] = np.where(table[:, 3] < 0, -1, table[:, 3] + offsets)
    return table


class PrefillLayout(NamedTuple):
    """The layout of a packed step with prompts, as slices of int32 words.

    The parts that graphs of all sizes read come first.
    """

    num_block_updates: slice  # one word, how many entries of the block tables change
    logits_indices: slice  # [max_sampled], indices of the tokens whose logits are needed
    # [max_sampled], the table rows of their sequences; the spare row beyond those, and for sequences that sample more
    # than one token
    logits_rows: slice
    tokens: slice  # [size], like the next two; as in :class:`InputBatch`
    positions: slice
    cache_slots: slice
    # [max_tiles, TILE_FIELDS] for each part of the step, whose tokens they count from its first one
    tiles: tuple[slice, ...]
    block_updates: slice  # [updates, 2], pairs of an index into the block tables and a block; any number of them


def prefill_layout(size: int, max_sampled: int, max_tiles: Sequence[int]) -> PrefillLayout:
    """Return the layout of a padded step of ``size`` tokens, with limits on the sampled tokens and on the tiles in each
    of its parts."""
    words = 1, max_sampled, max_sampled, size, size, size, *(tiles * TILE_FIELDS for tiles in max_tiles)
    ends = list(itertools.accumulate(words))
    fields = [slice(end - count, end) for end, count in zip(ends, words, strict=True)]
    updates, indices, rows, tokens, positions, slots, *tiles = fields
    return PrefillLayout(updates, indices, rows, tokens, positions, slots, tuple(tiles), slice(ends[-1], None))


def part_bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """Divide ``size`` tokens into ``parts`` of nearly equal length; return each part's first token and its end."""
    return list(itertools.pairwise([size * number // parts for number in range(parts + 1)]))


def pack_prefill(
    batch: InputBatch,
    block_updates: Int32Array,
    tile_tokens: int,
    spare_row: int,
    spare_slot: int,
    layout: PrefillLayout,
    out: Int32Array,
) -> None:
    """Fill ``out`` with a step in the format of ``layout``.

    Args:
        block_updates: [updates, 2], as in :class:`PrefillLayout`.
        spare_row, spare_slot: the block table row and the cache slot that padding uses.
    """
    count, size = len(batch.tokens), layout.tokens.stop - layout.tokens.start
    rows = np.where(batch.num_sampled > 1, spare_row, batch.rows)
    out[layout.num_block_updates] = len(block_updates)
    for part, values, padding in (
        (layout.logits_indices, batch.logits_indices, 0),
        (layout.logits_rows, np.repeat(rows, batch.num_sampled), spare_row),
        (layout.tokens, batch.tokens, 0),
        (layout.positions, batch.positions, 0),
        (layout.cache_slots, batch.cache_slots, spare_slot),
    ):
        out[part][: len(values)] = values
        out[part][len(values) :] = padding
    for (first, stop), where in zip(part_bounds(size, len(layout.tiles)), layout.tiles, strict=True):
        own = batch.part(min(first, count), min(stop, count)) if len(layout.tiles) > 1 else batch
        table = out[where].reshape(-1, TILE_FIELDS)
        tiles = attention_tiles(own, tile_tokens, stop - first - len(own.tokens))
        table[: len(tiles)] = tiles
        table[len(tiles) :] = 0, 0, 0, -1
    out[layout.block_updates] = block_updates.reshape(-1)
