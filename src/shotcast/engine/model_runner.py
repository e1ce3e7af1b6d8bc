"""Execution of steps on one rank, which holds the model, the paged cache and the tables of running sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from shotcast.engine.cuda_graphs import CudaGraphs, DecodeGraphs, DeviceState, decode_capture_size, decode_capture_sizes
from shotcast.engine.input_batch import InputBatch, Int32Array, attention_tiles, build_input_batch, cache_slots
from shotcast.engine.outputs import ModelRunnerOutput, TokenLogprob
from shotcast.engine.prefill import PrefillGraphs, PrefillOverlap
from shotcast.engine.prefill_forms import PrefillForms
from shotcast.engine.sampler import Sampler, SamplerOutput, logprobs_of, token_logprobs
from shotcast.engine.step_plan import INVALID_TOKEN, PromptTargets, StepPlan
from shotcast.engine.token_feedback import TokenFeedback
from shotcast.engine.transfer import HostCopy, copy_to_device
from shotcast.layers.batch import AttentionTiles, Batch, Logits, PrefillMetadata
from shotcast.models.causal_lm import CausalLM
from shotcast.overlap.policy import Decision

logger = logging.getLogger(__name__)


_LOGPROB_TENSORS = 4
"""The number of tensors with log-probabilities in a :class:`SamplerOutput`."""


class AsyncModelRunnerOutput:
    """The output of a step that the device may still be computing."""

    def __init__(
        self,
        number: int,
        sampled: SamplerOutput | None = None,
        targets: Sequence[PromptTargets] = (),
        target_logprobs: Sequence[torch.Tensor] = (),
    ):
        self.number = number
        self._draft: Draft | None = None
        self._drafted: Drafted = []
        self._targets = targets
        self._logprob_rows: tuple[tuple[int, int], ...] = ()
        self._failures: tuple[tuple[int, str], ...] = ()
        self._copy = None
        copied = list(target_logprobs)
        if sampled is not None:
            self._logprob_rows, self._failures = sampled.logprob_rows, sampled.failures
            copied += sampled.tokens, *sampled.logprobs
        if copied:
            self._copy = HostCopy(copied)

    @property
    def ready(self) -> bool:
        return (self._copy is None or self._copy.done) and all(pending.ready for _, pending in self._drafted)

    def add_proposals(self, draft: Draft, drafted: Drafted) -> None:
        """Add a draft model's output for each sequence that samples."""
        self._draft, self._drafted = draft, drafted

    def result(self) -> ModelRunnerOutput:
        """Wait for the output. It is valid only if the communicators' ``check`` passes afterwards."""
        if self._copy is None:
            return ModelRunnerOutput(self.number, (), ())
        copied = self._copy.wait()
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if self._targets:
            prompt_logprobs = self._prompt_logprobs(copied[:_LOGPROB_TENSORS])
            copied = copied[_LOGPROB_TENSORS:]
        if not copied:
            return ModelRunnerOutput(self.number, (), (), prompt_logprobs)
        sampled, *logprobs = copied
        tokens = [token if valid else INVALID_TOKEN for token, valid in sampled.tolist()]
        found = token_logprobs(tokens, self._logprob_rows, logprobs)
        output = ModelRunnerOutput(self.number, tuple(tokens), tuple(found), prompt_logprobs, self._failures)
        if self._draft is None:
            return output
        return replace(output, proposals=self._draft.proposals(self._drafted))

    def _prompt_logprobs(self, logprobs: Sequence[torch.Tensor]) -> tuple[TokenLogprob, ...]:
        counts = [targets.alternatives for targets in self._targets for _ in targets.tokens]
        tokens = [token for targets in self._targets for token in targets.tokens]
        found = token_logprobs(tokens, list(enumerate(counts)), logprobs)
        return tuple(entry for entry in found if entry is not None)


Drafted = list[tuple[tuple[int, ...], AsyncModelRunnerOutput]]
"""The outputs of a draft model's decoding steps, each with its sequences as positions among the ones that the plan
samples."""


class Draft(Protocol):
    """A draft model: a :class:`~shotcast.engine.draft_model.DraftModel`."""

    @property
    def runner(self) -> ModelRunner: ...
    def propose(self, plan: StepPlan, output: AsyncModelRunnerOutput | None, last_tokens: torch.Tensor) -> Drafted: ...
    def proposals(self, drafted: Drafted) -> tuple[tuple[int, ...], ...]: ...


class ModelRunner:
    """Executes plans, which every rank gets in the same order. On CUDA it enqueues them without waiting.

    Args:
        num_blocks, block_size: blocks of the paged cache, and tokens of a block.
        max_num_seqs: the number of slots.
        max_model_len: the maximum number of tokens of a sequence.
        salt: mixed into the sampling of requests without a seed; the same on all ranks.
        decode_sizes: numbers of sequences for which decode steps run on static memory (``engine/cuda_graphs.py``);
            the last is ``max_num_seqs``. Empty: all steps allocate their memory.
        prefill_sizes: numbers of tokens for which all other steps run on static memory (``engine/prefill.py``);
            needs ``decode_sizes``.
        overlap: whether steps with prompts are computed in halves, one of which communicates while the other computes,
            as in ``EngineConfig``. If some steps run on static memory, all others are computed as a whole.
        max_num_batched_tokens: the most tokens of a step, for that measurement.
        decisions: overlap decisions of another runner of this model, by number of tokens of steps on static memory;
            this runner adds its decisions.
        max_proposals: the most proposals that a step verifies.
        reports: the output of this rank is read. Other ranks sample only for their next step, which with static memory
            may be planned before the host knows the tokens.
    """

    def __init__(
        self,
        model: CausalLM,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        salt: int,
        decode_sizes: tuple[int, ...] = (),
        prefill_sizes: tuple[int, ...] = (),
        reports: bool = True,
        overlap: str = "off",
        max_num_batched_tokens: int = 2048,
        decisions: dict[int, Decision] | None = None,
        max_proposals: int = 0,
        draft: Draft | None = None,
    ) -> None:
        self._draft = draft
        self._reports, self._max_proposals = reports, max_proposals
        max_sampled = max_num_seqs + max_proposals
        static = bool(decode_sizes)
        caches = model.allocate_caches(num_blocks + static, block_size)
        device, last_stage = caches[0].keys.device, model.parallel.last
        # The block tables as the host knows them. The last row belongs to no sequence.
        self._host_tables = np.zeros((max_num_seqs + 1, -(-max_model_len // block_size)), np.int32)
        if static:
            self._host_tables[-1] = num_blocks
        block_tables = torch.from_numpy(self._host_tables).to(device, copy=True)
        self._num_blocks_of_slot = [0] * max_num_seqs
        last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        samples = last_stage and (reports or static or draft is not None)
        self.sampler = Sampler(max_num_seqs, model.config.vocab, device, salt) if samples else None
        logits = None
        if last_stage and static and device.type == "cuda":
            values = torch.empty(max_sampled, model.config.vocab, device=device)
            logits = Logits(values, torch.empty(max_sampled, 2, dtype=torch.int64, device=device))
        self._state = DeviceState(model, caches, block_tables, last_tokens, logits)
        self._forms = PrefillForms(model, overlap, {} if decisions is None else decisions, bool(prefill_sizes))
        self._overlap = None
        if not prefill_sizes:
            self._overlap = PrefillOverlap(self._state, self._forms, self._host_tables, max_num_batched_tokens)
        self._decode_graphs = self._prefill_graphs = self._feedback = None
        if static and model.parallel.can_send_back(last_tokens):
            self._feedback = TokenFeedback(model.parallel, last_tokens)
        if static:
            self._graphs = CudaGraphs(device, model.parallel.timer)
            self._decode_graphs = DecodeGraphs(self._state, decode_sizes, self._graphs)
            if prefill_sizes:
                head_sizes = decode_capture_sizes(max_sampled)
                self._prefill_graphs = PrefillGraphs(self._state, prefill_sizes, head_sizes, self._graphs, self._forms)

    @property
    def lookahead(self) -> int:
        """The number of steps of a sequence that may be planned before the host knows the last sampled token.

        It is 1 with static memory, where the token stays on the device from one step to the next; otherwise 0.
        """
        return int(self._feedback is not None)

    @property
    def last_tokens(self) -> torch.Tensor:
        """The last sampled token of each slot, int64 [slots + 1], on the last stage."""
        return self._state.last_tokens

    @property
    def vocab(self) -> int:
        """The size of the model's vocabulary."""
        return self._state.model.config.vocab

    def capacity(self, slot: int) -> int:
        """Return how many tokens a slot's blocks hold."""
        return self._num_blocks_of_slot[slot] * self._state.block_size

    @property
    def overlap(self) -> Mapping[int, Decision]:
        """The decisions about overlap, by number of tokens of steps on static memory, or for all other steps."""
        return self._forms.decisions

    @property
    def step_s(self) -> float:
        """Seconds spent in steps since the start, by the model's timer."""
        return self._state.model.parallel.timer.step_s

    @property
    def communication_s(self) -> float:
        """Seconds spent in collectives: a part of ``step_s``, except for collectives overlapped with computation."""
        return self._state.model.parallel.timer.communication_s

    @torch.inference_mode()
    def capture(self, stamped: bool) -> None:
        """Decide on overlap, capture the graphs and compile the kernels of steps on static memory. Collective.

        The draft model comes first.

        Args:
            stamped: also capture the graphs of stamped steps.
        """
        if self._draft is not None:
            self._draft.runner.capture(stamped=False)
        if self._overlap is not None:
            self._overlap.measure(lambda step: self._eager_batch(step, np.empty((0, 2), np.int32)))
        if self._decode_graphs is None:
            return
        started = time.perf_counter()
        if self._prefill_graphs is not None:
            self._prefill_graphs.capture()  # first, since the largest graphs are among them
        self._decode_graphs.capture(stamped=False)
        if stamped:
            self._decode_graphs.capture(stamped=True)
        if self.sampler is not None:
            self.sampler.warm_up(self._max_proposals)
        if self._feedback is not None:
            self._feedback.warm_up()
        logger.info("captured %d CUDA graphs in %.1f s", len(self._graphs), time.perf_counter() - started)

    def close(self) -> None:
        """Release the graphs. Call this before the communicators are closed."""
        if self._draft is not None:
            self._draft.runner.close()
        if self.sampler is not None:
            self.sampler.constraints.close()
        self._forms.close()
        if self._decode_graphs is not None:
            self._graphs.close()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> AsyncModelRunnerOutput | None:
        """Compute a step. Return its output on ranks that sample; None on others, and for a plan without sequences."""
        if not plan.sequences:
            if self.sampler is not None and plan.prepares is not None:
                self.sampler.constraints.prepare(plan.prepares)
            return None
        if self.sampler is not None:  # before the step, so that grammars are compiled beside it
            self._assign_new(plan, self.sampler)
        if self._feedback is not None:
            self._feedback.before_step(plan)
        output = self._execute_model(plan)
        if self._feedback is not None:
            self._feedback.after_step(plan)
        if self._draft is not None:
            drafted = self._draft.propose(plan, output, self.last_tokens)
            if output is not None and drafted:
                output.add_proposals(self._draft, drafted)
        return output

    def leave_out(self, plan: StepPlan) -> None:
        """Record the new sequences and blocks of a plan without computing it."""
        if self.sampler is not None:
            self._assign_new(plan, self.sampler)
        updates = self._update_host_tables(plan)
        if len(updates):
            indices, blocks = copy_to_device([updates[:, 0].astype(np.int64), updates[:, 1].copy()], self._state.device)
            self._state.block_tables.view(-1)[indices] = blocks

    @staticmethod
    def _assign_new(plan: StepPlan, sampler: Sampler) -> None:
        for sequence in plan.sequences:
            if sequence.is_new:
                assert sequence.params is not None
                request = sequence.params, sequence.request_id, sequence.output, sequence.prompt, sequence.end_tokens
                sampler.assign(sequence.slot, *request)

    def _execute_model(self, plan: StepPlan) -> AsyncModelRunnerOutput | None:
        block_updates = self._update_host_tables(plan)
        if plan.has_targets:
            return self._execute_with_targets(plan, block_updates)
        size = None if self._decode_graphs is None else decode_capture_size(plan, self._decode_graphs.sizes)
        if self._decode_graphs is not None and size is not None:
            logits = self._decode_graphs.run(plan, size)
            return None if self.sampler is None else self._sample(plan, self._select_logits(plan, logits), True)
        inputs = build_input_batch(plan, self._host_tables, self._state.block_size)
        if self._prefill_graphs is not None and self._prefill_graphs.serves(inputs):
            logits = self._prefill_graphs.run(inputs, block_updates)
            return None if self.sampler is None else self._sample(plan, logits, True)
        with self._state.model.parallel.timer.step():
            if self._overlap is not None and self._overlap.serves(inputs):
                first, second = inputs.halves()
                halves = self._eager_batch(first, block_updates), self._eager_batch(second, block_updates[:0])
                logits = self._overlap.run(halves)
            else:
                logits = self._state.model(self._eager_batch(inputs, block_updates), self._state.caches)
            return None if self.sampler is None else self._sample(plan, logits, False)

    def _execute_with_targets(self, plan: StepPlan, block_updates: Int32Array) -> AsyncModelRunnerOutput | None:
        """Compute a step that reports log-probabilities of prompts, without graphs and as a whole."""
        state = self._state
        inputs = build_input_batch(plan, self._host_tables, state.block_size)
        with state.model.parallel.timer.step():
            batch = self._eager_batch(inputs, block_updates)
            hidden = state.model.hidden(batch, state.caches)
            if hidden is None:
                return None
            logits = state.model.next_logits(hidden, batch)
            target_logprobs = self._target_logprobs(plan, inputs, hidden)
            return None if self.sampler is None else self._sample(plan, logits, False, target_logprobs)

    def _target_logprobs(self, plan: StepPlan, inputs: InputBatch, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the log-probabilities of all targets of a plan, as in :class:`SamplerOutput`; () on ranks whose output
        is not read. Collective on the last stage.

        The head takes as many tokens at a time as a step may sample, since logits need much memory.

        Args:
            hidden: [tokens, hidden], the last normed hidden states.
        """
        places: list[int] = []
        followers: list[int] = []
        alternatives = 0
        for sequence, start in zip(plan.sequences, inputs.query_starts.tolist(), strict=True):
            if sequence.targets is not None:
                places += range(start, start + len(sequence.targets.tokens))
                followers += sequence.targets.tokens
                alternatives = max(alternatives, sequence.targets.alternatives)
        arrays = [np.array(places, np.int64), np.array(followers, np.int64)]
        rows, tokens = copy_to_device(arrays, self._state.device)
        size = len(self._num_blocks_of_slot)
        found = []
        for part in (slice(first, first + size) for first in range(0, len(places), size)):
            logits = self._state.model.logits(hidden[rows[part]])
            if self.sampler is not None and self._reports:
                found.append(logprobs_of(logits.values, tokens[part], alternatives))
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _select_logits(self, plan: StepPlan, logits: Logits | None) -> Logits | None:
        indices = [index for index, sequence in enumerate(plan.sequences) if sequence.do_sample]
        if logits is None or len(indices) == len(plan.sequences):
            return logits
        (index,) = copy_to_device([np.array(indices, np.int64)], self._state.device)
        return logits.rows(index) if indices else None

    def _sample(
        self, plan: StepPlan, logits: Logits | None, best_is_stored: bool, target_logprobs: Sequence[torch.Tensor] = ()
    ) -> AsyncModelRunnerOutput:
        """Sample the next tokens from ``logits``, the rows of the sequences that sample.

        Args:
            logits: their logits; None if no sequence samples.
            best_is_stored: ``last_tokens`` already holds the likeliest tokens.
        """
        assert self.sampler is not None
        sampling = [sequence for sequence in plan.sequences if sequence.do_sample]
        for sequence in sampling:
            self.sampler.advance(sequence.slot, sequence.accepted)
        slots, drafts = [each.slot for each in sampling], [each.proposals for each in sampling]
        sampled = None
        if logits is not None:
            stored = self._state.last_tokens, best_is_stored
            sampled = self.sampler.sample(logits.values, slots, logits.best, *stored, drafts)
        if not self._reports and not plan.proposes:
            return AsyncModelRunnerOutput(plan.number)
        targets = [sequence.targets for sequence in plan.sequences if sequence.targets is not None]
        return AsyncModelRunnerOutput(plan.number, sampled, targets, target_logprobs)

    def _update_host_tables(self, plan: StepPlan) -> Int32Array:
        """Enter the plan's blocks into the host's tables; return the index and block of each change, [updates, 2]."""
        width = self._host_tables.shape[1]
        updates = [np.empty((0, 2), np.int32)]
        for sequence in plan.sequences:
            slot = sequence.slot
            if sequence.is_new:
                self._num_blocks_of_slot[slot] = 0
            if sequence.blocks:
                first = self._num_blocks_of_slot[slot]
                stop = first + len(sequence.blocks)
                self._host_tables[slot, first:stop] = sequence.blocks
                indices = np.arange(slot * width + first, slot * width + stop, dtype=np.int32)
                updates.append(np.stack((indices, self._host_tables[slot, first:stop]), axis=1))
                self._num_blocks_of_slot[slot] = stop
        return np.concatenate(updates)

    def _eager_batch(self, inputs: InputBatch, block_updates: Int32Array) -> Batch:
        """Build the tensors of a step on dynamic memory, and update the device's block tables."""
        state = self._state
        pending = np.flatnonzero(inputs.tokens < 0)
        tile_tokens = 0
        if state.device.type == "cuda" and int(inputs.num_scheduled.max()) > 1:
            tile_tokens = state.model.max_tile_tokens(len(inputs.tokens))
        # A token after which a sequence samples is a row of its own on a CPU, where the keys of all rows are written
        # before any row is computed.
        decoding = int(inputs.decodes.sum())
        counts = inputs.num_scheduled[: 0 if tile_tokens else decoding]
        num_decodes = int(counts.sum())
        int64_arrays = (
            inputs.tokens,
            inputs.positions,
            inputs.cache_slots,
            np.repeat(inputs.rows[: len(counts)], counts),
            inputs.logits_indices,
            pending,
            -1 - inputs.tokens[pending],
            block_updates[:, 0],
        )
        int32_arrays = (
            inputs.positions[:num_decodes] + 1,
            attention_tiles(inputs, tile_tokens) if tile_tokens else inputs.rows[:0],
            block_updates[:, 1].copy(),
        )
        tokens, positions, slots, rows, logits_indices, pending_indices, pending_rows, table_indices, *rest = (
            copy_to_device([*(array.astype(np.int64) for array in int64_arrays), *int32_arrays], state.device)
        )
        lengths, tile_table, blocks = rest
        if len(pending):
            tokens[pending_indices] = state.last_tokens[pending_rows]
        if len(block_updates):
            state.block_tables.view(-1)[table_indices] = blocks
        tiles = AttentionTiles(tile_table, tile_tokens) if tile_tokens else None
        has_prefills = not tile_tokens and decoding < len(inputs.rows)
        prefills = self._prefills(inputs, decoding) if has_prefills else None
        wanted = None if len(inputs.logits_indices) == len(inputs.tokens) else logits_indices
        return Batch(tokens, positions, slots, num_decodes, rows, lengths, prefills, tiles, state.block_tables, wanted)

    def _prefills(self, inputs: InputBatch, decoding: int) -> PrefillMetadata:
        """Describe the prompts of a step on a CPU, whose first ``decoding`` sequences decode."""
        rows, counts = inputs.rows[decoding:], inputs.num_scheduled[decoding:]
        lengths = inputs.context_lengths[decoding:]
        positions = np.concatenate([np.arange(length) for length in lengths])
        slots = cache_slots(self._host_tables, np.repeat(rows, lengths), positions, self._state.block_size)
        queries, keys = ((0, *np.cumsum(sizes).tolist()) for sizes in (counts, lengths))
        return PrefillMetadata(queries, keys, torch.from_numpy(slots.astype(np.int64)))
