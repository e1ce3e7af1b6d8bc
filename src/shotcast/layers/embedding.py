"""Token embeddings and the logits of a vocabulary that is divided between the ranks of a stage."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from shotcast.layers.linear import Linear
from shotcast.layers.parallel import Parallel
from shotcast.layers.split import VOCAB_UNIT, shares
from shotcast.layers.weights import Weights


class Vocabulary:
    """This rank's rows of an embedding matrix [vocab, hidden], to look tokens up in, or to get logits from.

    Args:
        name: of the tensor in the checkpoint.
        vocab: its rows.
    """

    def __init__(self, weights: Weights, name: str, vocab: int, parallel: Parallel):
        self._parallel = parallel
        self._shares = shares(vocab, parallel.size, VOCAB_UNIT)
        self._mine = self._shares[parallel.rank]
        self.weight = weights.take(name, slice(self._mine.start, self._mine.stop))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens] to [tokens, hidden]: rows of tokens that are this rank's, zero for the others. To be summed."""
        if self._parallel.size == 1:
            return F.embedding(tokens, self.weight)
        places = tokens - self._mine.start
        other = (places < 0) | (places >= len(self._mine))
        return F.embedding(places.masked_fill(other, 0), self.weight).masked_fill(other[:, None], 0)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to float32 [tokens, vocab], the same on every rank."""
        mine = Linear(self.weight)(x).float()
        return self._parallel.gather_columns(mine, [len(share) for share in self._shares])
