"""The tokens of one step, and where their keys and values are in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class PrefillMetadata(NamedTuple):
    """Sequences that have several tokens in a step, concatenated; these tokens are the last ones of each sequence.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: cumulative lengths: where each sequence begins among the tokens of this step, and
            among all tokens whose keys are kept; and the totals.
        slots: [keys] int64, the cache slot of each key.
    """

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    slots: torch.Tensor


class AttentionTiles(NamedTuple):
    """All sequences of a step, divided into the tiles that ``kernels/triton/prompt_attention.py`` processes.

    Attributes:
        table: int32 [tiles, TILE_FIELDS].
        max_tokens: the largest number of tokens of a tile.
    """

    table: torch.Tensor
    max_tokens: int


class Logits(NamedTuple):
    """The logits of the next tokens.

    Attributes:
        values: float32 [rows, vocab].
        best: int64 [rows, 2]: the likeliest token (the lowest of equal ones), and 1 if all logits are numbers, else 0.
    """

    values: torch.Tensor
    best: torch.Tensor

    def rows(self, index: slice | torch.Tensor) -> Logits:
        """Return some of the rows: views for a slice, copies for an index tensor."""
        return Logits(self.values[index], self.best[index])


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one step. Tokens of sequences that decode come first, then those of prompts.

    With ``tiles``, one kernel attends to all sequences alike, and ``num_decodes`` is 0.

    Attributes:
        tokens: [tokens], the token ids.
        positions: [tokens], the position of each token in its sequence, from 0.
        slot_mapping: [tokens], the cache slot of each token's key and value: block * block size + offset in the block.
        num_decodes: the number of tokens that attend one by one. On a GPU they belong to as many sequences.
        table_rows: [num_decodes], the row of ``block_tables`` of each of these.
        seq_lens: [num_decodes] int32, the number of tokens that each attends to, itself included.
        prefill: the other sequences; None if there are none.
        tiles: all sequences, in steps of a GPU that do not only decode.
        block_tables: [rows, blocks] int32, the blocks of each sequence in order.
        logits_indices: [sampled tokens], the tokens whose logits are wanted; None for all tokens.
        logits_out: where the logits are written; None for new tensors.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    table_rows: torch.Tensor
    seq_lens: torch.Tensor
    prefill: PrefillMetadata | None
    tiles: AttentionTiles | None
    block_tables: torch.Tensor
    logits_indices: torch.Tensor | None
    logits_out: Logits | None = None
