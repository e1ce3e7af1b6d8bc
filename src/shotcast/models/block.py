"""One decoder layer of the Llama architecture (Touvron et al., arXiv 2302.13971)."""

from __future__ import annotations

import torch

from shotcast.layers.attention import Attention, KVCache
from shotcast.layers.batch import Batch
from shotcast.layers.float8 import Float8Rows
from shotcast.layers.linear import Linear, RowShard, column_parallel, row_parallel
from shotcast.layers.parallel import Parallel
from shotcast.layers.partition import FFN_UNIT, partition_heads, shard
from shotcast.layers.weights import Weights
from shotcast.models.config import ModelConfig


class Block:
    """One layer: attention, then the feed-forward network, each after a norm and added to the residual.

    The norm *before* either one follows the sum of partial results before it, in one fused operation. A block is
    therefore given its normed input, and returns partial sums for the next norm.

    Args:
        config: the model.
        number: the number of the layer.
        weights: the source of the parameters.
        parallel: the ranks.
        cosines, sines: float32 [positions, head_dim / 2].
        max_sequences: the largest number of sequences that decode together.
        share_scratch_with: another block whose scratch memory this one uses too; None for memory of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        weights: Weights,
        parallel: Parallel,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        max_sequences: int,
        share_scratch_with: Block | None,
    ):
        names, head_dim = config.names, config.head_dim
        rank, ranks = parallel.rank, parallel.size
        heads, kv_heads, kv_head_of, no_heads = partition_heads(config.heads, config.kv_heads, rank, ranks)
        columns, no_columns = shard(config.intermediate, rank, ranks, FFN_UNIT)

        def weight_name(name: str) -> str:
            return names.of_layer(number, name)

        def head_rows(name: str, heads: range) -> RowShard:
            return RowShard(weight_name(name), range(heads.start * head_dim, heads.stop * head_dim))

        self._parallel, self._eps = parallel, config.norm_eps
        self.attention_norm = weights.load(f"{weight_name(names.attention_norm)}.weight")
        self.qkv = column_parallel(
            weights,
            (head_rows(names.query, heads), head_rows(names.key, kv_heads), head_rows(names.value, kv_heads)),
            config.attention_bias,
        )
        head_norms = None
        if config.qk_norm:
            norms = [weights.load(f"{weight_name(name)}.weight") for name in (names.query_norm, names.key_norm)]
            head_norms = torch.stack([norms[0]] * len(heads) + [norms[1]] * len(kv_heads))
        window = config.sliding_window or 0
        self.attention: Attention = Attention(
            len(heads),
            head_dim,
            kv_head_of,
            cosines,
            sines,
            max_sequences,
            window,
            head_norms,
            config.norm_eps,
            None if share_scratch_with is None else share_scratch_with.attention,
        )
        self.output = row_parallel(
            weights,
            weight_name(names.output),
            range(heads.start * head_dim, heads.stop * head_dim),
            config.output_bias,
            rank,
            no_heads,
        )
        self.mlp_norm = weights.load(f"{weight_name(names.mlp_norm)}.weight")
        self.gate_up = column_parallel(
            weights,
            [RowShard(weight_name(name), columns) for name in (names.gate, names.up)],
            config.mlp_bias,
        )
        self.down = row_parallel(weights, weight_name(names.down), columns, config.mlp_bias, rank, no_columns)

    def __call__(
        self, normed: torch.Tensor | Float8Rows, residual: torch.Tensor, cache: KVCache, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute partial sums of the block's output from ``normed`` [tokens, hidden].

        Returns:
            The partial sums, and the residual to add them to.
        """
        normed, residual = self.mlp_input(self.attend(normed, cache, batch), residual)
        return self.feed_forward(normed), residual

    def attend(self, normed: torch.Tensor | Float8Rows, cache: KVCache, batch: Batch) -> torch.Tensor:
        """Compute partial sums of the attention's output."""
        return self.output(self.attention(self.qkv(normed), cache, batch))

    def mlp_input(
        self, partial: torch.Tensor, residual: torch.Tensor, sms: int | None = None
    ) -> tuple[torch.Tensor | Float8Rows, torch.Tensor]:
        """Sum the partial results of the attention, on ``sms`` SMs if they are given; return the normed input of the
        MLP and the new residual."""
        return self._reduce_norm(partial, residual, self.mlp_norm, self.gate_up, sms)

    def feed_forward(self, normed: torch.Tensor | Float8Rows) -> torch.Tensor:
        """Compute partial sums of the MLP's output."""
        return self.down(self.gate_up.gated(normed))

    def normed_input(
        self, partial: torch.Tensor, residual: torch.Tensor, sms: int | None = None
    ) -> tuple[torch.Tensor | Float8Rows, torch.Tensor]:
        """Sum the partial results of the operation before, on ``sms`` SMs if they are given; return this block's
        normed input and the new residual."""
        return self._reduce_norm(partial, residual, self.attention_norm, self.qkv, sms)

    def _reduce_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, following: Linear, sms: int | None
    ) -> tuple[torch.Tensor | Float8Rows, torch.Tensor]:
        if following.takes_float8(partial.shape[0]):
            return self._parallel.reduce_norm_float8(partial, residual, weight, self._eps, sms)
        return self._parallel.reduce_norm(partial, residual, weight, self._eps, sms)
