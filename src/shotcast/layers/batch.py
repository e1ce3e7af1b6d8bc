"""The tokens of one step, and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Prefills(NamedTuple):
    """Sequences with several tokens in a step, one behind the other: the last of each that are in the cache after it.

    Attributes:
        queries, keys: where each sequence begins among their tokens of this step, and among all that is kept of them;
            and the number of these.
        slots: [keys] int64, of the cache.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    slots: torch.Tensor


class Tiles(NamedTuple):
    """All sequences of a step, one behind the other, in the pieces that ``kernels/triton/prompt_attention.py`` takes.

    Attributes:
        table: int32 [tiles, TILE_FIELDS].
        tokens: of a tile, at most.
    """

    table: torch.Tensor
    tokens: int


class Logits(NamedTuple):
    """What a step says of the next tokens.

    Attributes:
        values: float32 [drawn, vocab].
        best: int64 [drawn, 2]: the likeliest token (the lowest of equal ones), and 1 if all logits are numbers, else 0.
    """

    values: torch.Tensor
    best: torch.Tensor

    def rows(self, of: slice | torch.Tensor) -> Logits:
        """Of some of the next tokens: views for a slice, copies for an index."""
        return Logits(self.values[of], self.best[of])


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that have one token in this step (decoding) come first, then those with more.

    Where kernels attend to all of them alike, ``tiles`` says what they are, and ``decodes`` is 0.

    Attributes:
        tokens: [tokens], the ids.
        positions: [tokens], of each in its sequence, from 0.
        slots: [tokens], where each one's key and value go: block * block size + place in the block.
        decodes: how many sequences have one token.
        rows: [decodes], the row of ``tables`` of each of these.
        lengths: [decodes] int32, how many tokens of each are in the cache after this step.
        prefills: the other sequences; None if there are none.
        tiles: of all sequences, in steps of a GPU that not only decode.
        tables: [rows, blocks] int32, the blocks of sequences in order.
        drawn: [sequences that draw a token], places of the tokens whose logits are wanted; None for all tokens.
        logits: where these go; None for new tensors.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    decodes: int
    rows: torch.Tensor
    lengths: torch.Tensor
    prefills: Prefills | None
    tiles: Tiles | None
    tables: torch.Tensor
    drawn: torch.Tensor | None
    logits: Logits | None = None
