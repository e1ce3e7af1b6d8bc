"""Plans of models with experts: their layouts, steps and memory, by what the planner has for dense models.

The ranks of a stage divide heads and dense layers, or each has sequences of its own and all of these whole. Either way
everything but the experts is priced and counted as a dense model in the layout :attr:`ExpertLayout.dense`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from experts.latent_attention import LatentLayer
from experts.layer import ExpertLayer, ExpertSharing, expert_weight_bytes, require_sharing, row_width
from experts.model import ExpertModel
from shotcast.collectives.algorithm import LIBRARY
from shotcast.errors import ConfigError
from shotcast.layers.partition import partition
from shotcast.planner import plan as dense_plans
from shotcast.planner.calibration import Calibration
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.plan import Memory, Plan, Point, Query, best_of, points_of, require_place, require_served
from shotcast.planner.step import Estimate, Layout, Priced, StepModel, StepWork, crossings


class ExpertLayout(NamedTuple):
    """Ranks of a stage, stages, and the division of experts between the ranks of a stage.

    Attributes:
        tensor_parallel: the ranks of a stage.
        pipeline_parallel: the stages.
        expert_parallel: the groups of a stage's ranks that have different experts.
        dp_attention: each rank of a stage has sequences of its own, and computes their attention alone; the ranks of a
            stage share nothing but the experts.
    """

    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int = 1
    dp_attention: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks of all stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def replicas(self) -> int:
        """The parts of an engine that have sequences of their own."""
        return self.tensor_parallel if self.dp_attention else 1

    @property
    def dense(self) -> Layout:
        """The layout of everything but the experts, as one replica has it."""
        return Layout(self.tensor_parallel // self.replicas, self.pipeline_parallel)

    @property
    def experts(self) -> ExpertSharing:
        """The division of experts."""
        return ExpertSharing(self.tensor_parallel, self.expert_parallel, self.dp_attention)

    @property
    def label(self) -> str:
        """The layout in words."""
        experts = f" x EP{self.expert_parallel}" if self.expert_parallel > 1 else ""
        apart = " with data-parallel attention" if self.dp_attention else ""
        return f"TP{self.tensor_parallel} x PP{self.pipeline_parallel}{experts}{apart}"

    def __str__(self) -> str:
        experts = f" ep{self.expert_parallel}" if self.expert_parallel > 1 else ""
        return f"{self.tensor_parallel}x{self.pipeline_parallel}{experts}{' dp' if self.dp_attention else ''}"


class ExpertStepModel(StepModel):
    """Predicts steps of a model with experts; the arguments are those of :class:`StepModel`.

    With ``dp_attention``, the tokens of a step are those of each rank, of which all have as many.

    Raises:
        ConfigError: the model cannot be divided so, or nothing is known of FP8 on this GPU.
    """

    def __init__(
        self,
        model: ExpertModel,
        layout: ExpertLayout,
        calibration: Calibration,
        collectives: CollectiveCosts,
        quantization: str = "",
        algorithm: str = "auto",
        kv_item: int | None = None,
    ):
        super().__init__(model, layout.dense, calibration, collectives, quantization, algorithm, kv_item)
        self._crossings = crossings(layout, collectives.gpus_per_node)
        parts = partition(model.layers, layout.pipeline_parallel)
        self._expert_layers = [model.expert_layers(part) for part in parts]
        self._experts = ExpertLayer(model, layout.experts, calibration, self._product, collectives, self._fp8)
        self._latent: LatentLayer | None = None
        if model.latent is not None:
            ranks = layout.dense.tensor_parallel
            self._latent = LatentLayer(model, model.latent, ranks, calibration, self._product, self._fp8, self._kv_item)

    def _heads(self, work: StepWork) -> dict[str, Priced]:
        if self._latent is None:
            return super()._heads(work)
        return self._latent.parts(work.decoding, work.context, work.prompts, work.rows)

    def _stages(self, work: StepWork) -> list[Estimate]:
        mixer, dense, experts = self._mixer(work), self._network(work.rows), self._experts.parts(work.rows)
        stages = []
        for number, (layers, with_experts) in enumerate(zip(self._layers, self._expert_layers, strict=True)):
            stage = Estimate()
            for count, parts in ((layers, mixer), (layers - with_experts, dense), (with_experts, experts)):
                for name, price in parts.items() if count else ():
                    stage.add(name, count * price.time_us, price.residual, count * price.saved_us)
            if number == 0:
                self._embed(stage, work)
            if number == len(self._layers) - 1 and work.sampled:
                self._sample(stage, work)
            stages.append(stage)
        return stages


def layouts(query: Query) -> Iterator[tuple[ExpertLayout, int]]:
    """Yield every layout of one engine, and how many such engines the GPUs hold."""
    for dense, engines in dense_plans.layouts(query):
        yield ExpertLayout(*dense), engines
        for groups in range(2, dense.tensor_parallel + 1):
            if dense.tensor_parallel % groups == 0:
                yield ExpertLayout(*dense, groups), engines
        if dense.tensor_parallel > 1:
            yield ExpertLayout(*dense, dense.tensor_parallel, dp_attention=True), engines


def memory_of(query: Query, layout: ExpertLayout, itemsize: int = 2) -> Memory:
    """Return the memory of the rank that has most, on a GPU of the cluster.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    model, dense = query.model, dense_plans.memory_of(query, layout.dense, itemsize)
    require_sharing(model, layout.experts)
    columns = dense_plans.largest_share(model, layout.dense.tensor_parallel).columns
    beyond = max(0, row_width(model, layout.experts, query.limits.batch_tokens) - 3 * columns)
    per_token = dense.per_token
    if model.latent is not None:
        layers = -(-model.layers // layout.pipeline_parallel)
        per_token = layers * (model.latent.kv_rank + model.latent.position) * (query.limits.kv_item or itemsize)
    return replace(
        dense,
        weights=expert_weight_bytes(model, layout.experts, itemsize, layout.pipeline_parallel, query.quantization),
        per_row=dense.per_row + 2 * beyond * itemsize,
        per_token=per_token,
    )


def plan(query: Query, calibration: Calibration, candidates: Iterable[tuple[ExpertLayout, int]] | None = None) -> Plan:
    """Return the plan of a query whose model has experts, as :func:`shotcast.planner.plan.plan` does of others.

    The sequences of a point are those of each rank where these have sequences of their own.
    """
    constants = calibration.scaled_to(query.cluster.gpu).of_ranks(query.gpus)
    collectives = CollectiveCosts.on(query.cluster, constants.link)
    limits = query.limits
    points: list[Point] = []
    refused: dict[str, str] = {}
    for layout, engines in layouts(query) if candidates is None else candidates:
        try:
            require_place(query, layout)
            if limits.algorithm != LIBRARY:
                require_served(layout.dense, collectives)
            model = ExpertStepModel(
                query.model, layout, constants, collectives, query.quantization, limits.algorithm, limits.kv_item
            )
            found = points_of(query, model, engines, memory_of(query, layout, constants.itemsize), collectives)
            points += [
                replace(point, layout=layout, tokens_per_s=layout.replicas * point.tokens_per_s) for point in found
            ]
        except ConfigError as error:
            refused[f"{layout}" if engines == 1 else f"{layout} x {engines}"] = str(error)
    return best_of(query, calibration, points, refused)
