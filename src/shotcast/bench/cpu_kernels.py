"""Measure the kernels of a CPU rank one by one, to calibrate a machine.

The engine's layers run with random weights of small models, enough of them in turn that weights come from memory, as in
a step. All ranks measure at the same time, since they share the memory. No engine runs.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from shotcast.bench.progress import progress
from shotcast.collectives.communicator import Communicator
from shotcast.cost.inference import HEAD_OF_PROMPTS, decode_attention, prompt_attention, rows_pass
from shotcast.engine.input_batch import cache_slots
from shotcast.layers.attention import KVCache
from shotcast.layers.batch import Batch, PrefillMetadata
from shotcast.layers.parallel import Parallel
from shotcast.layers.weights import Weights
from shotcast.models.causal_lm import CausalLM
from shotcast.models.source import open_checkpoint
from shotcast.planner.cpu_rows import FEW, SUM_NORM, WINDOWS, KernelPoint, RowsPoint, product_kind

MODELS = ("random:smollm2-135m", "random:smollm2-360m:8")
"""Models with a few hundred MB of layers each, too much for the caches or the TLB."""
MANY_SEQUENCES = (24, 32, 48, 64)
CONTEXTS = (32, 128)
"""Context lengths of decoding steps, in tokens."""
_HEADS = 4
"""The number of times that the logits are computed per pass through the layers."""
_BLOCK = 16
_LENGTH = 1040


class _Step(NamedTuple):
    """The tokens of a step: sequences that decode after a context, or one prompt; and the rows to sample."""

    sequences: int
    context: int
    prompt: int
    sampled: int

    @property
    def rows(self) -> int:
        return self.sequences + self.prompt


def _steps() -> Iterator[_Step]:
    for sequences in (*FEW, *MANY_SEQUENCES):
        for context in CONTEXTS:
            yield _Step(sequences, context, 0, sequences)
    sampled = itertools.cycle((*FEW, *MANY_SEQUENCES))
    for window in WINDOWS:
        for rows in window:
            if rows > 1:
                yield _Step(0, 0, rows, min(rows, next(sampled)))


def measure(shown: bool = False) -> list[RowsPoint]:
    """Return the measurements of this rank, in a job with as many ranks as will share the machine.

    Each is the :func:`typical` time over layers.
    """
    with torch.inference_mode(), Communicator(device="cpu") as comm:
        total = len(MODELS) * len(list(_steps()))
        with progress(total, shown and comm.rank == 0) as advance:
            return [point for model in MODELS for point in _of_model(model, comm, advance)]


def _of_model(name: str, comm: Communicator, advance: Callable[[str], None]) -> Iterator[RowsPoint]:
    with contextlib.closing(open_checkpoint(name)) as checkpoint:
        weights = Weights(checkpoint, torch.float32, comm.device)
        model = CausalLM(checkpoint.config, weights, Parallel(comm, comm, 1), _LENGTH, max(MANY_SEQUENCES))
    most = max(MANY_SEQUENCES) * (max(CONTEXTS) + _BLOCK) // _BLOCK
    caches = model.allocate_caches(max(most, _LENGTH // _BLOCK), _BLOCK)
    for cache in caches:
        cache.keys.normal_()
        cache.values.normal_()
    for step in _steps():
        advance(f"kernels of {name.removeprefix('random:')}")
        times_ns = _pass_layers(model, caches, step)
        yield from _points(model, step, {kernel: typical(values) / 1e3 for kernel, values in times_ns.items()})


def typical(times: Sequence[float]) -> float:
    """Return the mean of the times, without interrupted ones (more than twice the median).

    A step takes the sum of its kernels' means, which are above their medians.
    """
    most = 2 * median(times)
    return fmean(time for time in times if time <= most)


def _pass_layers(model: CausalLM, caches: Sequence[KVCache], step: _Step) -> dict[str, list[int]]:
    """Run the layers on random rows, and return the nanoseconds that each kernel took in each layer."""
    batch, times_ns = _batch(step), dict[str, list[int]]()

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter_ns()
        result = call(*arguments)
        times_ns.setdefault(name, []).append(time.perf_counter_ns() - started)
        return result

    partial, residual = timed("embedding", _embed, model, batch)
    for block, cache in zip(model.blocks, caches, strict=True):
        normed, residual = timed("norm", block.normed_input, partial, residual)
        qkv = timed("qkv", block.qkv, normed)
        attended = timed("attention", block.attention, qkv, cache, batch)
        partial = timed("output", block.output, attended)
        normed, residual = timed("norm", block.mlp_input, partial, residual)
        both = timed("gate_up", block.gate_up, normed)
        partial = timed("down", block.down, timed("activation", _gated, both))
    for _ in range(_HEADS):
        timed("head", model.logits, partial[-step.sampled :])
    return times_ns


def _embed(model: CausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    assert model.embeddings is not None
    partial = model.embeddings.embed(batch.tokens)
    return partial, torch.zeros_like(partial)


def _gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def _points(model: CausalLM, step: _Step, times_us: dict[str, float]) -> Iterator[RowsPoint]:
    block, rows, hidden = model.blocks[0], step.rows, model.config.hidden
    for name in ("qkv", "output", "gate_up", "down"):
        nbytes = getattr(block, name).weight.numel() * 4
        yield RowsPoint(product_kind(nbytes), rows, KernelPoint(rows_pass(nbytes), times_us[name]))
    assert model.head is not None
    head = rows_pass(model.head.weight.numel() * 4)
    yield RowsPoint(HEAD_OF_PROMPTS if step.prompt else "head", step.sampled, KernelPoint(head, times_us["head"]))
    columns = block.down.weight.shape[1]
    for name, nbytes in (
        ("norm" if model.parallel.size == 1 else SUM_NORM, rows * hidden * 4),
        ("embedding", rows * hidden * 4),
        ("activation", rows * 3 * columns * 4),
    ):
        yield RowsPoint(name, rows, KernelPoint(rows_pass(nbytes), times_us["norm" if name == SUM_NORM else name]))
    attention = block.attention
    if step.prompt:
        shape = attention.heads, attention.head_dim
        kind, work = "prompt_attention", prompt_attention([(step.prompt, 0)], *shape, beginning=0)
    else:
        shape = attention.kv_heads, attention.head_dim
        kind, work = "decode_attention", decode_attention(step.sequences, step.context + 1, *shape, 4, beginning=0)
    yield RowsPoint(kind, rows, KernelPoint(work, times_us["attention"]))


def _batch(step: _Step) -> Batch:
    """Build the input of a step; the blocks of each sequence are contiguous."""
    if step.prompt:
        every = np.arange(step.prompt)
        table = np.arange(_LENGTH // _BLOCK, dtype=np.int32)[None]
        slots = torch.from_numpy(cache_slots(table, np.zeros_like(every), every, _BLOCK).astype(np.int64))
        prefill = PrefillMetadata((0, step.prompt), (0, step.prompt), slots)
        positions, none = torch.arange(step.prompt), torch.empty(0, dtype=torch.int64)
        return Batch(positions, positions, slots, 0, none, none.int(), prefill, None, torch.from_numpy(table), None)
    blocks = max(CONTEXTS) // _BLOCK + 1
    tables = torch.arange(step.sequences * blocks, dtype=torch.int32).view(step.sequences, -1)
    rows, positions = torch.arange(step.sequences), torch.full((step.sequences,), step.context)
    slots = tables[:, step.context // _BLOCK].long() * _BLOCK + step.context % _BLOCK
    lengths = torch.full((step.sequences,), step.context + 1, dtype=torch.int32)
    return Batch(rows, positions, slots, step.sequences, rows, lengths, None, None, tables, None)
