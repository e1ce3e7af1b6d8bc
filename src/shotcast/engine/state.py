"""What a rank keeps on its device from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shotcast.layers.attention import KVCache
from shotcast.layers.batch import Logits
from shotcast.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class State:
    """The model, and what its steps read and write beside their own tokens; a graph knows it by its addresses.

    Attributes:
        model: this rank's part.
        caches: of its layers. For steps on static memory they have a block more than is given out, the last.
        tables: int32 [slots + 1, blocks], the blocks of each slot's sequence. The last row is nobody's; for steps on
            static memory it holds that block.
        drawn: int64 [slots + 1], of each slot the token drawn last.
        logits: of as many rows as slots, where steps on static memory put theirs; None if these are new tensors.
    """

    model: CausalLM
    caches: list[KVCache]
    tables: torch.Tensor
    drawn: torch.Tensor
    logits: Logits | None

    @property
    def device(self) -> torch.device:
        return self.tables.device

    @property
    def block_size(self) -> int:
        return self.caches[0].block_size

    @property
    def spare_row(self) -> int:
        """Of the tables: nobody's."""
        return self.tables.shape[0] - 1

    @property
    def spare_slot(self) -> int:
        """Of the caches: the first of nobody's block."""
        return self.caches[0].keys.shape[0] - self.block_size
