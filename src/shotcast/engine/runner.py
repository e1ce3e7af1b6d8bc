"""A rank's part of every step: it holds the model, the cache and the tables of the sequences that run."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from shotcast.engine import steps
from shotcast.engine.capture import Graphs
from shotcast.engine.graphs import StaticDecoding
from shotcast.engine.plan import NO_TOKEN, StepPlan
from shotcast.engine.prompt_graphs import StaticPrompts
from shotcast.engine.relay import Relay
from shotcast.engine.requests import TokenLogprob
from shotcast.engine.sampler import Sampled, Sampler, logprobs_of
from shotcast.engine.state import State
from shotcast.engine.transfer import Download, uploaded
from shotcast.layers.batch import AttentionTiles, Batch, Logits, PrefillMetadata
from shotcast.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)


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
        prompts: numbers of tokens for which all other steps do (``engine/prompt_graphs.py``), with ``static`` alone.
        reports: whether anybody asks this rank what was drawn. One that nobody asks draws only for the next step, which
            with ``static`` memory may be planned before it is told.
    """

    def __init__(
        self,
        model: CausalLM,
        blocks: int,
        block_size: int,
        max_sequences: int,
        max_model_len: int,
        salt: int,
        static: tuple[int, ...] = (),
        prompts: tuple[int, ...] = (),
        reports: bool = True,
    ) -> None:
        self._reports = reports
        caches = model.caches(blocks + bool(static), block_size)
        device, last = caches[0].keys.device, model.parallel.last
        # The last row is nobody's; on the device, and as the host knows it.
        self._host_tables = np.zeros((max_sequences + 1, -(-max_model_len // block_size)), np.int32)
        if static:
            self._host_tables[-1] = blocks
        tables = torch.from_numpy(self._host_tables).to(device, copy=True)
        self._filled = [0] * max_sequences
        drawn = torch.zeros(max_sequences + 1, dtype=torch.int64, device=device)
        draws = last and (reports or bool(static))
        self._sampler = Sampler(max_sequences, model.config.vocab, device, salt) if draws else None
        logits = None
        if last and static and device.type == "cuda":
            values = torch.empty(max_sequences, model.config.vocab, device=device)
            logits = Logits(values, torch.empty(max_sequences, 2, dtype=torch.int64, device=device))
        self._state = State(model, caches, tables, drawn, logits)
        self._static = self._prompts = self._relay = None
        if static and model.parallel.comes_back(drawn):
            self._relay = Relay(model.parallel, drawn)
        if static:
            self._graphs = Graphs(device, model.parallel.timer)
            self._static = StaticDecoding(self._state, static, self._graphs)
            if prompts:
                self._prompts = StaticPrompts(self._state, prompts, static, self._graphs)

    @property
    def lookahead(self) -> int:
        """Steps of a sequence that may be planned before it is known what the last one drew: 1 with ``static`` memory,
        where the token goes from one to the other on the device."""
        return int(self._relay is not None)

    @property
    def step_s(self) -> float:
        """Seconds in steps since the start, as the model's timer tells it."""
        return self._state.model.parallel.timer.step_s

    @property
    def communication_s(self) -> float:
        """Seconds of these in collectives."""
        return self._state.model.parallel.timer.communication_s

    @torch.inference_mode()
    def capture(self, stamped: bool) -> None:
        """Make ready what steps on static memory and draws from them need. Collective.

        Args:
            stamped: also what stamped steps need.
        """
        if self._static is None:
            return
        started = time.perf_counter()
        if self._prompts is not None:
            self._prompts.capture()  # has the largest
        self._static.capture(stamped=False)
        if stamped:
            self._static.capture(stamped=True)
        if self._sampler is not None:
            self._sampler.warm()
        if self._relay is not None:
            self._relay.warm()
        logger.info("captured %d CUDA graphs in %.1f s", len(self._graphs), time.perf_counter() - started)

    def close(self) -> None:
        """To be called before the communicators are closed."""
        if self._static is not None:
            self._graphs.close()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Drawing | None:
        """Compute a step. What it draws on ranks of the last stage, None on others."""
        if self._relay is not None:
            self._relay.before(plan)
        drawing = self._computed(plan)
        if self._relay is not None:
            self._relay.after(plan)
        return drawing

    def _computed(self, plan: StepPlan) -> Drawing | None:
        cells = self._enter_blocks(plan)
        bucket = None if self._static is None else steps.bucket_of(plan, self._static.sizes)
        if self._static is not None and bucket is not None:
            logits = self._static.run(plan, bucket)
            return None if self._sampler is None else self._draw(plan, self._that_draw(plan, logits), True)
        of = steps.places(plan, self._host_tables, self._state.block_size)
        if self._prompts is not None and self._prompts.serves(of):
            logits = self._prompts.run(of, cells)
            return None if self._sampler is None else self._draw(plan, logits, True)
        with self._state.model.parallel.timer.step():
            logits = self._state.model(self._batch(of, cells), self._state.caches)
            return None if self._sampler is None else self._draw(plan, logits, False)

    def _that_draw(self, plan: StepPlan, logits: Logits | None) -> Logits | None:
        """Of logits of all sequences, those of sequences that draw."""
        places = [place for place, sequence in enumerate(plan.sequences) if sequence.draws]
        if logits is None or len(places) == len(plan.sequences):
            return logits
        (index,) = uploaded([np.array(places, np.int64)], self._state.device)
        return logits.rows(index) if places else None

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
        sampled = self._sampler.sample(logits.values, slots, logits.best, self._state.drawn, best_is_entered)
        return Drawing(plan.number, sampled if self._reports else None)

    def _enter_blocks(self, plan: StepPlan) -> steps.Ints:
        """Take the plan's blocks into the host's tables: [cells, 2], the place in the tables and the block of each."""
        width = self._host_tables.shape[1]
        entered = [np.empty((0, 2), np.int32)]
        for sequence in plan.sequences:
            slot = sequence.slot
            if sequence.fresh:
                self._filled[slot] = 0
            if sequence.blocks:
                first, stop = self._filled[slot], self._filled[slot] + len(sequence.blocks)
                self._host_tables[slot, first:stop] = sequence.blocks
                places = np.arange(slot * width + first, slot * width + stop, dtype=np.int32)
                entered.append(np.stack((places, self._host_tables[slot, first:stop]), axis=1))
                self._filled[slot] = stop
        return np.concatenate(entered)

    def _batch(self, of: steps.Places, cells: steps.Ints) -> Batch:
        """The tensors of a step that is not on static memory; enters ``cells`` into the device's tables."""
        state = self._state
        pending = np.flatnonzero(of.tokens < 0)
        several = int(of.counts.max()) > 1
        most = state.model.tile(len(of.tokens)) if several and state.device.type == "cuda" else 0
        decodes = 0 if most else int((of.counts == 1).sum())
        longs = of.tokens, of.positions, of.slots, of.rows[:decodes], of.drawn, pending, -1 - of.tokens[pending]
        ints = (of.starts + of.counts)[:decodes], steps.tiles(of, most) if most else of.rows[:0], cells[:, 1].copy()
        ids, positions, slots, rows, drawn, pending_there, owners, places, lengths, table, blocks = uploaded(
            [*(array.astype(np.int64) for array in (*longs, cells[:, 0])), *ints], state.device
        )
        if len(pending):
            ids[pending_there] = state.drawn[owners]
        if len(cells):
            state.tables.view(-1)[places] = blocks
        tiles = AttentionTiles(table, most) if most else None
        prefills = self._prefills(of, decodes) if several and not most else None
        wanted = None if len(of.drawn) == len(of.tokens) else drawn
        return Batch(ids, positions, slots, decodes, rows, lengths, prefills, tiles, state.tables, wanted)

    def _prefills(self, of: steps.Places, decodes: int) -> PrefillMetadata:
        """Of a step on a CPU, in which the first ``decodes`` sequences have one token."""
        rows, counts, lengths = of.rows[decodes:], of.counts[decodes:], (of.starts + of.counts)[decodes:]
        positions = np.concatenate([np.arange(length) for length in lengths])
        slots = steps.slots_of(self._host_tables, np.repeat(rows, lengths), positions, self._state.block_size)
        queries, keys = ((0, *np.cumsum(each).tolist()) for each in (counts, lengths))
        return PrefillMetadata(queries, keys, torch.from_numpy(slots.astype(np.int64)))
