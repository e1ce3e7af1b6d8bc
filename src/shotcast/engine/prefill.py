"""Steps with prompts: the forms in which they are computed, on memory of their own or as CUDA graphs.

A step is computed as a whole, or in halves, of which one communicates while the other computes. On GPUs the sum of a
half may go by copy engines, or be kept to some SMs; the sum is not fused with the norm then. Halves can lose:
their products are smaller, each of them may read all weights, and their messages may be too short for the algorithm of
the whole. So the forms are measured for each size of a step when the engine starts. A size is decided on once, and in
the same way on all ranks.

Without graphs (:class:`PrefillOverlap`), a half is a step of its own: its messages take the algorithms for their size.
Over a network, sums take longer than a core works on them, so the other half of the tokens is computed meanwhile.

A graph (:class:`PrefillGraphs`) serves any mix of prompt chunks and decoding sequences: the tiles
(``kernels/triton/prompt_attention.py``) that the host sends with the tokens, in one copy, say which tokens belong to
which sequence. It ends with the hidden states of the tokens whose logits are needed. These are few, in any number, and
the head is as large as several layers, so the head has graphs of its own. A graph in halves has a branch that
communicates. The halves are the first and the second half of the tokens, padding included, and each has tiles of its
own. A sequence that is cut is in both: the second half attends to the keys that the first has written to the cache in
the same layer.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from shotcast.collectives.algorithms.copy_engines import COPY_ENGINES
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.rank_device import gpus_are_shared
from shotcast.engine.cuda_graphs import CudaGraphs, DeviceState
from shotcast.engine.input_batch import (
    InputBatch,
    Int32Array,
    cache_slots,
    max_tiles,
    pack_prefill,
    part_bounds,
    prefill_layout,
)
from shotcast.engine.transfer import pinned_empty
from shotcast.kernels.step_fields import TILE_FIELDS
from shotcast.layers.batch import AttentionTiles, Batch, Logits
from shotcast.layers.parallel import Parallel
from shotcast.layers.shaping import UNSHAPED, Shaping
from shotcast.models.causal_lm import CausalLM
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import lanes_of
from shotcast.overlap.policy import PLAIN, SEQUENTIAL, Decision, Way, agreed, decide, measure

logger = logging.getLogger(__name__)

LEAST_TOKENS = {True: 512, False: 64}
"""Steps of fewer tokens are not divided, by whether memory is static: products of few rows take nearly as long as those
of twice as many, on GPUs up to some hundred rows, where a product takes as long as reading its weights."""
_SMS_BESIDE_OWN = 12
"""The SMs of sums beside our matmuls, where a program of a sum begins when any tile ends. 12 fill the wires where the
sums lie in mapped memory (docs/design/overlap.md)."""
MEASURED_LAYERS = 8
"""The layers of a model that a measurement computes: they are alike."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of a step."""

    name: str
    parts: int  # the number of parts that the tokens are divided into
    shaping: Shaping = UNSHAPED  # the part of a GPU that all-reduces and matmuls of the parts take


WHOLE, HALVES = Form(SEQUENTIAL, 1), Form(PLAIN, 2)
BY_COPIES = Form("copy engines", 2, Shaping(0))
BESIDE_OWN = Form(f"{_SMS_BESIDE_OWN} SMs beside own products", 2, Shaping(_SMS_BESIDE_OWN, True))
FORMS = {form.name: form for form in (WHOLE, HALVES, BY_COPIES, BESIDE_OWN)}


def overlap_unsupported_reason(parallel: Parallel, overlap: str, static: bool) -> str:
    """Return why no step is divided; empty if steps may be."""
    if overlap == "off":
        return "overlap is off"
    if parallel.size == 1 or parallel.stages > 1:
        return "one stage of several ranks has sums to hide"
    if parallel.divides_residual(parallel.size * LEAST_TOKENS[False]):
        return "sequence_parallel divides the residual instead"
    comm = parallel.comm
    if not static and overlap == "auto" and comm.device.type == "cpu" and not comm.topology.network.name:
        return "CPU ranks of one node wait for no network"
    return ""


def _share_gpus(comm: Communicator) -> bool:
    """Return whether ranks of any machine share a GPU. Collective."""
    if comm.device.type != "cuda":
        return False
    return agreed(comm, [float(gpus_are_shared())])[0] > 0


class PrefillForms:
    """Decides in which form steps of each number of tokens are computed.

    Args:
        decisions: what was decided before, by number of tokens; later decisions are added.
        static: steps have static memory; others are tried in halves alone, without a number of SMs.

    Attributes:
        controller: runs the parts of steps; None where no step is divided.
        overlap, decisions: as above. They are the same on all ranks.
    """

    def __init__(self, model: CausalLM, overlap: str, decisions: dict[int, Decision], static: bool = True):
        self._model, self.overlap, self.decisions, self._static = model, overlap, decisions, static
        self._reason = overlap_unsupported_reason(model.parallel, overlap, static) or model.overlap_unsupported_reason
        self.controller = None if self._reason else Controller(lanes_of(model.parallel.comm))

    def form(self, size: int) -> Form:
        decision = self.decisions.get(size)
        return WHOLE if decision is None else FORMS[decision.way]

    def undecided(self, size: int) -> bool:
        """Return whether the forms of a step of ``size`` tokens are still to be compared. Collective."""
        if size in self.decisions:
            return False
        why = self._reason
        least = LEAST_TOKENS[self._static]
        if not why and size < least:
            why = f"steps of fewer than {least} tokens are not divided"
        if not why and self.overlap == "auto" and _share_gpus(self._model.parallel.comm):
            why = "ranks take turns on a GPU, so nothing runs at once"
        if why:
            self.decisions[size] = Decision(SEQUENTIAL, why, {}, {}, {})
        elif self.overlap == PLAIN:
            self.decisions[size] = Decision(PLAIN, "overlap is plain", {}, {}, {})
        return size not in self.decisions

    def decide(self, size: int, run_of: Callable[[Form], Callable[[], Any]]) -> None:
        """Decide on a size, by measuring. Collective.

        Args:
            run_of: returns a function that computes a step of that many tokens in a form; called once for each form.
        """
        forms, left_out = self._forms(size)
        if self.overlap == "shaped":
            forms = [form for form in forms if form.shaping != UNSHAPED]
        comm = self._model.parallel.comm
        ways = [Way(form.name, run_of(form)) for form in forms]
        if self.overlap == "auto":
            found = decide(comm, [Way(SEQUENTIAL, run_of(WHOLE)), *ways])
        elif ways:
            times = measure(comm, ways) if len(ways) > 1 else {}
            best = min(times, key=lambda name: times[name], default=ways[0].name)
            found = Decision(best, f"overlap is {self.overlap}", times, {}, {})
        else:
            found = Decision(SEQUENTIAL, "no form takes few SMs or none for its sums", {}, {}, {})
        why = found.why + self._other_algorithm(size)
        self.decisions[size] = replace(found, why=why, left_out={**found.left_out, **left_out})
        logger.info("steps of %d tokens: %s", size, self.decisions[size])

    def close(self) -> None:
        if self.controller is not None:
            self.controller.lanes.close()

    def _forms(self, size: int) -> tuple[list[Form], dict[str, str]]:
        """Return the forms that compute a step in halves, and why others are left out."""
        parallel, forms, shaped = self._model.parallel, [HALVES], [BY_COPIES]
        left_out: dict[str, str] = {}
        if not self._static:
            return forms, left_out
        if parallel.comm.device.type == "cuda":
            if self._model.dtype == torch.float32 or self._model.blocks[0].qkv.takes_float8(size):
                left_out[BESIDE_OWN.name] = "own products take 16 bits"
            else:
                shaped.append(BESIDE_OWN)
        half = self._message(size // 2)
        for form in shaped:
            name = "few_sms" if form.shaping.sms else COPY_ENGINES
            if parallel.algorithm != "auto":
                left_out[form.name] = f"algorithm {parallel.algorithm} was named"
            elif name not in parallel.comm.candidates(half, "all_reduce", form.shaping.sms or None):
                left_out[form.name] = f"{name} does not serve its sums"
            else:
                forms.append(form)
        return forms, left_out

    def _message(self, tokens: int) -> torch.Tensor:
        model = self._model
        return torch.empty(tokens, model.config.hidden, dtype=model.dtype, device=model.parallel.comm.device)

    def _other_algorithm(self, size: int) -> str:
        """Say so where the sums of a half are computed by another algorithm than those of the whole."""
        parallel = self._model.parallel
        if parallel.algorithm != "auto":
            return ""
        whole, half = (
            parallel.comm.explain(self._message(tokens), "all_reduce_rms_norm").algorithm
            for tokens in (size, size - size // 2)
        )
        return "" if whole == half else f"; the sum of a half takes {half}, that of the whole {whole}"


_MEASURED_TOKENS = 512


class PrefillOverlap:
    """Computes steps on memory of their own by halves, where that was found to pay. Construction is not collective.

    Args:
        tables: the block tables of the host, int32 [slots + 1, blocks].
    """

    def __init__(self, state: DeviceState, forms: PrefillForms, tables: Int32Array, max_batch_tokens: int):
        self._state, self._forms, self._tables = state, forms, tables
        least = LEAST_TOKENS[False]
        # the tables may end beyond the last position that the model knows, within a block of it
        positions_known = (tables.shape[1] - 1) * state.block_size
        measured = min(_MEASURED_TOKENS, positions_known, max_batch_tokens)
        self._size = measured if forms.overlap == "auto" else least
        self._least = max(least, self._size // 2)  # what was measured says little of much shorter steps

    def measure(self, batch_of: Callable[[InputBatch], Batch]) -> None:
        """Decide, with a step of one prompt. Collective; to be called while the cache holds nothing."""
        state, size = self._state, self._size
        if not self._forms.undecided(size):
            return
        positions = np.arange(size, dtype=np.int32)
        row = np.zeros(1, np.int32)

        def run_of(form: Form) -> Callable[[], Any]:
            slots = cache_slots(self._tables, np.repeat(row, size), positions, state.block_size)
            count = np.array([size], np.int32)
            step = InputBatch(np.zeros(size, np.int32), positions, slots, row, row, count, row, row + 1)
            if form.parts == 1:
                return partial(state.model, batch_of(step), state.caches)
            return partial(self.run, [batch_of(half) for half in step.halves()])

        self._forms.decide(size, run_of)

    def serves(self, step: InputBatch) -> bool:
        """Return whether the step is computed by halves."""
        if self._forms.form(self._size).parts == 1 or len(step.tokens) < self._least:
            return False
        return not step.decodes.all()  # a step of decode alone reads all weights for each half

    def run(self, halves: Sequence[Batch]) -> Logits | None:
        """Compute the logits of a step from its halves."""
        controller = self._forms.controller
        assert controller is not None
        return self._state.model.overlapped(halves, self._state.caches, controller)


class PrefillGraphs:
    """Runs steps of any sequences. Without CUDA, each is computed again on the same static memory.

    Args:
        state: the state of this rank; ``last_tokens`` gets the likeliest tokens of every step.
        sizes: numbers of tokens, ascending.
        head_sizes: numbers of tokens that are sampled, ascending; the last is the most of a step.
    """

    def __init__(
        self,
        state: DeviceState,
        sizes: tuple[int, ...],
        head_sizes: tuple[int, ...],
        graphs: CudaGraphs,
        forms: PrefillForms,
    ):
        self._state, self._sizes, self._head_sizes, self._graphs = state, sizes, head_sizes, graphs
        self._forms, self._form = forms, dict.fromkeys(sizes, WHOLE)
        model, device, sampled = state.model, state.device, head_sizes[-1]
        # Halves have tiles of the same length as the whole, so that queries are computed alike.
        self._tile_tokens = {size: model.max_tile_tokens(size) for size in sizes}
        self._layouts = {
            (size, parts): prefill_layout(
                size,
                sampled,
                [max_tiles(stop - first, sampled, tile_tokens) for first, stop in part_bounds(size, parts)],
            )
            for size, tile_tokens in self._tile_tokens.items()
            for parts in (WHOLE.parts, HALVES.parts)
        }
        # a smaller size may have smaller tiles, and so more of them
        words = max(layout.block_updates.start for layout in self._layouts.values()) + 2 * state.block_tables.numel()
        # Zeros mean that a step of any size is padding only, and that its tiles have no tokens.
        self._packed = torch.zeros(words, dtype=torch.int32, device=device)
        self._tokens, self._positions, self._cache_slots = (
            torch.zeros(sizes[-1], dtype=torch.int64, device=device) for _ in range(3)
        )
        self._rows = torch.zeros(sampled, dtype=torch.int64, device=device)
        self._last_hidden = torch.zeros(sampled, model.config.hidden, dtype=model.dtype, device=device)
        self._results: dict[int, Logits] = {}
        self._sums: torch.Tensor | None = None

    def capture(self) -> None:
        """Decide on the forms of steps, and capture the graphs of all sizes. Call this before the first step, while
        memory holds padding only."""
        for size in reversed(self._sizes):
            self._decide(size)
        for size in reversed(self._sizes):
            self._graphs.get_or_capture(("prefill", size), partial(self._compute, size, self._form[size]))
        if self._state.model.parallel.last:
            for size in reversed(self._head_sizes):
                self._graphs.get_or_capture(("head", size), partial(self._compute_head, size))

    def serves(self, batch: InputBatch) -> bool:
        """Return whether the largest graph has room for the step."""
        return len(batch.tokens) <= self._sizes[-1]

    def run(self, batch: InputBatch, block_updates: Int32Array) -> Logits | None:
        """Compute a step. On the last stage, return the logits of the tokens after which it samples, if any.

        The logits are valid until the next step.

        Args:
            block_updates: [updates, 2], entries of the block tables that change before the step: index and block.
        """
        size = self._sizes[bisect.bisect_left(self._sizes, len(batch.tokens))]
        host = self._pack(batch, block_updates, size, self._form[size])
        replay = self._graphs.get(("prefill", size))
        self._packed[: host.numel()].copy_(host, non_blocking=True)
        replay()
        count = int(batch.num_sampled.sum())
        if not count or not self._state.model.parallel.last:
            return None
        head_size = self._head_sizes[bisect.bisect_left(self._head_sizes, count)]
        self._graphs.get(("head", head_size))()
        return self._results[head_size].rows(slice(0, count))

    def _pack(self, batch: InputBatch, block_updates: Int32Array, size: int, form: Form) -> torch.Tensor:
        """Return a step of at most ``size`` tokens in the host's memory, packed for a form."""
        layout = self._layouts[size, form.parts]
        host = pinned_empty([layout.block_updates.start + block_updates.size], torch.int32, self._packed.device)
        spare = self._state.spare_row, self._state.spare_slot
        pack_prefill(batch, block_updates, self._tile_tokens[size], *spare, layout, host.numpy())
        return host

    def _compute(self, size: int, form: Form, layers: int | None = None) -> None:
        """Compute the packed step up to the head; with ``layers``, as if the model had no more layers."""
        from shotcast.kernels.triton.step_inputs import unpack_prompts

        state, packed, layout = self._state, self._packed, self._layouts[size, form.parts]
        tokens, positions, slots = self._tokens[:size], self._positions[:size], self._cache_slots[:size]
        model = state.model if layers is None else state.model.shortened(layers)
        caches = state.caches[:layers]
        with model.parallel.timer.step():
            unpack_prompts(
                packed[layout.tokens],
                packed[layout.positions],
                packed[layout.cache_slots],
                packed[layout.logits_rows],
                packed[layout.num_block_updates],
                packed[layout.block_updates],
                state.last_tokens,
                state.block_tables,
                tokens,
                positions,
                slots,
                self._rows,
            )
            no_rows = self._rows[:0]
            batches = []
            for (first, stop), where in zip(part_bounds(size, form.parts), layout.tiles, strict=True):
                tiles = AttentionTiles(packed[where].view(-1, TILE_FIELDS), self._tile_tokens[size])
                part = tokens[first:stop], positions[first:stop], slots[first:stop]
                batches.append(Batch(*part, 0, no_rows, no_rows.int(), None, tiles, state.block_tables, None))
            hidden: torch.Tensor | None
            if form.parts == 1:
                hidden = model.hidden(batches[0], caches)
            else:
                assert self._forms.controller is not None
                sums = self._parts_of_sums(size, form.parts) if form.shaping.sms else ()
                hidden = torch.cat(model.hidden_of_parts(batches, caches, self._forms.controller, form.shaping, sums))
            if hidden is not None:
                torch.index_select(hidden, 0, packed[layout.logits_indices], out=self._last_hidden)

    def _parts_of_sums(self, size: int, parts: int) -> list[torch.Tensor]:
        """Return memory that the ranks map for the sums of each part, [tokens, hidden]: few SMs suffice for sums there.

        It is made when a step is first computed, before the capture, in which there would be none.
        """
        model = self._state.model
        if self._sums is None:
            self._sums = model.parallel.comm.empty(self._sizes[-1], model.config.hidden, dtype=model.dtype)
        return [self._sums[first:stop] for first, stop in part_bounds(size, parts)]

    def _decide(self, size: int) -> None:
        """Find the form of steps of a size. The forms are compared by graphs of the first layers, with prompts that
        belong to no sequence. Collective."""
        if self._forms.undecided(size):
            trial = CudaGraphs(self._state.device, self._state.model.parallel.timer)
            step = self._prompts(size)

            def run_of(form: Form) -> Callable[[], Any]:
                host = self._pack(step, np.empty((0, 2), np.int32), size, form)

                def run() -> None:
                    self._packed[: host.numel()].copy_(host, non_blocking=True)
                    trial.get_or_capture(form.name, partial(self._compute, size, form, MEASURED_LAYERS))()

                return run

            try:
                self._forms.decide(size, run_of)
            finally:
                trial.close()
                self._packed.zero_()
            if self._state.device.type == "cuda":
                torch.cuda.empty_cache()  # graphs of other forms take memory of their own
        self._form[size] = self._forms.form(size)

    def _prompts(self, size: int) -> InputBatch:
        """Return a step of ``size`` random tokens, or of as many as there may be, whose sequences have the spare row
        of the block tables in common."""
        state = self._state
        # the tables may end beyond the last position that the model knows, within a block of it
        longest = max(1, (state.block_tables.shape[1] - 1) * state.block_size)
        count = min(-(-size // longest), self._head_sizes[-1])
        lengths = np.full(count, longest, np.int32)
        lengths[-1] = min(size - (count - 1) * longest, longest)
        starts = (np.cumsum(lengths) - lengths).astype(np.int32)
        total = int(lengths.sum())
        positions = (np.arange(total) - np.repeat(starts, lengths)).astype(np.int32)
        tokens = np.random.default_rng(0).integers(0, state.model.config.vocab, total, dtype=np.int32)
        slots, rows = np.full(total, state.spare_slot, np.int32), np.full(count, state.spare_row, np.int32)
        return InputBatch(tokens, positions, slots, rows, np.zeros_like(rows), lengths, starts, rows * 0)

    def _compute_head(self, size: int) -> None:
        state, part = self._state, slice(0, size)
        out = None if state.logits is None else state.logits.rows(part)
        with state.model.parallel.timer.step():
            self._results[size] = logits = state.model.logits(self._last_hidden[part], out)
            state.last_tokens.index_copy_(0, self._rows[part], logits.best[:, 0])
