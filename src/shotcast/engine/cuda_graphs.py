"""CUDA graphs of steps: their sizes, the state they share, and the graphs of decoding steps.

All inputs and outputs of a decoding step have fixed addresses, so a replay is one host call: block tables and the last
sampled tokens live on the device, and the host sends four numbers per sequence. Padding rows use a spare row of the
block tables, whose block belongs to no sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from shotcast.engine.input_batch import pack_decode
from shotcast.engine.step_plan import StepPlan
from shotcast.engine.transfer import pinned_empty
from shotcast.kernels.step_fields import FIELDS
from shotcast.layers.attention import KVCache
from shotcast.layers.batch import Batch, Logits
from shotcast.layers.step_timer import DeviceStepTimer, StepTimer
from shotcast.models.causal_lm import CausalLM


def decode_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of sequences for which decode graphs are captured, ascending up to ``max_num_seqs``. Graphs of
    the head use the same sizes for sampled tokens.

    They are powers of two up to 8; from there they are an eighth to a quarter apart, so that padding adds little work:
    1, 2, 4, 8, 16, 24, ..., 64, 80, ..., 128, 160, ...
    """
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size += size if size < 8 else max(8, (1 << (size.bit_length() - 1)) // 4)
    return (*sizes, max_num_seqs)


def prefill_capture_sizes(*limits: int) -> tuple[int, ...]:
    """Return the numbers of tokens for which graphs of steps with prompts are captured, ascending.

    They are ``limits``, which steps often have, and up to the largest of these powers of two from 16 to 128, and powers
    of two with one size between up to 512; from there they are 64 apart, and an eighth of a power of two from 1024 on:
    16, 32, 64, 128, 192, 256, 384, 512, 576, ..., 1024, 1152, ... A smaller step takes little longer than reading the
    weights; a larger one takes time for each token of padding.
    """
    sizes, size = set(limits), 16
    while size < max(limits):
        sizes.add(size)
        power = 1 << (size.bit_length() - 1)
        size += size if size < 128 else power // 2 if size < 512 else max(64, power // 8)
    return tuple(sorted(sizes))


def decode_capture_size(plan: StepPlan, sizes: tuple[int, ...]) -> int | None:
    """Return the smallest of ``sizes`` whose decode graph serves a step, or None if no decode graph does.

    A decode graph serves steps in which every sequence has one token and none is new to its slot, so that no sequence
    gets more than the block of that token. The result depends only on the plan, so all ranks take the same path.
    """
    if not sizes or any(len(each.tokens) > 1 or each.is_new or each.propose for each in plan.sequences):
        return None
    return next((size for size in sizes if size >= len(plan.sequences)), None)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The model, and the memory that its steps use besides their inputs. Graphs refer to its addresses."""

    model: CausalLM  # this rank's part of the model
    # the paged caches of its layers. With static memory they have one spare block, the last, which is never handed out
    caches: list[KVCache]
    # int32 [slots + 1, blocks], the blocks of each slot's sequence. The last row belongs to no sequence; with static
    # memory it holds the spare block
    block_tables: torch.Tensor
    last_tokens: torch.Tensor  # int64 [slots + 1], the token sampled last for each slot
    # the output of steps on static memory, with as many rows as slots; None if they allocate their output
    logits: Logits | None

    @property
    def device(self) -> torch.device:
        return self.block_tables.device

    @property
    def block_size(self) -> int:
        return self.caches[0].block_size

    @property
    def spare_row(self) -> int:
        """The row of the block tables that belongs to no sequence."""
        return self.block_tables.shape[0] - 1

    @property
    def spare_slot(self) -> int:
        """The first cache slot of the spare block."""
        return self.caches[0].keys.shape[0] - self.block_size


Replay = Callable[[], object]


class CudaGraphs:
    """Graphs by key, captured on first use. Without CUDA, each replay computes again.

    No two graphs run at the same time, so they share memory for intermediate results; capture the ones that need the
    most first. Results that outlive a replay must be stored elsewhere.

    Args:
        timer: the timer of this rank; on CUDA a :class:`DeviceStepTimer`.
    """

    def __init__(self, device: torch.device, timer: StepTimer):
        self._device, self._timer = device, timer
        self._replays: dict[Hashable, Replay] = {}
        self._pool: Any = None

    def get_or_capture(self, key: Hashable, compute: Callable[[], None], stamped: bool = False) -> Replay:
        """Return the replay of ``compute``, captured on first use. Capture is a collective operation.

        Unless ``stamped``, the capture also runs ``compute`` on the current contents of memory, which must do no harm.
        """
        if key not in self._replays:
            self._replays[key] = self._capture(compute, stamped) if self._device.type == "cuda" else compute
        return self._replays[key]

    def get(self, key: Hashable) -> Replay:
        """Return a replay captured earlier; a capture now would compute on memory that is in use."""
        return self._replays[key]

    def __len__(self) -> int:
        return len(self._replays)

    def close(self) -> None:
        """Wait for the device and release the graphs, which must happen before their communicators are closed."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._replays.clear()

    def _capture(self, compute: Callable[[], None], stamped: bool) -> Replay:
        timer = self._timer
        assert isinstance(timer, DeviceStepTimer)
        if not stamped:
            # This compiles kernels, initialises libraries, and brings the ranks together.
            compute()
        else:
            timer.calibrate()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        timer.recording = stamped
        try:
            # NCCL's watchdog thread queries events meanwhile; only the calls of this thread must be capturable.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute()
        finally:
            timer.recording = False
        self._pool = graph.pool()
        if not stamped:
            graph.replay()  # the first replay takes longer
        return graph.replay


class DecodeGraphs:
    """Runs steps in which every sequence decodes. Without CUDA, each is computed again on the same static memory.

    Args:
        state: the state of this rank; ``last_tokens`` receives the likeliest tokens of every step.
        sizes: numbers of sequences, ascending; the last is the number of slots.
    """

    def __init__(self, state: DeviceState, sizes: tuple[int, ...], graphs: CudaGraphs):
        self._state, self.sizes, self._graphs = state, sizes, graphs
        device, max_rows = state.device, sizes[-1]

        def int64_rows() -> torch.Tensor:
            return torch.zeros(max_rows, dtype=torch.int64, device=device)

        self._packed = torch.zeros(max_rows, FIELDS, dtype=torch.int32, device=device)
        self._packed[:, 0], self._packed[:, 3] = state.spare_row, -1
        self._tokens, self._positions, self._cache_slots, self._rows = (int64_rows() for _ in range(4))
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._results: dict[tuple[int, bool], Logits | None] = {}

    def capture(self, stamped: bool) -> None:
        """Capture the graphs of all sizes. Call this before the first step, while memory holds only padding."""
        for size in reversed(self.sizes):
            self._get_or_capture(size, stamped)

    def run(self, plan: StepPlan, size: int) -> Logits | None:
        """Compute a step. On the last stage, return the logits of its sequences, valid until the next step."""
        count = len(plan.sequences)
        host = pinned_empty((size, FIELDS), torch.int32, self._packed.device)
        pack_decode(plan, size, self._state.spare_row, host.numpy())
        timer = self._state.model.parallel.timer
        key = size, plan.stamped and isinstance(timer, DeviceStepTimer)
        replay = self._get_or_capture(*key) if key[1] else self._graphs.get(("decode", *key))
        self._packed[:size].copy_(host, non_blocking=True)
        replay()
        if key[1]:
            assert isinstance(timer, DeviceStepTimer)
            timer.fetch()
        logits = self._results[key]
        return None if logits is None else logits.rows(slice(0, count))

    def _get_or_capture(self, size: int, stamped: bool) -> Replay:
        return self._graphs.get_or_capture(("decode", size, stamped), lambda: self._compute(size, stamped), stamped)

    def _compute(self, size: int, stamped: bool) -> None:
        from shotcast.kernels.triton.step_inputs import BatchTensors, unpack

        state, part = self._state, slice(0, size)
        tokens, positions, slots = self._tokens[part], self._positions[part], self._cache_slots[part]
        lengths, rows = self._lengths[part], self._rows[part]
        logits = None if state.logits is None else state.logits.rows(part)
        with state.model.parallel.timer.step():
            filled = BatchTensors(tokens, positions, slots, lengths, rows)
            unpack(self._packed[part], state.last_tokens, state.block_tables, state.block_size, filled)
            batch = Batch(tokens, positions, slots, size, rows, lengths, None, None, state.block_tables, None, logits)
            result = state.model(batch, state.caches)
            if result is not None:
                state.last_tokens.index_copy_(0, rows, result.best[:, 0])
        self._results[size, stamped] = result
