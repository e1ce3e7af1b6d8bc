r"""Plans: every layout of a model on a cluster, its speed for each number of sequences, and the best one for a target.

With C sequences at once, prompts of I tokens and outputs of O, P stages that take :math:`d_s` for a step of
:math:`\lceil C / P \rceil` decoding sequences, and a transfer :math:`x_s` from each stage to the next and from the last
to the first, each sequence gets a token every

.. math:: T_d = \max\left(m \max_s d_s,\; \sum_s (d_s + x_s)\right), \quad m = \min(C, P)

The host's time of a step is hidden on GPUs, where it counts as one more :math:`d_s` in the maximum. On CPUs it is part
of the first stage's time.

A prompt takes :math:`t_p`, its part of the steps that are full of prompts, on the slowest stage. While C sequences get
O tokens each, C prompts are computed, so

.. math:: \text{tokens/s} = \frac{C\,O}{O\,T_d + C\,t_p}, \quad T_{TPOT} = T_d + \frac{(C - 1)\,t_p}{O}

The first token arrives when the client's request has reached the host, the host has planned the step, the prompt has
passed all stages, whose GPUs start rested, and its token is back at the first. The consequence: with few sequences
:math:`T_d` is dominated by reading weights, once for each of the m shares of a pipeline; with many it is dominated by
arithmetic, and tensor parallelism adds the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shotcast.collectives.registry import registered
from shotcast.cost.inference import FullClock
from shotcast.errors import ConfigError
from shotcast.hardware.cluster import Cluster
from shotcast.models.config import ModelConfig
from shotcast.models.memory_estimate import kv_bytes_per_token, largest_share, require_division, weight_bytes
from shotcast.planner.calibration import Calibration
from shotcast.planner.collectives import CollectiveCosts, modelled_algorithms
from shotcast.planner.cpu_rows import step_model
from shotcast.planner.step import Estimate, Layout, StepModel, StepWork, kernel_error
from shotcast.transport.triton.layout import MOST_RANKS
from shotcast.units import about_size, counted
from shotcast.wire import MAX_WORLD_SIZE

MAX_RANKS = 1024
"""The maximum number of ranks of an engine."""
MOST_SEQUENCES = 4096
"""The largest number of sequences of an engine that plans consider."""
BATCH_TOKENS = 2048
"""The maximum number of tokens of a step, an engine's default."""
_OTHER_BYTES = 2 << 30
"""An allowance for the CUDA context, captured graphs and the workspace of collectives, which the engine measures."""
LATENCY, THROUGHPUT = "latency", "throughput"


@dataclass(frozen=True, slots=True)
class Target:
    """The goal of a plan: ``latency`` of one sequence, or ``throughput``, optionally within bounds."""

    kind: str = THROUGHPUT
    ttft_ms: float = math.inf
    tpot_ms: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse a target: ``latency``, ``throughput``, or bounds such as ``ttft=500,tpot=20`` (ms). Raises ConfigError
        for anything else.
        """
        if text in (LATENCY, THROUGHPUT):
            return cls(text)
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            try:
                number = float(value.strip().lower().removesuffix("ms"))
            except ValueError:
                number = math.nan
            if f"{name.strip()}_ms" in bounds:
                raise ConfigError(f"{text!r} has two bounds of {name.strip()}; give one")
            if name.strip() not in ("ttft", "tpot") or not equals or not 0 < number < math.inf:
                raise ConfigError(
                    f"a target is {LATENCY}, {THROUGHPUT}, or bounds in milliseconds such as ttft=500,tpot=20, "
                    f"not {text!r}"
                )
            bounds[f"{name.strip()}_ms"] = number
        return cls(THROUGHPUT, **bounds)

    def __str__(self) -> str:
        bounds = {"first token": self.ttft_ms, "each later token": self.tpot_ms}
        texts = [f"{name} within {bound:g} ms" for name, bound in bounds.items() if bound < math.inf]
        return " ".join([self.kind, "with" if texts else "", " and ".join(texts)]).strip()


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's start settings, with its defaults."""

    sequences: int = MOST_SEQUENCES  # those that are computed together, at most
    batch_tokens: int = BATCH_TOKENS  # tokens of a step at most
    utilization: float = 0.9  # the part of a GPU's memory that an engine may use
    algorithm: str = "auto"  # of the sums; ``auto`` for the fastest of our own
    # bytes of an element of a key or value, with its part of their scale; None for those of an activation
    kv_item: float | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """A question to the planner: which model, on which cluster, for which target."""

    model: ModelConfig  # its dimensions
    name: str  # the model as the user named it
    quantization: str  # ``fp8`` or ""
    cluster: Cluster  # nodes of GPUs
    gpus: int  # how many of them
    prompt: int  # tokens of a request
    output: int  # tokens that it gets
    target: Target = Target()  # what is wanted
    limits: Limits = Limits()  # those of each engine

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MAX_RANKS:
            raise ConfigError(f"gpus must be from 1 to {MAX_RANKS}, not {self.gpus}")
        per_node = self.cluster.gpus_per_node
        if self.gpus > per_node and self.cluster.network is None:
            one = f"{self.cluster.name} is one node of {counted(per_node, 'GPU')}"
            raise ConfigError(f"{one}, and {self.gpus} are asked for")
        nodes = self.cluster.nodes
        if nodes is not None and self.gpus > nodes * per_node:
            several = f"{self.cluster.name} is {counted(nodes, 'node')} of {counted(per_node, 'GPU')}"
            raise ConfigError(f"{several}, and {self.gpus} are asked for")
        if self.gpus > per_node and self.gpus % per_node:
            raise ConfigError(f"{self.gpus} GPUs are no whole number of nodes of {per_node}")
        if self.prompt < 1 or self.output < 2:
            raise ConfigError(
                f"input must be at least 1 token and output at least 2 (one has no time between tokens), not "
                f"{self.prompt} and {self.output}"
            )
        if self.prompt + self.output > self.model.max_position:
            raise ConfigError(
                f"{self.name} takes {self.model.max_position} tokens of a sequence, and {self.prompt} + {self.output} "
                "are asked for"
            )
        if self.limits.algorithm not in modelled_algorithms():
            raise ConfigError(
                f"there is no model of {self.limits.algorithm!r}; choose from {', '.join(modelled_algorithms())}"
            )
        if self.quantization not in ("", "fp8"):
            raise ConfigError(f'quantization must be "" (none) or fp8, not {self.quantization!r}')
        if self.quantization and self.cluster.gpu.fp8_tflops is None:
            raise ConfigError(f"the {self.cluster.gpu.name} has no FP8 arithmetic; leave quantization out")


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the fullest rank, in bytes."""

    usable: int  # the part of the GPU that an engine may use
    weights: int  # its weights
    other: int  # an allowance for all that depends on neither rows nor sequences
    per_row: int  # activations of a row of the largest step
    per_sequence: int  # logits of a sequence
    per_token: int  # keys and values of a token
    batch_tokens: int  # tokens of a step at most

    def steps(self, sequences: int) -> int:
        """Estimate the bytes of everything except the cache, with steps of this many sequences."""
        # a step has room for a token of each sequence
        return self.other + self.per_row * max(self.batch_tokens, sequences) + self.per_sequence * sequences

    def cache(self, sequences: int) -> int:
        """Return the bytes left for keys and values; negative if the rest does not fit."""
        return self.usable - self.weights - self.steps(sequences)

    def sequences(self, tokens: int) -> int:
        """Return how many sequences of this many tokens fit, each with its logits."""
        each = self.per_token * tokens + self.per_sequence
        most = self.cache(0) // each
        if most > self.batch_tokens:
            # beyond it the rows of a step grow with the sequences
            most = max(self.batch_tokens, (self.usable - self.weights - self.other) // (each + self.per_row))
        return max(0, most)


@dataclass(frozen=True, slots=True)
class Point:
    """A layout with a number of sequences."""

    layout: Layout  # of one engine
    engines: int  # equal engines beside each other (data parallel)
    sequences: int  # of one engine at once
    ttft_ms: float  # of a request that waits for no other
    tpot_ms: float
    tokens_per_s: float  # output of all engines
    # one standard deviation of both times, relative, by the residuals of kernels and by how much more runs differ
    ttft_error: float
    tpot_error: float
    algorithm: str  # of the sums of a step that decodes; "" for one rank a stage
    parts: dict[str, float]  # microseconds of a decoding step, all stages together, by what they are for
    stage_us: tuple[float, float]  # the slowest and the fastest stage of that step
    memory: Memory  # of the fullest rank

    @property
    def gpus(self) -> int:
        return self.layout.ranks * self.engines

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.gpus

    @property
    def tokens_per_s_per_user(self) -> float:
        """Output tokens per second of one request after its first token."""
        return 1e3 / self.tpot_ms

    def latency_ms(self, output: int) -> float:
        """Return the latency in milliseconds of a request with this many output tokens."""
        return self.ttft_ms + (output - 1) * self.tpot_ms


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a query."""

    query: Query
    points: tuple[Point, ...]  # every layout with every number of sequences that fits
    refused: dict[str, str]  # layouts that cannot be, and why
    best: Point | None  # what suits the target best; None if nothing does
    calibrated: bool  # whether the GPU has measured constants; else they are scaled from those of another
    device: str = "cuda"  # that of the calibration, with which the engine is started
    dtype: str = "bfloat16"  # likewise

    @property
    def precision(self) -> str:
        """The quantization or, without one, the dtype of weights, in InferenceX's notation."""
        return self.query.quantization or {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[self.dtype]

    def best_of_each_layout(self) -> list[Point]:
        """Return each layout's best point for the target, best layout first.

        If some points meet the target's bounds, layouts that never do are omitted.
        """
        best: dict[tuple[Layout, int], Point] = {}
        for point in [point for point in self.points if _meets(self.query.target, point)] or self.points:
            key = point.layout, point.engines
            if key not in best or _rank(self.query, point) < _rank(self.query, best[key]):
                best[key] = point
        return sorted(best.values(), key=lambda point: _rank(self.query, point))

    def pareto(self) -> list[Point]:
        """Return the points not beaten in both tokens/s per GPU and tokens/s per user, ordered by the latter."""
        front: list[Point] = []
        for point in sorted(self.points, key=lambda point: (-point.tokens_per_s_per_user, -point.tokens_per_s_per_gpu)):
            if not front or point.tokens_per_s_per_gpu > front[-1].tokens_per_s_per_gpu:
                front.append(point)
        return front


def plan(
    query: Query,
    calibration: Calibration,
    candidates: Iterable[tuple[Layout, int]] | None = None,
    collectives: CollectiveCosts | None = None,
) -> Plan:
    """Compute the plan for a query.

    Args:
        calibration: the calibration of any GPU; it is scaled to the cluster's GPU by data sheets.
        candidates: layouts, and the number of engines of each; all :func:`layouts` by default.
        collectives: the cost of sums, if it differs from our algorithms' cost by the calibration.
    """
    constants = calibration.scaled_to(query.cluster.gpu).of_ranks(query.gpus)
    collectives = collectives or CollectiveCosts.on(query.cluster, constants.link)
    points: list[Point] = []
    refused: dict[str, str] = {}
    for layout, engines in layouts(query) if candidates is None else candidates:
        name = f"{layout}" if engines == 1 else f"{layout} x {engines}"
        try:
            require_place(query, layout)
            require_served(layout, collectives)
            model = step_model(
                query.model,
                layout,
                constants,
                collectives,
                query.quantization,
                query.limits.algorithm,
                kv_item=query.limits.kv_item,
            )
            points += points_of(query, model, engines, memory_of(query, layout, constants.itemsize), collectives)
        except ConfigError as error:
            refused[name] = str(error)
    return best_of(query, calibration, points, refused)


def best_of(query: Query, calibration: Calibration, points: Sequence[Point], refused: dict[str, str]) -> Plan:
    """Build the plan for a query from known points."""
    fitting = [point for point in points if _meets(query.target, point)]
    best = min(fitting, key=lambda point: _rank(query, point), default=None)
    calibrated = calibration.device != "cuda" or query.cluster.gpu == calibration.gpu
    return Plan(query, tuple(points), refused, best, calibrated, calibration.device, calibration.dtype)


def layouts(query: Query) -> Iterator[tuple[Layout, int]]:
    """Yield every layout of one engine, and how many such engines fit the GPUs."""
    divisors = [number for number in range(1, query.gpus + 1) if query.gpus % number == 0]
    for tensor in divisors:
        for stages in divisors:
            if query.gpus % (tensor * stages) == 0:
                yield Layout(tensor, stages), query.gpus // (tensor * stages)


def memory_of(query: Query, layout: Layout, itemsize: int = 2) -> Memory:
    """Return the memory of the fullest rank on a GPU of the cluster."""
    limits, usable = query.limits, int(query.cluster.gpu.memory_bytes * query.limits.utilization)
    return fullest_rank(query.model, query.quantization, layout, usable, limits.batch_tokens, itemsize, limits.kv_item)


def fullest_rank(
    model: ModelConfig,
    quantization: str,
    layout: Layout,
    usable: int,
    batch_tokens: int,
    itemsize: int = 2,
    kv_item: float | None = None,
) -> Memory:
    """Return the memory of the fullest rank.

    The memory of steps is an estimate: activations for the largest step and float32 logits of all sequences, each
    twice, plus an allowance for everything else. An engine measures it.

    Args:
        itemsize: bytes of an activation, of a key or value, and of a weight that is not FP8.
        kv_item: bytes of a key or value, if different from ``itemsize``.
    """
    require_division(model, *layout)
    share = largest_share(model, layout.tensor_parallel)
    layers = -(-model.layers // layout.pipeline_parallel)
    per_token = kv_bytes_per_token(model, kv_item or itemsize, share.kv_heads, layers)
    row = 3 * model.hidden + (share.heads + 2 * share.kv_heads) * model.head_dim + 3 * share.columns
    return Memory(
        usable,
        weight_bytes(model, itemsize, *layout, quantization),
        _OTHER_BYTES,
        2 * row * itemsize,
        2 * model.vocab * 4,
        per_token,
        batch_tokens,
    )


def require_place(query: Query, layout: Layout) -> None:
    """Raise ConfigError if engines of this layout, or their stages, would straddle nodes."""
    per_node = query.cluster.gpus_per_node
    for what, ranks in (("an engine", layout.ranks), ("a stage", layout.tensor_parallel)):
        whole = ranks % per_node == 0 if ranks > per_node else per_node % ranks == 0
        if query.gpus > per_node and not whole:
            raise ConfigError(f"{what} of {ranks} ranks lies across nodes of {per_node} GPUs")


def require_served(layout: Layout, collectives: CollectiveCosts) -> None:
    """Raise ConfigError unless native kernels serve the ranks of a stage."""
    shape = collectives.shape(layout.tensor_parallel)
    most = MAX_WORLD_SIZE if shape.nodes == 1 else MOST_RANKS
    if shape.world_size > most:
        where = "one node" if shape.nodes == 1 else "several nodes"
        raise ConfigError(f"sums of {shape.world_size} GPUs: native kernels serve up to {most} of them on {where}")


def points_of(
    query: Query, model: StepModel, engines: int, memory: Memory, collectives: CollectiveCosts
) -> Iterator[Point]:
    """Yield the points of a layout by number of sequences. Raises ConfigError if there is no room for one."""
    most = min(memory.sequences(query.prompt + query.output), query.limits.sequences)
    if not most:
        tokens = query.prompt + query.output
        raise ConfigError(
            f"the weights of a rank take {about_size(memory.weights)}, steps about {about_size(memory.steps(1))}, and "
            f"it may use {about_size(memory.usable)}, so a sequence of {tokens} tokens has no room"
        )
    prompt = _prompt_time(query, model)
    sequences = 1
    while sequences <= most:
        yield _point(query, model, engines, sequences, prompt, memory, collectives)
        sequences = most if sequences < most < 2 * sequences else 2 * sequences


class _PromptTime(NamedTuple):
    """The time of a prompt through all stages, its error, and its share of full steps on the slowest stage."""

    latency_us: float
    error: float
    busy_us: float


def _prompt_time(query: Query, model: StepModel) -> _PromptTime:
    most = query.limits.batch_tokens
    chunks = [
        StepWork(0, 0.0, ((min(most, query.prompt - begin), begin),), int(begin + most >= query.prompt))
        for begin in range(0, query.prompt, most)
    ]
    times = [_stage_times(model, chunk) for chunk in chunks]
    error = math.hypot(model.first_token_error(chunks), model.beyond_kernels.first)
    # chunks follow each other through the stages: all of the first, then the slowest stage of each other
    transfers_us = [*model.transfers_us(chunks[0])[:-1], model.transfers_us(chunks[-1])[-1]]
    latency_us = model.client_us + (model.host_us(chunks[0]) if model.hides_host else 0.0)
    for stage, time_us, transfer_us in zip(model.stages(chunks[0]), times[0], transfers_us, strict=True):
        clock = FullClock()
        clock.rest(latency_us)  # until its turn
        latency_us += time_us - clock.take(stage.saved_us) + transfer_us
    latency_us += sum(max(each) for each in times[1:])
    together = max(1, most // query.prompt)
    if together == 1:
        return _PromptTime(latency_us, error, sum(max(each) for each in times))
    full = StepWork(0, 0.0, ((query.prompt, 0),) * together, together)
    return _PromptTime(latency_us, error, max(*_stage_times(model, full), model.host_us(full)) / together)


def _stage_times(model: StepModel, work: StepWork) -> list[float]:
    """Return the microseconds of each stage, including the host's in the first if rank 0 computes that stage itself."""
    times = [stage.time_us for stage in model.stages(work)]
    if not model.hides_host:
        times[0] += model.host_us(work)
    return times


def _point(
    query: Query,
    model: StepModel,
    engines: int,
    sequences: int,
    prompt: _PromptTime,
    memory: Memory,
    collectives: CollectiveCosts,
) -> Point:
    layout = model.layout
    shares = min(sequences, layout.pipeline_parallel)
    rows = -(-sequences // layout.pipeline_parallel)
    work = StepWork(rows, query.prompt + query.output / 2, (), rows)
    stages, times = model.stages(work), _stage_times(model, work)
    slowest_us = max(*times, model.host_us(work))
    round_us = max(shares * slowest_us, sum(times) + sum(model.transfers_us(work)))
    tpot_us = round_us + (sequences - 1) * prompt.busy_us / query.output
    all_us = query.output * round_us + sequences * prompt.busy_us
    algorithm = ""
    if layout.tensor_parallel > 1:
        summed = collectives.all_reduce(
            rows * query.model.hidden * model.itemsize, layout.tensor_parallel, model.itemsize, query.limits.algorithm
        )
        algorithm = registered()[summed.algorithm].label
    return Point(
        layout,
        engines,
        sequences,
        prompt.latency_us / 1e3,
        tpot_us / 1e3,
        engines * sequences * query.output / all_us * 1e6,
        prompt.error,
        math.hypot(kernel_error(stages), model.beyond_kernels.later),
        algorithm,
        _parts(stages, sum(model.transfers_us(work))),
        (max(times), min(times)),
        memory,
    )


def _parts(stages: list[Estimate], transfers_us: float) -> dict[str, float]:
    parts = {"transfer": transfers_us} if transfers_us else {}
    for stage in stages:
        for name, time_us in stage.parts.items():
            parts[name] = parts.get(name, 0.0) + time_us
    return parts


def _meets(target: Target, point: Point) -> bool:
    return point.ttft_ms <= target.ttft_ms and point.tpot_ms <= target.tpot_ms


def _rank(query: Query, point: Point) -> tuple[float, ...]:
    """Return a sort key that puts the best point first: within bounds, fast, few sequences, few ranks per stage."""
    if query.target.kind == LATENCY:
        # of one request; where sequences do not matter, more of them are better
        return point.latency_ms(query.output), -point.tokens_per_s, point.layout.tensor_parallel
    return not _meets(query.target, point), -point.tokens_per_s, point.sequences, point.layout.tensor_parallel
