"""A decoder layer of the Llama architecture (Touvron et al., arXiv 2302.13971) and its successors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shotcast.layers.attention import Attention, KVCache
from shotcast.layers.batch import Batch
from shotcast.layers.linear import Linear, RowShard, column_parallel, row_parallel
from shotcast.layers.parallel import Parallel
from shotcast.layers.partition import FFN_UNIT, partition_heads, shard
from shotcast.layers.projection_norm import ProjectionNorm
from shotcast.layers.quantized import Float8Rows
from shotcast.layers.weights import Weights
from shotcast.models.config import ModelConfig


def load_norm(weights: Weights, config: ModelConfig, name: str) -> torch.Tensor:
    """Load a norm's weight. A weight stored minus one becomes float32, which holds the sum exactly."""
    weight = weights.load(f"{name}.weight")
    return weight.float() + 1 if config.norms_less_one else weight


def row_shards(matrices: Sequence[tuple[str, int, range]]) -> list[RowShard]:
    """Return where rows of matrices, given by name, size and rows, are stored; those of one name follow each other."""
    found, sizes = [], dict[str, int]()
    for name, size, rows in matrices:
        before = sizes.get(name, 0)
        found.append(RowShard(name, range(before + rows.start, before + rows.stop)))
        sizes[name] = before + size
    return found


class Block:
    """One layer: attention, then the feed-forward network, each after a norm and added to the residual.

    The norm *before* each of them is fused with the preceding sum of partial results. A block therefore receives its
    normalized input, and returns partial sums for the next norm. Some families also normalize the sum before adding it,
    and may omit the norm before attention and MLP.

    Args:
        rotation: cosines and sines, float32 [positions, head_dim / 2].
        max_num_seqs: the largest number of sequences that decode together.
        previous: the previous block in the stage, whose scratch memory this one shares; None for the first.
    """

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        weights: Weights,
        parallel: Parallel,
        rotation: tuple[torch.Tensor, torch.Tensor],
        max_num_seqs: int,
        previous: Block | None,
    ):
        names, head_dim = config.names, config.head_dim
        rank, ranks = parallel.rank, parallel.size
        heads, kv_heads, kv_head_of, no_heads = partition_heads(config.heads, config.kv_heads, rank, ranks)
        columns, no_columns = shard(config.intermediate, rank, ranks, FFN_UNIT)

        def weight_name(name: str) -> str:
            return names.of_layer(number, name)

        def norm(name: str) -> torch.Tensor | None:
            return load_norm(weights, config, weight_name(name)) if name else None

        def head_rows(name: str, count: int, heads: range) -> tuple[str, int, range]:
            return weight_name(name), count * head_dim, range(heads.start * head_dim, heads.stop * head_dim)

        self._parallel, self._eps, self._activation = parallel, config.norm_eps, config.activation
        self.attention_norm, self.attention_post_norm = norm(names.attention_norm), norm(names.attention_post_norm)
        self._input_post_norm = None if previous is None else previous.mlp_post_norm
        self.qkv = column_parallel(
            weights,
            row_shards(
                (
                    head_rows(names.query, config.heads, heads),
                    head_rows(names.key, config.kv_heads, kv_heads),
                    head_rows(names.value, config.kv_heads, kv_heads),
                )
            ),
            config.attention_bias,
        )
        head_norms = self._projection_norm = None
        if config.qk_norm == "head":
            norms = [load_norm(weights, config, weight_name(name)) for name in (names.query_norm, names.key_norm)]
            head_norms = torch.stack([norms[0]] * len(heads) + [norms[1]] * len(kv_heads))
        elif config.qk_norm:
            self._projection_norm = ProjectionNorm(
                weights,
                (weight_name(names.query_norm), weight_name(names.key_norm)),
                config.heads,
                config.kv_heads,
                head_dim,
                config.norm_eps,
                parallel,
            )
        self.attention: Attention = Attention(
            len(heads),
            head_dim,
            kv_head_of,
            *rotation,
            max_num_seqs,
            config.window_of(number) or 0,
            head_norms,
            config.norm_eps,
            None if previous is None else previous.attention,
            config.attention_scale,
            config.attention_cap,
        )
        self.output = row_parallel(
            weights,
            weight_name(names.output),
            range(heads.start * head_dim, heads.stop * head_dim),
            config.output_bias,
            rank,
            no_heads,
        )
        self.mlp_norm = norm(names.mlp_norm)
        self.mlp_post_norm: torch.Tensor | None = norm(names.mlp_post_norm)
        self.gate_up = column_parallel(
            weights,
            row_shards([(weight_name(name), config.intermediate, columns) for name in (names.gate, names.up)]),
            config.mlp_bias,
        )
        self.down = row_parallel(weights, weight_name(names.down), columns, config.mlp_bias, rank, no_columns)

    def __call__(
        self, normed: torch.Tensor | Float8Rows, residual: torch.Tensor, cache: KVCache, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute partial sums of the output from ``normed`` [tokens, hidden]; return them and the new residual."""
        normed, residual = self.mlp_input(self.attend(normed, cache, batch), residual)
        return self.feed_forward(normed), residual

    def attend(self, normed: torch.Tensor | Float8Rows, cache: KVCache, batch: Batch) -> torch.Tensor:
        """Compute partial sums of the attention's output."""
        qkv = self.qkv(normed)
        if self._projection_norm is not None:
            qkv = self._projection_norm(qkv)
        return self.output(self.attention(qkv, cache, batch))

    def mlp_input(
        self, partial: torch.Tensor, residual: torch.Tensor, copy_engines: bool = False
    ) -> tuple[torch.Tensor | Float8Rows, torch.Tensor]:
        """Sum the attention's partial results, by copy engines if given; return the MLP's normalized input and the new
        residual."""
        return self._reduce_norm(partial, residual, self.attention_post_norm, self.mlp_norm, self.gate_up, copy_engines)

    def feed_forward(self, normed: torch.Tensor | Float8Rows) -> torch.Tensor:
        """Compute partial sums of the MLP's output."""
        return self.down(self.gate_up.gated(normed, self._activation))

    def normed_input(
        self, partial: torch.Tensor, residual: torch.Tensor, copy_engines: bool = False
    ) -> tuple[torch.Tensor | Float8Rows, torch.Tensor]:
        """Sum the previous operation's partial results, by copy engines if given; return this block's normalized input
        and the new residual."""
        return self._reduce_norm(partial, residual, self._input_post_norm, self.attention_norm, self.qkv, copy_engines)

    def _reduce_norm(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor | None,
        weight: torch.Tensor | None,
        following: Linear,
        copy_engines: bool,
    ) -> tuple[torch.Tensor | Float8Rows, torch.Tensor]:
        if post is not None or weight is None:
            return self._parallel.reduce_post_norm(partial, residual, post, weight, self._eps)
        if following.takes_float8(partial.shape[0]):
            return self._parallel.reduce_norm_float8(partial, residual, weight, self._eps, copy_engines)
        return self._parallel.reduce_norm(partial, residual, weight, self._eps, copy_engines)
