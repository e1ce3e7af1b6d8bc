"""What the engine takes for a token: over batch sizes, parallel layouts and all-reduce algorithms.

Requests are random tokens, as many at once as the batch says, and end by length alone, so that every layout does the
same work. Times are the client's: TTFT from the request to its first token, TPOT the mean between later tokens, ITL the
median.

The roofline is what memory allows: each decoding step reads every weight of a rank once and the keys and values of all
its sequences, ``time >= bytes / bandwidth``; stages of a pipeline follow each other, so their times add up for one
sequence. Bandwidth is measured on the ranks, all reading at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch

from shotcast.bench.baselines import NCCL_FAVOURABLE
from shotcast.bench.engine_report import TRANSFORMERS, EngineRow
from shotcast.collectives.communicator import Communicator
from shotcast.engine.config import EngineConfig
from shotcast.engine.device import resolved
from shotcast.engine.llm import LLM
from shotcast.engine.requests import RequestOutput, SamplingParams
from shotcast.errors import ConfigError
from shotcast.launcher.spawn import spawn
from shotcast.models.config import ModelConfig
from shotcast.models.memory_estimate import kv_bytes_per_token, weight_bytes
from shotcast.models.source import find_model, open_checkpoint

ALGORITHMS = {"auto": "auto", "one_shot": "one_shot", "two_shot": "two_shot", "ring": "ring", "nccl": "vendor"}
"""What a benchmark calls them; "nccl" is Gloo between CPU ranks."""
_NCCL = {**NCCL_FAVOURABLE, "SHOTCAST_CHECK_VENDOR": "0"}
"""Nothing of ours beside NCCL's calls."""
_READ_BYTES = 256 << 20
_READS = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks: each of ``pipeline_parallel`` stages has ``tensor_parallel``."""

    tensor_parallel: int
    pipeline_parallel: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        """From ``TxP``, such as 4x1 or 2x2."""
        try:
            tensor, pipeline = map(int, text.split("x"))
            if min(tensor, pipeline) < 1:
                raise ValueError(text)
        except ValueError:
            raise ConfigError(
                f"a layout is TxP, tensor by pipeline parallel, such as 4x1 or 2x2, not {text!r}"
            ) from None
        return cls(tensor, pipeline)

    def __str__(self) -> str:
        return f"{self.tensor_parallel}x{self.pipeline_parallel}"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What to measure: each batch with each algorithm on each layout; and first, as ``baseline``, Transformers."""

    model: str
    layouts: tuple[Layout, ...]
    batches: tuple[int, ...]
    algorithms: tuple[str, ...]
    prompt: int
    output: int
    rounds: int
    device: str
    dtype: str = ""
    baseline: bool = False
    quantization: str = ""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.algorithms if name not in ALGORITHMS]:
            raise ConfigError(f"there is no algorithm {unknown[0]!r}; there are {', '.join(ALGORITHMS)}")
        if min((self.prompt, self.rounds, *self.batches)) < 1 or self.output < 2:
            raise ConfigError(
                "batches, prompt and rounds are 1 or more, output 2 or more (there is no TPOT of one token)"
            )


def measure(plan: EnginePlan, advance: Callable[[str], None] = lambda what: None) -> Iterator[EngineRow]:
    """Measure the points of a plan, one engine for each layout and algorithm."""
    most = max(layout.tensor_parallel * layout.pipeline_parallel for layout in plan.layouts)
    plan = replace(plan, device=resolved(EngineConfig(plan.model, most, device=plan.device)).device)
    if plan.baseline:
        advance(TRANSFORMERS)
        # a process of its own, so that its memory and threads are gone before the next
        yield from spawn(transformers_rows, 1, plan)[0]
    bandwidths: dict[int, float] = {}
    for layout in plan.layouts:
        ranks = layout.tensor_parallel * layout.pipeline_parallel
        if ranks not in bandwidths:
            bandwidths[ranks] = min(spawn(read_bandwidth_gbps, ranks, plan.device))
        # one rank has nobody to talk to, so it is measured once
        for algorithm in plan.algorithms if layout.tensor_parallel > 1 else plan.algorithms[:1]:
            advance(f"{layout} {algorithm}")
            with (
                _environment(_NCCL if algorithm == "nccl" else {}),
                LLM(
                    plan.model,
                    tensor_parallel=layout.tensor_parallel,
                    pipeline_parallel=layout.pipeline_parallel,
                    device=plan.device,
                    dtype=plan.dtype,
                    quantization=plan.quantization,
                    max_model_len=plan.prompt + plan.output,
                    max_sequences=max(plan.batches),
                    prefix_caching=False,
                    algorithm=ALGORITHMS[algorithm],
                    # what stamps take is captured when the model is loaded, not in the round that has them
                    stamp_every=int(plan.device == "cuda"),
                ) as llm,
            ):
                for batch in plan.batches:
                    yield _point(plan, layout, algorithm, batch, llm, bandwidths[ranks])


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Of ranks that are started meanwhile. What is set already stays."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def transformers_rows(plan: EnginePlan) -> list[EngineRow]:
    """The batches by ``generate`` of Hugging Face Transformers: same weights, dtype, prompts' length and threads."""
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    path = find_model(plan.model)
    folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    dtype = plan.dtype or ("float32" if plan.device == "cpu" else "bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True, **options)
    loaded = loaded.eval().to(plan.device)
    bandwidth = read_bandwidth_gbps(plan.device)
    checkpoint = open_checkpoint(plan.model)
    rows = []
    for batch in plan.batches:
        numbers = torch.Generator().manual_seed(batch)

        def timed(length: int, batch: int = batch, numbers: torch.Generator = numbers) -> list[float]:
            """Seconds to each token."""
            prompts = torch.randint(checkpoint.config.vocab, (batch, plan.prompt), generator=numbers).to(plan.device)
            times: list[float] = []

            def look(tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
                times.append(time.perf_counter() - started)
                return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

            started = time.perf_counter()
            loaded.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([look]),
            )
            return times

        timed(2)
        runs = [timed(plan.output) for _ in range(plan.rounds)]
        rows.append(
            _row(
                plan,
                checkpoint.config,
                Layout(1, 1),
                TRANSFORMERS,
                batch,
                dtype,
                bandwidth,
                ttft_ms=median(run[0] for run in runs) * 1e3,
                tpot_ms=median((run[-1] - run[0]) / (plan.output - 1) for run in runs) * 1e3,
                itl_ms=median(after - before for run in runs for before, after in itertools.pairwise(run)) * 1e3,
                tokens_per_s=median(batch * plan.output / run[-1] for run in runs),
                communication=0.0,
            )
        )
    checkpoint.close()
    return rows


def read_bandwidth_gbps(device: str) -> float:
    """GB/s (1e9) at which this rank reads memory far larger than its caches, while the others do the same."""
    with Communicator(device=device) as comm:
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
    """Of several reads in a row, so that the host is ahead."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    data.sum()
    before.record()
    for _ in range(_READS):
        data.sum()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / _READS


def _point(plan: EnginePlan, layout: Layout, algorithm: str, batch: int, llm: LLM, bandwidth: float) -> EngineRow:
    params = SamplingParams(temperature=0.0, max_tokens=plan.output, ignore_eos=True)
    numbers = random.Random(batch)
    model = llm.model

    def round_of() -> tuple[list[RequestOutput], float]:
        prompts = [[numbers.randrange(model.vocab) for _ in range(plan.prompt)] for _ in range(batch)]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return outputs, time.perf_counter() - started

    # The first round warms up. On CUDA it has the stamps besides, which take time, so that no timed one has them.
    llm.stamp_every(int(plan.device == "cuda"))
    stats = [llm.stats()]
    round_of()
    stats.append(llm.stats())
    llm.stamp_every(0)
    rounds = [round_of() for _ in range(plan.rounds)]
    stats.append(llm.stats())
    before, after = stats[:2] if plan.device == "cuda" else stats[1:]
    ttft_ms = median(sum((output.ttft_s or 0.0) for output in outputs) / batch for outputs, _ in rounds) * 1e3
    tpot_ms = median(sum((output.tpot_s or 0.0) for output in outputs) / batch for outputs, _ in rounds) * 1e3
    return _row(
        plan,
        model,
        layout,
        algorithm,
        batch,
        llm.dtype,
        bandwidth,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        itl_ms=median(_gaps_s(rounds)) * 1e3,
        tokens_per_s=median(batch * plan.output / seconds for _, seconds in rounds),
        communication=(after.communication_s - before.communication_s) / max(after.step_s - before.step_s, 1e-9),
    )


def _gaps_s(rounds: list[tuple[list[RequestOutput], float]]) -> list[float]:
    """Between neighbouring tokens of all requests."""
    times = [output.times_s for outputs, _ in rounds for output in outputs]
    return [later - earlier for one in times for earlier, later in itertools.pairwise(one)]


def _row(
    plan: EnginePlan,
    model: ModelConfig,
    layout: Layout,
    algorithm: str,
    batch: int,
    dtype: str,
    bandwidth: float,
    *,
    ttft_ms: float,
    tpot_ms: float,
    itl_ms: float,
    tokens_per_s: float,
    communication: float,
) -> EngineRow:
    """A point with its roofline: weights, and keys and values of sequences that are computed together, read once."""
    item = getattr(torch, dtype).itemsize
    cache_item = 4 if plan.device == "cpu" else item
    quantization = "" if algorithm == TRANSFORMERS else plan.quantization
    # of the embeddings only rows of the batch's tokens are read, unless they are the head as well
    not_read = 0 if model.tied else model.vocab * model.hidden * item
    weights = weight_bytes(model, item, quantization=quantization) - not_read
    a_token = kv_bytes_per_token(model, cache_item, model.kv_heads, model.layers)
    together = max(1.0, batch / layout.pipeline_parallel)
    kept = together * (plan.prompt + plan.output // 2) * a_token
    roofline_ms = (weights + kept) / layout.tensor_parallel / bandwidth / 1e6
    return EngineRow(
        plan.model,
        plan.device,
        dtype,
        str(layout),
        algorithm,
        batch,
        plan.prompt,
        plan.output,
        ttft_ms,
        tpot_ms,
        itl_ms,
        tokens_per_s,
        communication,
        roofline_ms,
        roofline_ms / itl_ms,
        bandwidth,
        quantization,
    )
