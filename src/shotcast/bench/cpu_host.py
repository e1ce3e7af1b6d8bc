"""Measure the host time of a step: the engine's loop, scheduler and model runner, without model computation."""

from __future__ import annotations

import functools
import itertools
import time
from statistics import median

import numpy as np
import torch

from shotcast.bench import lone_engine
from shotcast.bench.progress import progress
from shotcast.collectives.communicator import Communicator
from shotcast.cost.inference import HostCost
from shotcast.engine.model_runner import ModelRunner
from shotcast.engine.scheduler import SchedulerConfig
from shotcast.layers.attention import KVCache
from shotcast.layers.batch import Batch, Logits
from shotcast.layers.parallel import Parallel
from shotcast.models.presets import preset

SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (16, 64, 256, 512)
_OUTPUT = 40
_BLOCK, _LENGTH = 16, 1024


class _NoModel:
    """A model that records when it is called and returns the same token for each row."""

    def __init__(self, comm: Communicator):
        self.config = preset("smollm2-135m")
        self.parallel = Parallel(comm, comm, 1)
        self.times: list[tuple[float, int]] = []  # when it was called, and the rows
        most = max(SEQUENCES)
        self._values, self._best = torch.zeros(most, self.config.vocab), torch.zeros(most, 2, dtype=torch.int64)
        self._best[:, 1] = 1

    def allocate_caches(self, blocks: int, block_size: int) -> list[KVCache]:
        return [KVCache(1, block_size, 1, 1, torch.float32, torch.device("cpu"))]

    def __call__(self, batch: Batch, caches: list[KVCache]) -> Logits:
        self.times.append((time.perf_counter(), len(batch.tokens)))
        rows = len(batch.tokens) if batch.logits_indices is None else len(batch.logits_indices)
        return Logits(self._values[:rows], self._best[:rows])


def measure(shown: bool = False) -> HostCost:
    """Return the host time of a step of one rank; ``shown`` shows progress on standard error."""
    total = len(SEQUENCES) + len(PROMPTS)
    with torch.inference_mode(), Communicator(device="cpu") as comm, progress(total, shown) as advance:
        begin = functools.partial(advance, "the host's work in a step of the engine")
        rows, times_us = [], []
        for sequences in SEQUENCES:
            begin()
            rows.append((1, sequences, sequences))
            times_us.append(_step_us(comm, [16] * sequences, max(SEQUENCES), sequences))
        for prompt in PROMPTS:
            begin()
            rows.append((1, 1, prompt))
            times_us.append(_step_us(comm, [prompt] * 20, 1, prompt))
    matrix, times = np.array(rows, float), np.array(times_us)
    found = np.linalg.lstsq(matrix / times[:, None], np.ones(len(times)), rcond=None)[0]
    fixed_us, per_sequence_us, per_row_us = (max(0.0, float(value)) for value in found)
    return HostCost(fixed_us, per_sequence_us, per_row_us, False, "steps without a model")


def _step_us(comm: Communicator, prompts: list[int], together: int, rows: int) -> float:
    """Serve requests, at most ``together`` at once, and return the median time between a call of ``rows`` rows and the
    one before it."""
    model = _NoModel(comm)
    blocks = max(SEQUENCES) * _LENGTH // _BLOCK
    runner = ModelRunner(model, blocks, _BLOCK, max(SEQUENCES), _LENGTH, 0)  # type: ignore[arg-type]
    output = _OUTPUT if together > 1 else 2
    lone_engine.serve(runner, SchedulerConfig(together, 2048, _BLOCK, blocks, _LENGTH), prompts, output)
    runner.close()
    pairs = itertools.pairwise(model.times)
    return 1e6 * median(after - before for (before, _), (after, count) in pairs if count == rows)
