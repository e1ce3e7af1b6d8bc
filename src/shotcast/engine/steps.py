"""What the device is told of a step, and which graph serves it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shotcast.engine.plan import PENDING, StepPlan
from shotcast.kernels.triton.prompt_attention import TILE_FIELDS

Ints = npt.NDArray[np.int32]


def bucket_sizes(sequences: int) -> tuple[int, ...]:
    """Numbers of sequences for which graphs are captured, ascending, the last ``sequences``.

    Powers of two up to 8; from there an eighth to a quarter apart, so that no step has much more to do than it should:
    1, 2, 4, 8, 16, 24, ..., 64, 80, ..., 128, 160, ...
    """
    sizes, size = [], 1
    while size < sequences:
        sizes.append(size)
        size += size if size < 8 else max(8, (1 << (size.bit_length() - 1)) // 4)
    return (*sizes, sequences)


def token_sizes(tokens: int) -> tuple[int, ...]:
    """Numbers of tokens for which graphs of steps with prompts are captured, ascending, the last ``tokens``.

    Powers of two from 16 to 128, and from there with one between: 16, 32, 64, 128, 192, 256, 384, 512, 768, ... Below,
    a step takes as long as reading the weights does; above, what is captured is dear.
    """
    sizes, size = [], 16
    while size < tokens:
        sizes.append(size)
        size += size if size < 128 else (1 << (size.bit_length() - 1)) // 2
    return (*sizes, tokens)


def bucket_of(plan: StepPlan, sizes: tuple[int, ...]) -> int | None:
    """The smallest of ``sizes`` that serves a step; None if it is none that a graph serves.

    Every sequence has one token, none is new to its slot, and so none is given more than the block of that token. A
    plan is all that this depends on: every rank takes the same way.
    """
    if not sizes or any(len(sequence.tokens) > 1 or sequence.fresh for sequence in plan.sequences):
        return None
    return next((size for size in sizes if size >= len(plan.sequences)), None)


def packed(plan: StepPlan, bucket: int, spare: int, out: npt.NDArray[np.int32]) -> None:
    """Fill ``out`` [bucket, ``kernels.steps.FIELDS``] with a step that :func:`bucket_of` serves.

    Rows without a sequence compute token 0 at position 0 of the tables' row ``spare``, which is nobody's.
    """
    for place, sequence in enumerate(plan.sequences):
        block = sequence.blocks[0] if sequence.blocks else -1
        out[place] = sequence.slot, sequence.start, sequence.tokens[0], block
    out[len(plan.sequences) : bucket] = spare, 0, 0, -1


class Places(NamedTuple):
    """A step, as arrays of int32.

    Attributes:
        tokens: [tokens]; for one that is being drawn, -1 - the row of its sequence.
        positions: [tokens], of each in its sequence.
        slots: [tokens], of the cache.
        rows: [sequences], of the tables.
        starts, counts: [sequences], tokens before this step, and in it.
        firsts: [sequences], places of the first ones among the tokens of the step.
        drawing: bool [sequences], for which a token is drawn.
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    rows: Ints
    starts: Ints
    counts: Ints
    firsts: Ints
    drawing: npt.NDArray[np.bool_]

    @property
    def drawn(self) -> Ints:
        """Places of the tokens whose logits are wanted."""
        return (self.firsts + self.counts - 1)[self.drawing]


def places(plan: StepPlan, tables: Ints, block_size: int) -> Places:
    """``tables`` [rows, blocks] has the blocks that the plan gives out."""
    steps = plan.sequences
    each = [(step.slot, step.start, len(step.tokens), step.draws) for step in steps]
    rows, starts, counts, drawing = np.array(each, np.int32).T
    ends = np.cumsum(counts, dtype=np.int32)
    firsts = ends - counts
    tokens = np.empty(ends[-1], np.int32)
    for step, first, end in zip(steps, firsts.tolist(), ends.tolist(), strict=True):
        tokens[first:end] = -1 - step.slot if step.tokens[0] == PENDING else step.tokens
    positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(starts - firsts, counts)
    slots = slots_of(tables, np.repeat(rows, counts), positions, block_size)
    return Places(tokens, positions, slots, rows, starts, counts, firsts, drawing.astype(bool))


def slots_of(tables: Ints, rows: Ints, positions: Ints, block_size: int) -> Ints:
    """Of the cache, for positions of sequences in these rows of the tables."""
    return tables[rows, positions // block_size] * block_size + positions % block_size


def tile_room(tokens: int, sequences: int, most: int) -> int:
    """Tiles of at most ``most`` tokens that a step of so many tokens and sequences may take, padding included."""
    return min(tokens, tokens // most + min(tokens, sequences) + 1)


def tiles(of: Places, most: int, padding: int = 0) -> Ints:
    """The sequences in tiles of at most ``most`` tokens: [tiles, TILE_FIELDS].

    Args:
        padding: tokens after theirs, which attend to nothing.
    """
    nobody = np.array([0, len(of.tokens), padding, -1], np.int32)
    whole = np.concatenate((np.stack((of.rows, of.firsts, of.counts, of.starts), axis=1), nobody[None]))
    each = -(-whole[:, 2] // most)
    before = (np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)) * most
    table = np.repeat(whole, each, axis=0)
    table[:, 1] += before
    table[:, 2] = np.minimum(table[:, 2] - before, most)
    table[:, 3] = np.where(table[:, 3] < 0, -1, table[:, 3] + before)
    return table


class PromptLayout(NamedTuple):
    """Where things stand in a packed step with prompts, in int32 words. What graphs of any size read comes first.

    Attributes:
        cells: one word, how many cells of the tables are filled.
        drawn: [max_sequences], places of the tokens whose logits are wanted.
        drawn_rows: [max_sequences], the rows of their sequences; of the spare row beyond those.
        tokens, positions, slots: [bucket], as in :class:`Places`.
        tiles: [room for tiles, TILE_FIELDS].
        filled: [cells, 2], their places in the tables and their blocks; they may be of any number.
    """

    cells: slice
    drawn: slice
    drawn_rows: slice
    tokens: slice
    positions: slice
    slots: slice
    tiles: slice
    filled: slice


def prompt_layout(bucket: int, sequences: int, tiles: int) -> PromptLayout:
    """Of a step of ``bucket`` tokens with padding, at most so many sequences, and room for ``tiles``."""
    words = 1, sequences, sequences, bucket, bucket, bucket, tiles * TILE_FIELDS
    ends = list(itertools.accumulate(words))
    parts = [slice(end - count, end) for end, count in zip(ends, words, strict=True)]
    return PromptLayout._make([*parts, slice(ends[-1], None)])


def pack_prompts(
    of: Places, cells: Ints, most: int, spare: int, spare_slot: int, layout: PromptLayout, out: Ints
) -> None:
    """Fill ``out`` with a step, as ``layout`` says.

    Args:
        cells: [cells, 2], as there.
        most: tokens of a tile.
        spare, spare_slot: the row of the tables that is nobody's, and a slot of the cache that is.
    """
    count, bucket = len(of.tokens), layout.tokens.stop - layout.tokens.start
    out[layout.cells] = len(cells)
    for part, values, padding in (
        (layout.drawn, of.drawn, 0),
        (layout.drawn_rows, of.rows[of.drawing], spare),
        (layout.tokens, of.tokens, 0),
        (layout.positions, of.positions, 0),
        (layout.slots, of.slots, spare_slot),
    ):
        out[part][: len(values)] = values
        out[part][len(values) :] = padding
    table = out[layout.tiles].reshape(-1, TILE_FIELDS)
    filled = tiles(of, most, bucket - count)
    table[: len(filled)] = filled
    table[len(filled) :] = 0, 0, 0, -1
    out[layout.filled] = cells.reshape(-1)
