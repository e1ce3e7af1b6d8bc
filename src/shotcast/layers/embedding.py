"""Token embeddings and logits of a vocabulary divided between the ranks of a stage."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from shotcast.layers.batch import Logits
from shotcast.layers.linear import Linear
from shotcast.layers.parallel import Parallel
from shotcast.layers.partition import VOCAB_UNIT, partition
from shotcast.layers.quantized import BlockRows
from shotcast.layers.weights import Weights


class VocabParallelEmbedding:
    """This rank's rows of an embedding matrix [vocab, hidden], for looking up tokens or computing logits.

    Args:
        scale: the factor of embedding lookups.
        logit_cap: if not 0, logits x become ``logit_cap * tanh(x / logit_cap)``.
    """

    def __init__(
        self, weights: Weights, name: str, vocab: int, parallel: Parallel, scale: float = 1.0, logit_cap: float = 0.0
    ):
        self._parallel = parallel
        parts = partition(vocab, parallel.size, VOCAB_UNIT)
        self._own_rows = parts[parallel.rank]
        self._widths = [len(part) for part in parts]
        table = weights.load_table(name, slice(self._own_rows.start, self._own_rows.stop))
        self._blocks, self._dtype = (table if isinstance(table, BlockRows) else None), weights.dtype
        self._product = Linear(table)
        self.weight = self._product.weight
        self._scale = torch.tensor(scale, dtype=self._dtype).item()  # rounded as in training
        self._logit_cap = logit_cap
        bounds = [part.start for part in parts] + [vocab]
        self._starts = torch.tensor(bounds, dtype=torch.int32, device=self.weight.device)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up [tokens] to [tokens, hidden]: this rank's rows, and zeros for tokens of other ranks. The caller must
        sum over ranks."""
        rows = self._rows(tokens)
        return rows if self._scale == 1 else rows * self._scale

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.weight.is_cuda:
            from shotcast.kernels.triton.embedding import embed

            return embed(tokens, self.weight, self._own_rows.start)
        if self._parallel.size == 1:
            return self._look_up(tokens)
        row_indices = tokens - self._own_rows.start
        other = (row_indices < 0) | (row_indices >= len(self._own_rows))
        return self._look_up(row_indices.masked_fill(other, 0)).masked_fill(other[:, None], 0)

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(rows, self.weight) if self._blocks is None else self._blocks.values(self._dtype, rows)

    def logits(self, x: torch.Tensor, out: Logits | None = None) -> Logits:
        """Compute the logits of [rows, hidden], the same on every rank. On CUDA they go to ``out``, if given."""
        parts = self._parallel.gather_columns(self._product(x), self._widths)
        rows = x.shape[0]
        if self.weight.is_cuda:
            from shotcast.kernels.triton.logits import concat_columns

            if out is None:
                values = torch.empty(rows, sum(self._widths), device=x.device)
                out = Logits(values, torch.empty(rows, 2, dtype=torch.int64, device=x.device))
            concat_columns(parts, self._widths, self._starts, out.values, out.best, self._logit_cap)
            return out
        columns = [part.view(rows, -1) for part in parts.split([rows * width for width in self._widths])]
        values = (columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)).float()
        if self._logit_cap:
            values = self._logit_cap * torch.tanh(values / self._logit_cap)
        token = values.argmax(1, keepdim=True)  # in a row that holds NaN, the position of a NaN
        return Logits(values, torch.cat((token, values.gather(1, token).isfinite().long()), dim=1))
