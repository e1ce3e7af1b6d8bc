"""Language models: embeddings, the layers of a stage, and the head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial as partial_of
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from shotcast.layers.attention import KVCache
from shotcast.layers.batch import Batch, Logits
from shotcast.layers.embedding import VocabParallelEmbedding
from shotcast.layers.parallel import Parallel
from shotcast.layers.partition import partition
from shotcast.layers.quantized import Float8Rows
from shotcast.layers.weights import Weights
from shotcast.models.block import Block, load_norm
from shotcast.models.config import ModelConfig
from shotcast.overlap.controller import Controller
from shotcast.overlap.schedule import split


class CausalLM:
    """This rank's part of a model: the layers of its stage, and its shard of each.

    Args:
        max_num_seqs: the largest number of sequences that decode together.
        cache_dtype: the dtype of cached keys and values; None for the dtype of activations (float32 on the CPU).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        parallel: Parallel,
        max_positions: int,
        max_num_seqs: int,
        cache_dtype: torch.dtype | None = None,
    ):
        self.config, self.parallel, self._eps = config, parallel, config.norm_eps
        rotation = config.rope.tables(config.head_dim, max_positions, weights.device)
        local_rotation = rotation
        if config.local_rope is not None:
            local_rotation = config.local_rope.tables(config.head_dim, max_positions, weights.device)
        self.layers = partition(config.layers, parallel.stages)[parallel.stage]
        self.embeddings = self.head = None
        if parallel.first:
            self.embeddings = VocabParallelEmbedding(
                weights,
                f"{config.names.embeddings}.weight",
                config.vocab,
                parallel,
                config.embedding_scale,
                config.logit_cap,
            )
        self.blocks: list[Block] = []
        for number in self.layers:
            previous = self.blocks[-1] if self.blocks else None
            turns = rotation if config.window_of(number) is None else local_rotation
            self.blocks.append(Block(config, number, weights, parallel, turns, max_num_seqs, previous))
        if parallel.last:
            self.final_norm = load_norm(weights, config, config.names.final_norm)
            if config.tied and self.embeddings is not None:
                self.head = self.embeddings
            else:
                name = config.names.embeddings if config.tied else config.names.head
                self.head = VocabParallelEmbedding(
                    weights, f"{name}.weight", config.vocab, parallel, logit_cap=config.logit_cap
                )
        self.dtype, self.device = weights.dtype, weights.device
        self._attention_dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        self._cache_dtype = cache_dtype or self._attention_dtype

    @property
    def overlap_unsupported_reason(self) -> str:
        """Why :meth:`overlapped` cannot run the model; empty if it can."""
        if self.config.has_post_norms or self.config.qk_norm == "projection":
            return f"the family {self.config.family} has norms that need the sums of all ranks"
        return ""

    def max_tile_tokens(self, tokens: int) -> int:
        """Return the most tokens in one of :class:`~shotcast.layers.batch.AttentionTiles` in a step of ``tokens``."""
        return self.blocks[0].attention.max_tile_tokens(tokens, self._attention_dtype, self._cache_dtype)

    def allocate_caches(self, blocks: int, block_size: int) -> list[KVCache]:
        """Allocate caches for this rank's layers and heads: ``blocks`` blocks of ``block_size`` tokens each."""
        return [
            KVCache(
                blocks, block_size, block.attention.kv_heads, block.attention.head_dim, self._cache_dtype, self.device
            )
            for block in self.blocks
        ]

    def shortened(self, layers: int) -> CausalLM:
        """Return a model of at most the first ``layers`` layers of this stage, which shares its memory."""
        short = copy.copy(self)
        short.blocks = self.blocks[:layers]
        return short

    def __call__(self, batch: Batch, caches: list[KVCache]) -> Logits | None:
        """Run one step. On the last stage, return the logits of ``batch.logits_indices``, or None if it is empty."""
        last = self.hidden(batch, caches)
        return None if last is None else self.next_logits(last, batch)

    def next_logits(self, last: torch.Tensor, batch: Batch) -> Logits | None:
        """Return the logits of ``batch.logits_indices`` from the result of :meth:`hidden`, or None if it is empty."""
        if batch.logits_indices is None:
            return self.logits(last, batch.logits_out)
        return self.logits(last[batch.logits_indices]) if batch.logits_indices.numel() else None

    def overlapped(self, batches: Sequence[Batch], caches: list[KVCache], controller: Controller) -> Logits | None:
        """Run one step in parts, each of which communicates while the others compute.

        The model must be one stage without :attr:`overlap_unsupported_reason`.
        Returns the logits of the ``logits_indices`` of all parts, or None if they are empty.

        Args:
            batches: the parts. Later tokens of a sequence must be in a later part.
            controller: runs the schedule, on the communicator of the ranks.
        """
        last = self.hidden_of_parts(batches, caches, controller)
        wanted = [
            rows if batch.logits_indices is None else rows[batch.logits_indices]
            for rows, batch in zip(last, batches, strict=True)
        ]
        rows = torch.cat(wanted)
        return self.logits(rows) if rows.shape[0] else None

    def hidden_of_parts(
        self, batches: Sequence[Batch], caches: list[KVCache], controller: Controller, copy_engines: bool = False
    ) -> list[torch.Tensor]:
        """Run :meth:`overlapped` up to the head, and return the last normalized hidden states of each part.

        ``copy_engines`` sum over the ranks if given; the norms are then separate kernels.

        Computation and communication are submitted to the lanes layer by layer, one part at a time. A tensor that both
        use is freed only when the next work of its part has waited for both.
        """
        assert self.embeddings is not None
        blocks, parts = self.blocks, range(len(batches))
        partial: list[Any] = [None for _ in parts]
        normed: list[Any] = [None for _ in parts]
        residual: list[Any] = [None for _ in parts]
        embeddings, norm = self.embeddings, self.final_norm
        stages = 2 * len(blocks) + 1  # the embeddings, and each attention and MLP

        def compute(stage: int, part: int) -> None:
            batch = batches[part]
            if stage == 0:
                partial[part] = embeddings.embed(batch.tokens)
                residual[part] = torch.zeros_like(partial[part])
                return
            if stage % 2:
                index = stage // 2
                partial[part] = blocks[index].attend(normed[part], caches[index], batch)
            else:
                partial[part] = blocks[stage // 2 - 1].feed_forward(normed[part])

        def reduce(stage: int, part: int) -> None:
            x, before = partial[part], residual[part]
            if stage == stages - 1:
                normed[part], residual[part] = self.parallel.reduce_norm(x, before, norm, self._eps, copy_engines)
            elif stage % 2:
                normed[part], residual[part] = blocks[stage // 2].mlp_input(x, before, copy_engines)
            else:
                normed[part], residual[part] = blocks[stage // 2].normed_input(x, before, copy_engines)

        names = [(stage, part, f"{stage}.{part}") for stage in range(stages) for part in parts]
        controller.run(
            split(stages, len(batches)),
            {f"compute {name}": partial_of(compute, stage, part) for stage, part, name in names},
            {f"communicate {name}": lambda comm, at=(stage, part): reduce(*at) for stage, part, name in names},  # type: ignore[misc]
        )
        return normed

    def logits(self, last: torch.Tensor, out: Logits | None = None) -> Logits:
        """Compute the logits of rows of :meth:`hidden`'s result, on the last stage; on CUDA in ``out``, if given."""
        assert self.head is not None
        return self.head.logits(last, out)

    def hidden(self, batch: Batch, caches: list[KVCache]) -> torch.Tensor | None:
        """Run a step without the head; return the last stage's normalized output [tokens, hidden], else None."""
        parallel = self.parallel
        tokens = batch.tokens.shape[0]
        normed: torch.Tensor | Float8Rows
        if self.embeddings is not None:
            partial = self.embeddings.embed(batch.tokens)
            residual = torch.zeros_like(partial)
            normed, residual = self.blocks[0].normed_input(partial, residual)
        else:
            hidden = torch.empty(tokens, self.config.hidden, dtype=self.dtype, device=batch.tokens.device)
            parallel.receive(hidden)
            weight = self.blocks[0].attention_norm
            normed = hidden if weight is None else self._norm(hidden, weight)
            residual = hidden
        for index, (block, cache) in enumerate(zip(self.blocks, caches, strict=True)):
            partial, residual = block(normed, residual, cache, batch)
            if index + 1 < len(self.blocks):
                normed, residual = self.blocks[index + 1].normed_input(partial, residual)
        post = self.blocks[-1].mlp_post_norm
        if self.head is None:
            hidden = parallel.all_reduce(partial)
            if post is not None:
                hidden = self._norm(hidden, post)
            parallel.send(hidden + residual)
            return None
        if post is not None:
            return parallel.reduce_post_norm(partial, residual, post, self.final_norm, self._eps)[0]
        return parallel.reduce_norm(partial, residual, self.final_norm, self._eps)[0]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), self._eps).to(self.dtype)
