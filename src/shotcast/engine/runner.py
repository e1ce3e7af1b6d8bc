"""A rank's part of every step: it holds the model, the cache and the tables of the sequences that run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shotcast.engine import steps
from shotcast.engine.graphs import StaticDecoding
from shotcast.engine.plan import NO_TOKEN, PENDING, StepPlan
from shotcast.engine.requests import TokenLogprob
from shotcast.engine.sampler import Sampled, Sampler, logprobs_of
from shotcast.engine.transfer import Download, uploaded
from shotcast.layers.batch import Batch, Logits, Prefills
from shotcast.models.llama import Llama


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that a step drew: one for each of its sequences that draws, in their order, or NO_TOKEN."""

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]


class Drawing:
    """What a step draws, which the device may still be computing."""

    def __init__(self, number: int, sampled: Sampled | None = None):
        self.number = number
        self._asked: tuple[tuple[int, int], ...] = ()
        self._download = None
        if sampled is not None:
            self._asked = sampled.asked
            self._download = Download([sampled.told, *sampled.logprobs])

    @property
    def ready(self) -> bool:
        """Whether :meth:`result` need not wait."""
        return self._download is None or self._download.arrived

    def result(self) -> Drawn:
        """Wait for it. Sound only if the communicators' ``check`` passes afterwards."""
        if self._download is None:
            return Drawn(self.number, (), ())
        told, *logprobs = self._download.wait()
        tokens = [token if numbers else NO_TOKEN for token, numbers in told.tolist()]
        return Drawn(self.number, tuple(tokens), tuple(logprobs_of(tokens, self._asked, logprobs)))


class Runner:
    """Executes plans, which every rank is given in the same order. On CUDA it enqueues them, and waits for nothing.

    Args:
        model: this rank's part.
        blocks, block_size: of the paged cache.
        max_sequences: slots.
        max_model_len: tokens of a sequence at most.
        salt: what draws without a seed depend on; the same on all ranks.
        static: numbers of sequences for which steps that decode run on static memory (``engine/graphs.py``); the last
            is ``max_sequences``. None: such steps are computed as all others.
        reports: whether anybody asks this rank what was drawn. One that nobody asks draws only for the next step, which
            with ``static`` memory may be planned before it is told.
    """

    def __init__(
        self,
        model: Llama,
        blocks: int,
        block_size: int,
        max_sequences: int,
        max_model_len: int,
        salt: int,
        static: tuple[int, ...] = (),
        reports: bool = True,
    ) -> None:
        self._model, self._max_model_len = model, max_model_len
        self._reports = reports
        self._block_size = block_size
        self._caches = model.caches(blocks + bool(static), block_size)
        self._device = self._caches[0].keys.device
        # The last row is nobody's; on the device, and as the host knows it.
        self._host_tables = np.zeros((max_sequences + 1, -(-max_model_len // block_size)), np.int32)
        if static:
            self._host_tables[-1] = blocks
        self._tables = torch.from_numpy(self._host_tables)
        if self._device.type == "cuda":
            self._tables = self._tables.to(self._device)
        self._filled = [0] * max_sequences
        self._drawn = torch.zeros(max_sequences + 1, dtype=torch.int64, device=self._device)
        draws = model.parallel.last and (reports or bool(static))
        self._sampler = Sampler(max_sequences, model.config.vocab, self._device, salt) if draws else None
        self._static = StaticDecoding(model, self._caches, self._tables, self._drawn, static) if static else None

    @property
    def step_s(self) -> float:
        """Seconds in steps since the start, as the model's clock tells it."""
        return self._model.parallel.clock.step_s

    @property
    def communication_s(self) -> float:
        """Seconds of these in collectives."""
        return self._model.parallel.clock.communication_s

    @torch.inference_mode()
    def warm(self, *lengths: int) -> None:
        """Compute a prompt of each of these lengths, and draw, for nobody, so that no request waits for what is
        compiled, or set up, when it is first used. Collective; needs ``static``, whose spare block it writes to."""
        spare = int(self._host_tables[-1, 0]) * self._block_size
        for length in lengths:
            positions = np.arange(length) % self._max_model_len
            slots = spare + positions % self._block_size
            whole = 0, length
            tokens, place, where, drawn, starts = uploaded(
                (np.zeros(length, np.int64), positions, slots, np.array([length - 1]), np.array(whole, np.int32)),
                self._device,
            )
            none = place[:0]
            prefills = Prefills(whole, whole, starts, starts, where)
            batch = Batch(tokens, place, where, 0, none, none.int(), prefills, self._tables, drawn)
            self._model(batch, self._caches)
        if self._sampler is not None:
            self._sampler.warm()

    @torch.inference_mode()
    def capture(self, stamped: bool) -> None:
        """Make ready what steps that decode need. Collective."""
        if self._static is not None:
            self._static.capture(stamped=False)
            if stamped:
                self._static.capture(stamped=True)

    def close(self) -> None:
        """To be called before the communicators are closed."""
        if self._static is not None:
            self._static.close()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Drawing | None:
        """Compute a step. What it draws on ranks of the last stage, None on others."""
        bucket = None if self._static is None else steps.bucket_of(plan, self._static.sizes)
        if self._static is not None and bucket is not None:
            self._enter_blocks(plan)
            logits = self._static.run(plan, bucket)
            return None if self._sampler is None else self._draw(plan, self._that_draw(plan, logits), True)
        with self._model.parallel.clock.step():
            logits = self._model(self._batch(plan), self._caches)
            return None if self._sampler is None else self._draw(plan, logits, False)

    def _that_draw(self, plan: StepPlan, logits: Logits | None) -> Logits | None:
        """Of logits of all sequences, those of sequences that draw."""
        places = [place for place, sequence in enumerate(plan.sequences) if sequence.draws]
        if logits is None or len(places) == len(plan.sequences):
            return logits
        (index,) = uploaded([np.array(places, np.int64)], self._device)
        return Logits(logits.values[index], logits.best[index]) if places else None

    def _draw(self, plan: StepPlan, logits: Logits | None, best_is_entered: bool) -> Drawing:
        """``best_is_entered``: the likeliest tokens stand in ``drawn`` already."""
        assert self._sampler is not None
        slots = [sequence.slot for sequence in plan.sequences if sequence.draws]
        for sequence in plan.sequences:
            if sequence.fresh:
                assert sequence.params is not None
                self._sampler.assign(sequence.slot, sequence.params, sequence.request_id, sequence.output)
        if logits is None:
            return Drawing(plan.number)
        sampled = self._sampler.sample(logits.values, slots, logits.best, self._drawn, best_is_entered)
        return Drawing(plan.number, sampled if self._reports else None)

    def _enter_blocks(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """Take the plan's blocks into the host's tables: (row, column, block) of each."""
        entered = []
        for sequence in plan.sequences:
            slot = sequence.slot
            if sequence.fresh:
                self._filled[slot] = 0
            for block in sequence.blocks:
                entered.append((slot, self._filled[slot], block))
                self._host_tables[slot, self._filled[slot]] = block
                self._filled[slot] += 1
        return entered

    def _batch(self, plan: StepPlan) -> Batch:
        """The tensors of a step; takes the plan's blocks into the tables."""
        entered = self._enter_blocks(plan)
        tokens: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        drawn, pending, queries, keys = [], [], [0], [0]
        contexts: list[npt.NDArray[np.int64]] = []
        decodes = 0
        for sequence in plan.sequences:
            slot, first, length = sequence.slot, len(tokens), sequence.start + len(sequence.tokens)
            if sequence.tokens[0] == PENDING:
                pending.append((first, slot))
            tokens += sequence.tokens
            positions += range(sequence.start, length)
            owners += [slot] * len(sequence.tokens)
            if len(sequence.tokens) == 1:
                decodes += 1
            else:
                queries.append(queries[-1] + len(sequence.tokens))
                keys.append(keys[-1] + length)
                contexts.append(self._slots(np.full(length, slot), np.arange(length)))
            if sequence.draws:
                drawn.append(len(tokens) - 1)
        place, owner = np.array(positions, np.int64), np.array(owners, np.int64)
        slots = self._slots(owner, place)
        lengths = (place[:decodes] + 1).astype(np.int32)
        draws = np.array(drawn, np.int64)
        pairs = np.array(pending, np.int64).reshape(-1, 2).T.copy()
        cells = np.array(entered, np.int64).reshape(-1, 3).T.copy()
        ids_here, rows_here = np.array(tokens, np.int64), owner[:decodes]
        prompts: list[npt.NDArray[np.generic]] = []
        if contexts:
            prompts = [np.array(queries, np.int32), np.array(keys, np.int32), np.concatenate(contexts)]
        there = uploaded(
            (ids_here, place, slots, rows_here, lengths, draws, pairs, cells, *prompts),
            self._device,
        )
        ids, place_there, slots_there, rows, lengths_there, drawn_there, pairs_there, cells_there = there[:8]
        if pending:
            ids[pairs_there[0]] = self._drawn[pairs_there[1]]
        if entered and self._device.type == "cuda":  # elsewhere the host's tables are these
            self._tables[cells_there[0], cells_there[1]] = cells_there[2].int()
        return Batch(
            ids,
            place_there,
            slots_there,
            decodes,
            rows,
            lengths_there,
            Prefills(tuple(queries), tuple(keys), *there[8:]) if prompts else None,
            self._tables,
            None if len(drawn) == len(tokens) else drawn_there,
        )

    def _slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of the cache, for positions of sequences in these rows of the tables."""
        size = self._block_size
        return self._host_tables[rows, positions // size].astype(np.int64) * size + positions % size
