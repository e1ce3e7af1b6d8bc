r"""The time of an engine step: what each stage of a layout computes and communicates, kernel by kernel.

A step computes :math:`n_d` tokens of decoding sequences, one of each, and chunks of prompts, R tokens in total. On the
fullest rank of a stage with T ranks, a layer takes

.. math:: T_l = T_{qkv} + T_{att} + T_o + T_{sum} + T_{gate,up} + T_{down} + T_{sum}

where :math:`T_{sum}` is an all-reduce of R rows with residual and norm, using the fastest algorithm for the message.
The first stage adds the embeddings and their sum, and the last one the head for the sampled rows. A stage sends R rows
to the next, within a node or to the next node, and the last one the sampled tokens to the first. Kernels are priced by
:mod:`shotcast.cost.inference`, sums by the algorithms' descriptions.

The consequence: a step with few rows takes the time of reading weights, keys and values; T ranks divide that time and
add two latencies per layer. P stages divide the layers and add none, but a token passes through all stages in sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shotcast.cost.inference import (
    FP8,
    MOST_WIDE_ROWS,
    KernelWork,
    decode_attention,
    product,
    product_kind,
    prompt_attention,
    rows_pass,
    sustained_kind,
)
from shotcast.layers.partition import partition
from shotcast.models.config import ModelConfig
from shotcast.models.memory_estimate import RankShare, largest_share, require_division
from shotcast.planner.calibration import FUSED_NORM, LINK, Calibration, rotation_bytes
from shotcast.planner.collectives import CollectiveCosts

_TOKEN_BYTES = 8


class BeyondKernels(NamedTuple):
    """The parts of error bars that kernel residuals do not explain, for a first token and for each later one."""

    first: float
    later: float


MEASURED_BEYOND_KERNELS = BeyondKernels(0.055, 0.027)
"""The measured values from engine runs on 1 to 4 H200, by the equation in ``research/engine_runs.py``: from
``benchmarks/data/h200/engine*.json``, to which no prediction is fitted."""


HOST_RESIDUAL = 0.3
"""The relative error bar of the host's part of a first token on a GPU: the standard deviation of two hosts of the same
kind, one of which took half as long again. A calibration covers only one of them."""


class Layout(NamedTuple):
    """Ranks per stage, and stages."""

    tensor_parallel: int
    pipeline_parallel: int

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def label(self) -> str:
        return f"TP{self.tensor_parallel} x PP{self.pipeline_parallel}"

    def __str__(self) -> str:
        return f"{self.tensor_parallel}x{self.pipeline_parallel}"


class StepWork(NamedTuple):
    """The tokens of a step."""

    decoding: int  # sequences that decode, a token each
    context: float  # tokens before these, on average
    prompts: tuple[tuple[int, int], ...]  # for each part of a prompt its tokens, and those before it
    sampled: int  # rows that are sampled

    @property
    def rows(self) -> int:
        return self.decoding + sum(tokens for tokens, _ in self.prompts)

    @property
    def sequences(self) -> int:
        return self.decoding + len(self.prompts)


@dataclass(slots=True)
class Estimate:
    """A predicted time, its parts, and its error."""

    parts: dict[str, float] = field(default_factory=dict)  # microseconds by name
    # the sum of the squares of each part's time times its residual. The same kernel is off alike in all layers, and
    # different kernels are off independently
    variance: float = 0.0
    saved_us: float = 0.0  # the microseconds less that it takes at the full clock of a GPU, which it has after a rest

    @property
    def time_us(self) -> float:
        """The predicted microseconds within a series of steps."""
        return sum(self.parts.values())

    @property
    def error_us(self) -> float:
        """One standard deviation, from the calibration's residuals."""
        return math.sqrt(self.variance)

    def add(self, name: str, time_us: float, residual: float, saved_us: float = 0.0) -> None:
        self.parts[name] = self.parts.get(name, 0.0) + time_us
        self.variance += (time_us * residual) ** 2
        self.saved_us += saved_us


def kernel_error(stages: Sequence[Estimate]) -> float:
    """Return the relative error of a step from the residuals of its kernels."""
    return sum(stage.error_us for stage in stages) / sum(stage.time_us for stage in stages)


def layer_products(model: ModelConfig, share: RankShare) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each product in a layer, on a rank with this share."""
    queries, keys = share.heads * model.head_dim, share.kv_heads * model.head_dim
    return {
        "qkv": (queries + 2 * keys, model.hidden),
        "output": (model.hidden, queries),
        "gate_up": (2 * share.columns, model.hidden),
        "down": (model.hidden, share.columns),
    }


def crossings(layout: Layout, gpus_per_node: int) -> list[bool]:
    """Return whether each stage crosses nodes to the next one (or the last to the first) at any rank."""
    tensor, stages = layout.tensor_parallel, layout.pipeline_parallel
    nodes = [[(stage * tensor + rank) // gpus_per_node for rank in range(tensor)] for stage in range(stages)]
    return [here != nodes[(stage + 1) % stages] for stage, here in enumerate(nodes)]


class Priced(NamedTuple):
    """The time of a kernel, or of several with the same error."""

    time_us: float  # by the constants of its kind, where such kernels run without a pause
    residual: float  # of the kind, as a part of the time
    saved_us: float = 0.0  # the part of ``time_us`` that a GPU saves at its full clock, which it has after a rest


def in_a_row(rested: Priced, calibration: Calibration, work: KernelWork, fp8: bool) -> Priced:
    r"""Price a product of many rows that runs among others like it.

    Arithmetic draws more power than a GPU can sustain, so the clock drops, and the time is at least the arithmetic time
    of products measured back to back, with separate constants:

    .. math:: T = \max(T_{rested}, f + Y / y), \quad saved = T - T_{rested}

    Products that read more than they compute are not slower back to back, since memory has a separate clock. Without
    such measurements both times are the same.
    """
    sustained = calibration.kinds.get(sustained_kind(fp8))
    if sustained is None:
        return rested
    time_us = sustained.cost.time_us(KernelWork(0.0, work.second))
    if time_us <= rested.time_us:
        return rested
    return Priced(time_us, sustained.residual, time_us - rested.time_us)


class StepModel:
    """Predicts the steps of a model in a layout, on GPUs. Raises ConfigError if the model cannot be divided that way,
    or there are no FP8 constants for this GPU.

    Args:
        quantization: ``fp8`` for products of layers in FP8; "" for bfloat16.
        algorithm: the algorithm of sums; ``auto`` for our fastest.
        kv_item: bytes of a key or value, if different from an activation's.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        calibration: Calibration,
        collectives: CollectiveCosts,
        quantization: str = "",
        algorithm: str = "auto",
        kv_item: float | None = None,
    ):
        require_division(model, *layout)
        self.model, self.layout = model, layout
        # whether a stage and the next lie on different nodes; the last one is followed by the first
        self._crossings = crossings(layout, collectives.gpus_per_node)
        self.share = largest_share(model, layout.tensor_parallel)
        self._sides = layer_products(model, self.share)
        self._calibration, self._collectives = calibration, collectives
        self.itemsize = calibration.itemsize
        self._kv_item = kv_item or self.itemsize
        self._fp8, self._algorithm = quantization == "fp8", algorithm
        self._known: dict[StepWork, list[Estimate]] = {}
        self._layers = [len(part) for part in partition(model.layers, layout.pipeline_parallel)]

    beyond_kernels = MEASURED_BEYOND_KERNELS
    """The parts of error bars not explained by kernels."""

    def stages(self, work: StepWork) -> list[Estimate]:
        """Return the time of each stage of a step, without transfers between stages."""
        known = self._known.get(work)
        if known is None:
            known = self._known[work] = self._stages(work)
        return known

    def transfers_us(self, work: StepWork) -> list[float]:
        """Return the microseconds in which each stage's output reaches the next.

        The output is the rows of the step or, from the last stage to the first, the sampled tokens; a single stage
        sends nothing.
        """
        if len(self._crossings) == 1:
            return [0.0]
        rows_bytes, token_bytes = work.rows * self.model.hidden * self.itemsize, work.sampled * _TOKEN_BYTES
        near_us, far_us = (self._collectives.send(rows_bytes, crosses) for crosses in (False, True))
        between = [far_us if crosses else near_us for crosses in self._crossings[:-1]]
        return [*between, self._collectives.send(token_bytes, self._crossings[-1])]

    def host_us(self, work: StepWork) -> float:
        """Return the microseconds that rank 0's host takes for a step, besides its stage; graphs replay its layers."""
        begin = sum(before == 0 for _, before in work.prompts)
        return self._calibration.host.time_us(work.sequences, work.rows, begin)

    @property
    def client_us(self) -> float:
        """The microseconds of a request from the client to rank 0, plus its first token on the way back."""
        return self._calibration.host.client_us

    def first_token_error(self, works: Sequence[StepWork]) -> float:
        """Return the relative error of a first token, from the residuals of kernels and host.

        Args:
            works: the steps that produce it, the first of which waits for the host.
        """
        stages = [stage for work in works for stage in self.stages(work)]
        host_us = self.client_us + self.host_us(works[0]) if self.hides_host else 0.0
        error_us = math.hypot(sum(stage.error_us for stage in stages), HOST_RESIDUAL * host_us)
        return error_us / (sum(stage.time_us for stage in stages) + host_us)

    @property
    def hides_host(self) -> bool:
        """Return whether rank 0 enqueues steps ahead (on a GPU), rather than computing its stage itself (on a CPU)."""
        return self._calibration.host.hidden

    def _stages(self, work: StepWork) -> list[Estimate]:
        parts = {**self._mixer(work), **self._network(work.rows)}
        stages = []
        for number, layers in enumerate(self._layers):
            stage = Estimate()
            for name, price in parts.items():
                stage.add(name, layers * price.time_us, price.residual, layers * price.saved_us)
            if number == 0:
                self._embed(stage, work)
            if number == len(self._layers) - 1 and work.sampled:
                self._sample(stage, work)
            stages.append(stage)
        return stages

    def _kernel(self, kind: str, work: KernelWork) -> Priced:
        return Priced(self._calibration.time_us(kind, work), self._calibration.residual(kind))

    def _product(self, rows: int, outputs: int, inputs: int, fp8: bool) -> Priced:
        """Return the time and the residual of a product.

        Its kinds were fitted one by one, each from its first number of rows. More rows never take less time: if a kind
        begins below the previous one's end, the time stays at that end until it is exceeded.
        """
        few_rows = self._calibration.few_rows
        ends = [end for end in (1, few_rows) if end < rows]
        item = 1 if fp8 else self.itemsize
        rested = max(
            self._kernel(product_kind(each, fp8, few_rows), product(each, outputs, inputs, item))
            for each in (*ends, rows)
        )
        if rows <= few_rows:
            return rested
        return in_a_row(rested, self._calibration, product(rows, outputs, inputs, item), fp8)

    def _mixer(self, work: StepWork) -> Mapping[str, Priced]:
        """Return the time and the residual of each part of a layer except its network: attention, sums and norms."""
        parts = dict(self._heads(work))
        for name, price in self._sum_and_norm(work.rows).items():
            parts[name] = price._replace(time_us=2 * price.time_us)
        return parts

    def _heads(self, work: StepWork) -> Mapping[str, Priced]:
        """Return the time and the residual of each part of multi-head attention."""
        rows, share = work.rows, self.share
        parts = {
            "qkv": self._product(rows, *self._sides["qkv"], self._fp8),
            "attention": self._attention(work),
            "output": self._product(rows, *self._sides["output"], self._fp8),
        }
        if work.prompts:  # attention that only decodes turns queries and keys itself
            nbytes = rotation_bytes(rows, share.heads, share.kv_heads, self.model.head_dim, self.itemsize)
            parts["rotation"] = self._kernel("rows_pass", rows_pass(nbytes))
        return parts

    def _network(self, rows: int) -> Mapping[str, Priced]:
        """Return the time and the residual of each part of a dense feed-forward network."""
        columns = self.share.columns
        parts = {name: self._product(rows, *self._sides[name], self._fp8) for name in ("gate_up", "down")}
        if rows > self._calibration.few_rows:  # products of fewer rows have the activation in them
            nbytes = rows * columns * (2 * self.itemsize + (1 if self._fp8 else self.itemsize))
            parts["activation"] = self._kernel(f"rows_pass{FP8 * self._fp8}", rows_pass(nbytes))
        return parts

    def _attention(self, work: StepWork) -> Priced:
        share, model = self.share, self.model
        window = model.longest_window or math.inf
        context = min(work.context + 1, window)
        decoding = decode_attention(work.decoding, context, share.kv_heads, model.head_dim, self._kv_item)
        if not work.prompts:
            return self._kernel("decode_attention", decoding)
        parts = [(tokens, int(min(before, window))) for tokens, before in work.prompts]
        prompts = self._kernel("prompt_attention", prompt_attention(parts, share.heads, model.head_dim))
        # in the same kernel, keys and values of those that decode are read besides
        read_us = 1e6 * decoding.first / self._calibration.kinds["decode_attention"].cost.first_rate
        return prompts._replace(time_us=prompts.time_us + read_us)

    def _sum_and_norm(self, rows: int) -> dict[str, Priced]:
        nbytes = rows * self.model.hidden * self.itemsize
        # more rows are given to products in FP8, which the norm makes
        fp8 = FP8 if self._fp8 and rows > MOST_WIDE_ROWS else ""
        if self.layout.tensor_parallel == 1:
            return {"norm": self._norm(rows, fp8)}
        return self._fused(nbytes, self._summed(nbytes), fp8)

    def _fused(self, nbytes: int, summed: Priced, fp8: str) -> dict[str, Priced]:
        """Return the prices of a sum and of its fused residual and norm.

        The sum's error counts if the sum bounds the call, and the fused call's error always counts.
        """
        known = self._calibration.fused_norms[f"{FUSED_NORM}{fp8}"]
        call_us = known.cost.time_us(nbytes, summed.time_us)
        beyond_us, error_us = call_us - summed.time_us, known.residual * call_us
        if call_us > summed.time_us + known.cost.beyond_us:
            summed = summed._replace(residual=0.0)
        if beyond_us > 0:
            return {"all_reduce": summed, "norm": Priced(beyond_us, error_us / beyond_us)}
        both = math.hypot(summed.residual, error_us / call_us) if call_us else 0.0
        return {"all_reduce": summed._replace(residual=both), "norm": Priced(0.0, 0.0)}

    def _norm(self, rows: int, fp8: str) -> Priced:
        """Return the price of the residual add and the norm on one rank."""
        elements = rows * self.model.hidden
        return self._kernel(f"norm{fp8}", rows_pass(elements * (3 * self.itemsize + (1 if fp8 else self.itemsize))))

    def _summed(self, nbytes: int) -> Priced:
        summed = self._collectives.all_reduce(nbytes, self.layout.tensor_parallel, self.itemsize, self._algorithm)
        return Priced(summed.time_us, self._calibration.residual(LINK))

    def _embed(self, stage: Estimate, work: StepWork) -> None:
        nbytes = work.rows * self.model.hidden * self.itemsize
        stage.add("embedding", *self._kernel("rows_pass", rows_pass(2 * nbytes)))
        if self.layout.tensor_parallel > 1:
            stage.add("embedding", *self._summed(nbytes))

    def _sample(self, stage: Estimate, work: StepWork) -> None:
        rows, ranks = work.sampled, self.layout.tensor_parallel
        stage.add("head", *self._product(rows, self.share.words, self.model.hidden, fp8=False))
        logits = rows * self.model.vocab
        if ranks > 1:
            stage.add(
                "head", self._collectives.all_gather(logits * self.itemsize, ranks), self._calibration.residual(LINK)
            )
        # the parts are joined as float32, with the largest of each row, which greedy sampling takes
        stage.add("sampling", *self._kernel("logits", rows_pass(logits * (self.itemsize + 4))))
