"""A rank's part of every step: it holds the model, the cache and the tables of the sequences that run."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch

from shotcast.engine.plan import PENDING, StepPlan
from shotcast.engine.requests import TokenLogprob
from shotcast.engine.sampler import Sampler
from shotcast.layers.batch import Batch
from shotcast.models.llama import Llama


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that a step drew: one for each of its sequences that draws, in their order."""

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]


class Runner:
    """Executes plans, which every rank is given in the same order.

    Args:
        model: this rank's part.
        blocks, block_size: of the paged cache.
        max_sequences: slots.
        max_model_len: tokens of a sequence at most.
        salt: what draws without a seed depend on; the same on all ranks.
        draws: whether this rank, of the last stage, draws tokens.
    """

    def __init__(
        self, model: Llama, blocks: int, block_size: int, max_sequences: int, max_model_len: int, salt: int, draws: bool
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._caches = model.caches(blocks, block_size)
        self._device = self._caches[0].keys.device
        self._tables = torch.zeros(max_sequences, -(-max_model_len // block_size), dtype=torch.int32)
        self._filled = [0] * max_sequences
        self._drawn = torch.zeros(max_sequences, dtype=torch.int64, device=self._device)
        self._sampler = Sampler(max_sequences, model.config.vocab, self._device, salt) if draws else None
        self.step_s = 0.0

    @property
    def communication_s(self) -> float:
        """Seconds in collectives since the start."""
        return self._model.parallel.communication_s

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Drawn | None:
        """Compute a step. Tokens on ranks that draw, None on others."""
        started = time.perf_counter()
        batch = self._batch(plan)
        logits = self._model(batch, self._caches)
        drawn = None
        if self._sampler is not None:
            drawn = self._draw(plan, logits)
        self.step_s += time.perf_counter() - started
        return drawn

    def _draw(self, plan: StepPlan, logits: torch.Tensor | None) -> Drawn:
        assert self._sampler is not None
        slots = [sequence.slot for sequence in plan.sequences if sequence.draws]
        for sequence in plan.sequences:
            if sequence.fresh:
                assert sequence.params is not None
                self._sampler.assign(sequence.slot, sequence.params, sequence.request_id, sequence.output)
        if logits is None:
            return Drawn(plan.number, (), ())
        tokens, logprobs = self._sampler.sample(logits, slots)
        self._drawn[slots] = tokens
        return Drawn(plan.number, tuple(tokens.tolist()), tuple(logprobs))

    def _batch(self, plan: StepPlan) -> Batch:
        """The tensors of a step; takes the plan's blocks into the tables."""
        tokens: list[int] = []
        positions: list[int] = []
        starts, contexts, drawn, pending = [0], [], [], []
        for sequence in plan.sequences:
            slot, length = sequence.slot, sequence.start + len(sequence.tokens)
            if sequence.fresh:
                self._filled[slot] = 0
            if sequence.blocks:
                filled = self._filled[slot]
                self._filled[slot] = filled + len(sequence.blocks)
                self._tables[slot, filled : self._filled[slot]] = torch.tensor(sequence.blocks, dtype=torch.int32)
            if sequence.tokens[0] == PENDING:
                pending.append((len(tokens), slot))
            tokens += sequence.tokens
            positions += range(sequence.start, length)
            starts.append(len(tokens))
            contexts.append(length)
            if sequence.draws:
                drawn.append(len(tokens) - 1)
        slots_of = [sequence.slot for sequence in plan.sequences]
        longest = max(-(-length // self._block_size) for length in contexts)
        tables = self._tables[slots_of, :longest].contiguous()
        place = torch.tensor(positions)
        owner = torch.repeat_interleave(torch.tensor([len(sequence.tokens) for sequence in plan.sequences]))
        slots = tables[owner, place // self._block_size].long() * self._block_size + place % self._block_size
        ids = torch.tensor(tokens)
        if pending:
            places, of = zip(*pending, strict=True)
            ids[list(places)] = self._drawn[list(of)].to(ids.device)
        device = self._device
        return Batch(
            ids.to(device),
            place.to(device),
            slots.to(device),
            tuple(starts),
            tuple(contexts),
            sum(1 for _ in itertools.takewhile(lambda sequence: len(sequence.tokens) == 1, plan.sequences)),
            tables.to(device),
            torch.tensor(contexts, dtype=torch.int32, device=device),
            torch.tensor(drawn, dtype=torch.int64, device=device),
        )
