"""The tokens of one step, and the cache locations of their keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class PrefillMetadata(NamedTuple):
    """Sequences with several tokens in a step, concatenated; these tokens are the last ones of each sequence."""

    cu_seqlens_q: tuple[int, ...]  # where each sequence begins among the tokens of this step, and their number
    cu_seqlens_k: tuple[int, ...]  # the same among all tokens whose keys are kept
    slots: torch.Tensor  # [keys] int64, the cache slot of each key


class AttentionTiles(NamedTuple):
    """All sequences of a step, divided into the tiles that ``kernels/triton/prompt_attention.py`` processes."""

    table: torch.Tensor  # int32 [tiles, TILE_FIELDS]
    max_tokens: int  # the largest number of tokens of a tile


class Logits(NamedTuple):
    """The logits of the next tokens."""

    values: torch.Tensor  # float32 [rows, vocab]
    # int64 [rows, 2]: the likeliest token (the lowest of equal ones), and 1 if all logits are numbers, else 0
    best: torch.Tensor

    def rows(self, index: slice | torch.Tensor) -> Logits:
        """Return some of the rows: views for a slice, copies for an index tensor."""
        return Logits(self.values[index], self.best[index])


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one step. Tokens of decoding sequences come first, followed by prompts.

    With ``tiles``, one kernel handles all sequences, and ``num_decodes`` is 0.
    """

    tokens: torch.Tensor  # [tokens], the token ids
    positions: torch.Tensor  # [tokens], the position of each token in its sequence, from 0
    # [tokens], the cache slot of each token's key and value: block * block size + offset in the block
    slot_mapping: torch.Tensor
    num_decodes: int  # the number of tokens that attend one by one. On a GPU they belong to as many sequences
    table_rows: torch.Tensor  # [num_decodes], the row of ``block_tables`` of each of these
    seq_lens: torch.Tensor  # [num_decodes] int32, the number of tokens that each attends to, itself included
    prefill: PrefillMetadata | None  # the other sequences; None if there are none
    tiles: AttentionTiles | None  # all sequences, in steps of a GPU that do not only decode
    block_tables: torch.Tensor  # [rows, blocks] int32, the blocks of each sequence in order
    logits_indices: torch.Tensor | None  # [sampled tokens], the tokens whose logits are wanted; None for all tokens
    logits_out: Logits | None = None  # where the logits are written; None for new tensors
