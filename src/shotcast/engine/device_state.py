"""The state that a rank keeps on its device from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shotcast.layers.attention import KVCache
from shotcast.layers.batch import Logits
from shotcast.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The model, and the memory that its steps read and write besides their inputs. Graphs refer to its addresses.

    Attributes:
        model: this rank's part of the model.
        caches: the paged caches of its layers. With static memory they have one spare block, the last, which is never
            handed out.
        block_tables: int32 [slots + 1, blocks], the blocks of each slot's sequence. The last row belongs to no
            sequence; with static memory it holds the spare block.
        last_tokens: int64 [slots + 1], the token sampled last for each slot.
        logits: the output of steps on static memory, with as many rows as slots; None if they allocate their output.
    """

    model: CausalLM
    caches: list[KVCache]
    block_tables: torch.Tensor
    last_tokens: torch.Tensor
    logits: Logits | None

    @property
    def device(self) -> torch.device:
        """The device of these tensors."""
        return self.block_tables.device

    @property
    def block_size(self) -> int:
        """Tokens of a cache block."""
        return self.caches[0].block_size

    @property
    def spare_row(self) -> int:
        """The row of the block tables that belongs to no sequence."""
        return self.block_tables.shape[0] - 1

    @property
    def spare_slot(self) -> int:
        """The first cache slot of the spare block."""
        return self.caches[0].keys.shape[0] - self.block_size
