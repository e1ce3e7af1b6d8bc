"""Decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3.

Touvron et al., arXiv 2302.13971; the family differs in biases, in norms of queries and keys, and in how positions and
windows are stretched, all of which :class:`ModelConfig` says.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from shotcast.layers.attention import Attention, KVCache
from shotcast.layers.batch import Batch, Logits
from shotcast.layers.embedding import Vocabulary
from shotcast.layers.float8 import Float8Rows
from shotcast.layers.linear import Linear, Rows, column_parallel, row_parallel
from shotcast.layers.parallel import Parallel
from shotcast.layers.partition import FFN_UNIT, partition, partition_heads
from shotcast.layers.weights import Weights
from shotcast.models.config import ModelConfig

EMBEDDINGS, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class Block:
    """One layer: attention, then the feed-forward network, each behind a norm and added to the residual.

    The norm *before* either follows the sum of partial results before it, in one operation; so a block is given its
    input normed, and returns partial sums for the next norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        weights: Weights,
        parallel: Parallel,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        sequences: int,
        beside: Block | None,
    ):
        prefix, head_dim = f"model.layers.{number}", config.head_dim
        rank, ranks = parallel.rank, parallel.size
        heads, kv_heads, kv_head_of = partition_heads(config.heads, config.kv_heads, rank, ranks)
        columns = partition(config.intermediate, ranks, FFN_UNIT)[rank]

        def rows_of(name: str, mine: range) -> Rows:
            return Rows(f"{prefix}.self_attn.{name}_proj", range(mine.start * head_dim, mine.stop * head_dim))

        self._parallel, self._eps = parallel, config.norm_eps
        self.attention_norm = weights.take(f"{prefix}.input_layernorm.weight")
        self.qkv = column_parallel(
            weights,
            (rows_of("q", heads), rows_of("k", kv_heads), rows_of("v", kv_heads)),
            config.attention_bias,
        )
        head_norms = None
        if config.qk_norm:
            norms = [weights.take(f"{prefix}.self_attn.{name}_norm.weight") for name in ("q", "k")]
            head_norms = torch.stack([norms[0]] * len(heads) + [norms[1]] * len(kv_heads))
        window = config.sliding_window or 0
        self.attention: Attention = Attention(
            len(heads),
            head_dim,
            kv_head_of,
            cosines,
            sines,
            sequences,
            window,
            head_norms,
            config.norm_eps,
            None if beside is None else beside.attention,
        )
        self.output = row_parallel(
            weights,
            f"{prefix}.self_attn.o_proj",
            range(heads.start * head_dim, heads.stop * head_dim),
            config.output_bias,
            rank,
        )
        self.mlp_norm = weights.take(f"{prefix}.post_attention_layernorm.weight")
        self.gate_up = column_parallel(
            weights,
            [Rows(f"{prefix}.mlp.{name}_proj", columns) for name in ("gate", "up")],
            config.mlp_bias,
        )
        self.down = row_parallel(weights, f"{prefix}.mlp.down_proj", columns, config.mlp_bias, rank)

    def __call__(
        self, normed: torch.Tensor | Float8Rows, residual: torch.Tensor, cache: KVCache, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``normed`` [tokens, hidden] to partial sums of the block's output, and the residual to add them to."""
        partial = self.output(self.attention(self.qkv(normed), cache, batch))
        normed, residual = self._reduce_norm(partial, residual, self.mlp_norm, self.gate_up)
        return self.down(self.gate_up.gated(normed)), residual

    def enter(self, partial: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor | Float8Rows, torch.Tensor]:
        """The block's normed input and the residual, from the partial sums before it; as the block is to be called."""
        return self._reduce_norm(partial, residual, self.attention_norm, self.qkv)

    def _reduce_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, following: Linear
    ) -> tuple[torch.Tensor | Float8Rows, torch.Tensor]:
        if following.takes_float8(partial.shape[0]):
            return self._parallel.reduce_norm_float8(partial, residual, weight, self._eps)
        return self._parallel.reduce_norm(partial, residual, weight, self._eps)


class Llama:
    """This rank's part of a model: some layers (its stage), and of these its share.

    Args:
        config: of the model.
        weights: where parameters come from.
        parallel: the ranks.
        positions: tokens that a sequence may have.
        sequences: that decode together, at most.
    """

    def __init__(self, config: ModelConfig, weights: Weights, parallel: Parallel, positions: int, sequences: int):
        self.config, self.parallel, self._eps = config, parallel, config.norm_eps
        cosines, sines = config.rope.tables(config.head_dim, positions, weights.device)
        self.layers = partition(config.layers, parallel.stages)[parallel.stage]
        self.embeddings = self.head = None
        if parallel.first:
            self.embeddings = Vocabulary(weights, EMBEDDINGS, config.vocab, parallel)
        self.blocks: list[Block] = []
        for number in self.layers:
            beside = self.blocks[0] if self.blocks else None
            self.blocks.append(Block(config, number, weights, parallel, cosines, sines, sequences, beside))
        if parallel.last:
            self.last_norm = weights.take(LAST_NORM)
            if config.tied and self.embeddings is not None:
                self.head = self.embeddings
            else:
                name = EMBEDDINGS if config.tied else HEAD
                self.head = Vocabulary(weights, name, config.vocab, parallel)
        self.dtype = weights.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return torch.float32 if self.blocks[0].mlp_norm.device.type == "cpu" else self.dtype

    def tile(self, tokens: int) -> int:
        """Tokens of a tile of :class:`~shotcast.layers.batch.AttentionTiles`, in a step of so many."""
        return self.blocks[0].attention.tile(tokens, self.cache_dtype)

    def caches(self, blocks: int, block_size: int) -> list[KVCache]:
        """Empty caches for this rank's layers and heads, of so many blocks of ``block_size`` tokens each."""
        return [
            KVCache(
                blocks,
                block_size,
                block.attention.kv_heads,
                block.attention.head_dim,
                self.cache_dtype,
                block.mlp_norm.device,
            )
            for block in self.blocks
        ]

    def __call__(self, batch: Batch, caches: list[KVCache]) -> Logits | None:
        """Run one step. On the last stage, return the logits of ``batch.logits_indices``, None if it is empty."""
        last = self.hidden(batch, caches)
        if last is None:
            return None
        if batch.logits_indices is None:
            return self.logits(last, batch.logits_out)
        return self.logits(last[batch.logits_indices]) if batch.logits_indices.numel() else None

    def logits(self, last: torch.Tensor, out: Logits | None = None) -> Logits:
        """Of rows of what :meth:`hidden` gives, on the last stage. ``out``: on CUDA, where they go."""
        assert self.head is not None
        return self.head.logits(last, out)

    def hidden(self, batch: Batch, caches: list[KVCache]) -> torch.Tensor | None:
        """A step without the head: on the last stage the normed output of the last block, [tokens, hidden]."""
        parallel = self.parallel
        tokens = batch.tokens.shape[0]
        normed: torch.Tensor | Float8Rows
        if self.embeddings is not None:
            partial = self.embeddings.embed(batch.tokens)
            residual = torch.zeros_like(partial[parallel.part(tokens)])
            normed, residual = self.blocks[0].enter(partial, residual)
        else:
            hidden = torch.empty(tokens, self.config.hidden, dtype=self.dtype, device=batch.tokens.device)
            parallel.receive(hidden)
            weight = self.blocks[0].attention_norm
            normed = F.rms_norm(hidden.float(), (self.config.hidden,), weight.float(), self._eps).to(self.dtype)
            residual = hidden[parallel.part(tokens)].contiguous()
        for place, (block, cache) in enumerate(zip(self.blocks, caches, strict=True)):
            partial, residual = block(normed, residual, cache, batch)
            if place + 1 < len(self.blocks):
                normed, residual = self.blocks[place + 1].enter(partial, residual)
        if self.head is None:
            hidden = parallel.all_reduce(partial)
            if parallel.divides_residual(tokens):
                residual = parallel.gather_rows(residual)
            parallel.send(hidden + residual)
            return None
        last, _ = parallel.reduce_norm(partial, residual, self.last_norm, self._eps)
        return last
