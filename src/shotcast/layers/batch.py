"""The tokens of one step, and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that have one token in this step (decoding) come first, then those with more.

    Attributes:
        tokens: [tokens], the ids.
        positions: [tokens], of each in its sequence, from 0.
        slots: [tokens], where each one's key and value go: block * block size + place in the block.
        starts: on the host, of each sequence its first token's place; and the number of tokens.
        contexts: on the host, of each sequence the tokens that are in the cache after this step.
        decodes: how many sequences have one token.
        tables: [sequences, blocks] int32, the blocks of each sequence in order.
        lengths: [sequences] int32, ``contexts`` on the device.
        drawn: [sequences that draw a token], places of the tokens whose logits are wanted.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: tuple[int, ...]
    contexts: tuple[int, ...]
    decodes: int
    tables: torch.Tensor
    lengths: torch.Tensor
    drawn: torch.Tensor
