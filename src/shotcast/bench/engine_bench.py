"""Measure the engine's time per token over batch sizes, parallel layouts and all-reduce algorithms.

Requests are random tokens. A batch is submitted at once, and requests stop only by length, so every layout does the
same work. Times are measured by the client: TTFT from the request to its first token, TPOT the mean time between later
tokens, ITL the median.

The roofline is the limit of memory bandwidth: each decoding step reads all weights of a rank once, and the keys and
values of all its sequences, so ``time >= bytes / bandwidth``. Pipeline stages run one after the other, so for one
sequence their times add up. The bandwidth is measured on the ranks while all of them read at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch

from shotcast.bench.baselines import NCCL_FAVOURABLE
from shotcast.bench.engine_report import EngineRow
from shotcast.bench.progress import progress
from shotcast.collectives.algorithm import LIBRARY
from shotcast.collectives.communicator import Communicator
from shotcast.engine.config import OVERLAP, EngineConfig, algorithm_names
from shotcast.engine.llm import LLM
from shotcast.engine.outputs import RequestOutput
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.speculative_config import SpeculativeConfig
from shotcast.engine.startup import select_device
from shotcast.errors import ConfigError
from shotcast.launcher.spawn import spawn
from shotcast.models.config import ModelConfig
from shotcast.models.memory_estimate import kv_bytes_per_token, weight_bytes
from shotcast.planner.step import Layout

_NCCL = {**NCCL_FAVOURABLE, "SHOTCAST_CHECK_VENDOR": "0"}
"""Settings under which our code adds nothing to an NCCL call."""
_READ_BYTES = 256 << 20
_READS = 8


def benchmark_algorithms() -> dict[str, str]:
    """Return the engine's algorithms, keyed by their names in the benchmark.

    "nccl" is the library for the all-reduces (Gloo on CPU ranks).
    """
    return {name: name for name in algorithm_names() if name != LIBRARY} | {"nccl": LIBRARY}


@dataclass(frozen=True, slots=True)
class EngineBenchConfig:
    """The points to measure: each batch with each algorithm and each overlap mode, on each layout.

    With ``speculative_config``, every engine is measured without and with it. Prompts repeat ``period`` random tokens;
    0 for random tokens throughout.
    """

    model: str
    layouts: tuple[Layout, ...]
    batches: tuple[int, ...]
    algorithms: tuple[str, ...]
    prompt: int
    output: int
    rounds: int
    device: str
    dtype: str = ""
    quantization: str = ""
    overlaps: tuple[str, ...] = ("auto",)
    speculative_config: str = ""
    period: int = 0

    def __post_init__(self) -> None:
        known = benchmark_algorithms()
        if unknown := [name for name in self.algorithms if name not in known]:
            raise ConfigError(f"there is no algorithm {unknown[0]!r}; choose from {', '.join(known)}")
        if unknown := [name for name in self.overlaps if name not in OVERLAP]:
            raise ConfigError(f"there is no overlap {unknown[0]!r}; choose from {', '.join(OVERLAP)}")
        if min((self.prompt, self.rounds, *self.batches)) < 1 or self.output < 2:
            raise ConfigError(
                "batches, prompt and rounds must be at least 1, and output at least 2 (one token has no TPOT)"
            )
        if self.period < 0:
            raise ConfigError(f"period must be at least 0, not {self.period}")
        if self.speculative_config:
            SpeculativeConfig.read(self.speculative_config)


class _Engine(NamedTuple):
    """An engine to measure; ``name`` is its display name."""

    layout: Layout
    algorithm: str
    overlap: str
    speculation: str
    name: str


def measure(config: EngineBenchConfig, shown: bool = False) -> Iterator[EngineRow]:
    """Measure all points of a configuration, with one engine for each layout and algorithm."""
    engines = list(_engines(config))
    with progress(len(engines) * len(config.batches), shown) as advance:
        yield from _measure(config, engines, advance)


def _engines(config: EngineBenchConfig) -> Iterator[_Engine]:
    for layout in config.layouts:
        ways = itertools.product(config.algorithms, config.overlaps)
        # a single rank does not communicate, so it is measured once
        few = itertools.islice(ways, 1 if layout.tensor_parallel == 1 else None)
        speculations = dict.fromkeys(("", config.speculative_config))
        for (algorithm, overlap), speculation in itertools.product(few, speculations):
            name = f"{layout} {algorithm}" + (f", overlap {overlap}" if len(config.overlaps) > 1 else "")
            yield _Engine(layout, algorithm, overlap, speculation, name + ", speculating" * bool(speculation))


def _measure(
    config: EngineBenchConfig, engines: Sequence[_Engine], advance: Callable[[str], None]
) -> Iterator[EngineRow]:
    most = max(layout.ranks for layout in config.layouts)
    config = replace(config, device=select_device(EngineConfig(config.model, most, device=config.device)).device)
    bandwidths: dict[int, float] = {}
    for layout, algorithm, overlap, speculation, name in engines:
        batches = [f"{name}, {batch} request{'s' * (batch > 1)}" for batch in config.batches]
        advance(batches[0])
        if layout.ranks not in bandwidths:
            bandwidths[layout.ranks] = min(spawn(read_bandwidth_gbps, layout.ranks, config.device))
        with (
            _environment(_NCCL if algorithm == "nccl" else {}),
            open_engine(config, layout, algorithm, overlap, speculation) as llm,
        ):
            for number, batch in enumerate(config.batches):
                if number:
                    advance(batches[number])
                row = point(config, layout, algorithm, batch, llm, bandwidths[layout.ranks])
                yield replace(row, overlap=overlap, speculation=speculation)


def open_engine(config: EngineBenchConfig, layout: Layout, algorithm: str, overlap: str, speculation: str = "") -> LLM:
    """Open the engine to measure, with an algorithm from :func:`benchmark_algorithms`."""
    return LLM(
        config.model,
        **_engine_options(config),
        layout=str(layout),
        prefix_caching=False,
        algorithm=benchmark_algorithms()[algorithm],
        overlap=overlap,
        speculative_config=speculation or None,
        # graphs with timestamps are captured when the model is loaded, not in the round that uses them
        stamp_every=int(config.device == "cuda"),
    )


def _engine_options(config: EngineBenchConfig) -> dict[str, Any]:
    return {
        "device": config.device,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "max_model_len": config.prompt + config.output,
        "max_num_seqs": max(config.batches),
    }


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for ranks that start inside the block; variables that are already set keep their values."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def read_bandwidth_gbps(device: str) -> float:
    """Return the bandwidth in GB/s (1e9) at which this rank reads memory while all others read too.

    The memory is far larger than the caches.
    """
    with Communicator(device=device, exclusive=True) as comm:
        data = torch.ones(_READ_BYTES * (4 if device == "cuda" else 1) // 4, device=comm.device)
        times = []
        for _ in range(_READS):
            comm.barrier()
            times.append(_read_cuda_s(data) if device == "cuda" else _read_s(data))
    return data.numel() * 4 / median(times) / 1e9


def _read_s(data: torch.Tensor) -> float:
    started = time.perf_counter()
    float(data.sum())
    return time.perf_counter() - started


def _read_cuda_s(data: torch.Tensor) -> float:
    """Return the seconds of one read, averaged over several in a row so that the host runs ahead of the GPU."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    data.sum()
    before.record()
    for _ in range(_READS):
        data.sum()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / _READS


def point(
    config: EngineBenchConfig, layout: Layout, algorithm: str, batch: int, llm: LLM, bandwidth: float
) -> EngineRow:
    """Measure a batch: one warm-up round, then the timed rounds.

    Args:
        bandwidth: GB/s at which the ranks read memory.
    """
    params = SamplingParams(temperature=0.0, max_tokens=config.output, ignore_eos=True)
    numbers = random.Random(batch)
    model = llm.model

    def run_round() -> tuple[list[RequestOutput], float]:
        period = config.period or config.prompt
        parts = [[numbers.randrange(model.vocab) for _ in range(period)] for _ in range(batch)]
        prompts = [(part * (config.prompt // period + 1))[: config.prompt] for part in parts]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return outputs, time.perf_counter() - started

    # The first round warms up. On CUDA it also records timestamps; they take time, so timed rounds have none.
    llm.stamp_every(int(config.device == "cuda"))
    stats = [llm.stats()]
    run_round()
    stats.append(llm.stats())
    llm.stamp_every(0)
    rounds = [run_round() for _ in range(config.rounds)]
    stats.append(llm.stats())
    proposed, accepted = (
        getattr(stats[2], name) - getattr(stats[1], name) for name in ("proposed_tokens", "accepted_tokens")
    )
    before, after = stats[:2] if config.device == "cuda" else stats[1:]
    ttft_ms = median(sum((output.ttft_s or 0.0) for output in outputs) / batch for outputs, _ in rounds) * 1e3
    tpot_ms = median(sum((output.tpot_s or 0.0) for output in outputs) / batch for outputs, _ in rounds) * 1e3
    return row_of(
        config,
        model,
        layout,
        algorithm,
        batch,
        llm.dtype,
        bandwidth,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        itl_ms=median(_gaps_s(rounds)) * 1e3,
        tokens_per_s=median(batch * config.output / seconds for _, seconds in rounds),
        communication=(after.communication_s - before.communication_s) / max(after.step_s - before.step_s, 1e-9),
        period=config.period,
        accepted=accepted / proposed if proposed else None,
    )


def _gaps_s(rounds: list[tuple[list[RequestOutput], float]]) -> list[float]:
    """Return the seconds between adjacent tokens of all requests, except pairs from one step."""
    times = [output.times_s for outputs, _ in rounds for output in outputs]
    pairs = [pair for request_times in times for pair in itertools.pairwise(request_times)]
    return [later - earlier for earlier, later in pairs if later > earlier]


def row_of(
    config: EngineBenchConfig,
    model: ModelConfig,
    layout: Layout,
    algorithm: str,
    batch: int,
    dtype: str,
    bandwidth: float,
    itl_ms: float,
    **measured: Any,
) -> EngineRow:
    """Build the row of a point: its measurements and its roofline.

    The roofline counts one read of the weights, and one of the keys and values of the sequences computed together.
    """
    item = getattr(torch, dtype).itemsize
    cache_item = 4 if config.device == "cpu" else item
    # only the embeddings of the batch's tokens are read, unless the matrix is also the output head
    not_read = 0 if model.tied else model.vocab * model.hidden * item
    stored = "stored" if config.device == model.stored_on and model.stored_bytes is not None else ""
    weights = weight_bytes(model, item, quantization=config.quantization or stored) - not_read
    a_token = kv_bytes_per_token(model, cache_item, model.kv_heads, model.layers)
    concurrent = max(1.0, batch / layout.pipeline_parallel)
    cache_bytes = concurrent * (config.prompt + config.output // 2) * a_token
    roofline_ms = (weights + cache_bytes) / layout.tensor_parallel / bandwidth / 1e6
    return EngineRow(
        *(config.model, config.device, dtype, str(layout), algorithm, batch, config.prompt, config.output),
        itl_ms=itl_ms,
        roofline_ms=roofline_ms,
        roofline=roofline_ms / itl_ms,
        bandwidth_gbps=bandwidth,
        quantization=config.quantization,
        **measured,
    )
