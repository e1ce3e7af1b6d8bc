"""Experts in plans: work against simulated routers, what never gets faster, memory, layouts, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plan_experts
import pytest
from experts.layer import all_to_all_us, expected_experts, fullest_group, groups_of_row
from experts.model import EXPERT_PRESETS, ExpertModel, Experts
from experts.plan import ExpertLayout, ExpertStepModel, layouts, memory_of, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.models.presets import preset
from shotcast.planner.calibration import load
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.plan import Plan, Query, Target
from shotcast.planner.step import Layout, StepModel, StepWork

H200 = load("NVIDIA H200")
DGX = cluster.load("dgx-h200")
MIXTRAL, QWEN = EXPERT_PRESETS["mixtral-8x7b"], EXPERT_PRESETS["qwen3-30b-a3b"]
DEEPSEEK = EXPERT_PRESETS["deepseek-v3"]
SHARED = replace(QWEN, layers=6, experts=Experts(60, 4, 1408, 5632, True, frozenset({0, 1})))
"""The experts of Qwen1.5-MoE-A2.7B, behind two dense layers."""


def step_model(
    model: ExpertModel, layout: ExpertLayout, quantization: str = "", gpus_per_node: int = 8
) -> ExpertStepModel:
    costs = CollectiveCosts.on(replace(DGX, gpus_per_node=gpus_per_node), H200.link)
    return ExpertStepModel(model, layout, H200, costs, quantization)


def decode(sequences: int) -> StepWork:
    return StepWork(sequences, 1000.0, (), sequences)


def step_us(model: ExpertModel, layout: ExpertLayout, work: StepWork, quantization: str = "") -> float:
    return sum(stage.time_us for stage in step_model(model, layout, quantization).stages(work))


def parts(model: ExpertModel, layout: ExpertLayout, work: StepWork) -> dict[str, float]:
    (stage,) = step_model(model, layout).stages(work)
    return stage.parts


def routed(experts: Experts, rows: int, draws: int) -> np.ndarray:
    """Return for each draw and expert the rows that a router which likes all experts alike sends there."""
    scores = np.random.default_rng(0).random((draws, rows, experts.number))
    chosen = np.argsort(scores, axis=2)[:, :, : experts.per_token]
    counts = np.zeros((draws, experts.number))
    for draw in range(draws):
        counts[draw] = np.bincount(chosen[draw].ravel(), minlength=experts.number)
    return counts


@pytest.mark.parametrize("model", [MIXTRAL, QWEN])
@pytest.mark.parametrize("rows", [1, 3, 16, 64])
def test_work_is_that_of_simulated_routers(model: ExpertModel, rows: int) -> None:
    experts = model.experts
    counts = routed(experts, rows, 400)
    assert expected_experts(experts.number, experts.per_token, rows) == pytest.approx(
        (counts > 0).sum(1).mean(), rel=0.02
    )
    for groups in (1, 2, 8):
        of_group = counts.reshape(len(counts), groups, -1)
        work = fullest_group(model, groups, rows)
        assert work.mean_rows == pytest.approx(of_group.sum(2).mean())
        assert work.rows == pytest.approx(of_group.sum(2).max(1).mean(), rel=0.15)
        assert work.experts == pytest.approx((of_group > 0).sum(2).max(1).mean(), rel=0.15)


def test_groups_that_a_row_goes_to() -> None:
    experts = QWEN.experts
    first = np.argsort(np.random.default_rng(1).random((4000, experts.number)), axis=1)[:, : experts.per_token]
    met = np.mean([len(set(row // 16)) for row in first])
    assert groups_of_row(QWEN, 8) == pytest.approx(met, rel=0.02)
    assert groups_of_row(QWEN, 1) == pytest.approx(1)
    assert groups_of_row(MIXTRAL, 8) == pytest.approx(2)
    # of eight parts a token of DeepSeek-V3 takes four, and no more than its eight experts of wide groups
    assert 3.5 < groups_of_row(DEEPSEEK, 8) < 4
    assert 7 < groups_of_row(DEEPSEEK, 64) < 8


models = st.builds(
    lambda number, part, width, shared: replace(
        QWEN, experts=Experts(number, max(1, round(number * part)), 64 * width, 64 * shared)
    ),
    st.integers(2, 160),
    st.floats(0, 1),
    st.integers(1, 40),
    st.integers(0, 20),
)


@given(models, st.sampled_from([(1, 1), (4, 1), (4, 2), (2, 2)]), st.integers(1, 600), st.booleans())
@settings(max_examples=60, deadline=None)
def test_more_of_anything_never_takes_less(model: ExpertModel, ranks: tuple[int, int], rows: int, fp8: bool) -> None:
    layout, quantization = ExpertLayout(ranks[0], 1, ranks[1]), "fp8" if fp8 else ""
    time_us = step_us(model, layout, decode(rows), quantization)
    assert step_us(model, layout, decode(rows + 7), quantization) >= time_us * (1 - 1e-9)
    experts = model.experts
    if experts.per_token < experts.number:
        more = replace(model, experts=replace(experts, per_token=experts.per_token + 1))
        assert step_us(more, layout, decode(rows), quantization) >= time_us * (1 - 1e-9)
    wider = replace(model, experts=replace(experts, intermediate=2 * experts.intermediate))
    assert step_us(wider, layout, decode(rows), quantization) > time_us


def test_experts_that_all_tokens_take_are_a_dense_network() -> None:
    """With one group and as many choices as experts, what is read and computed is that of a network as wide as all."""
    dense = replace(preset("llama-3.1-8b"), intermediate=2 * 4096)
    fields = {name: getattr(dense, name) for name in type(dense).__dataclass_fields__}
    model = ExpertModel(**fields, experts=Experts(2, 2, 4096))
    costs = CollectiveCosts.on(DGX, H200.link)
    for rows in (16, 512):
        (whole,) = StepModel(dense, Layout(1, 1), H200, costs).stages(decode(rows))
        time_us = parts(model, ExpertLayout(1, 1), decode(rows))["experts"]
        network_us = sum(whole.parts.get(name, 0.0) for name in ("gate_up", "down", "activation"))
        # and besides, rows are sorted by experts and added up
        assert 1.02 < time_us / network_us < 1.2


def test_a_few_tokens_read_a_few_experts() -> None:
    """A token of Mixtral reads two experts of eight; from some tens on all are read, and time grows little."""
    times = {rows: parts(MIXTRAL, ExpertLayout(1, 1), decode(rows))["experts"] for rows in (1, 2, 32, 64)}
    assert 1.6 < times[2] / times[1] < 1.9
    assert 3.5 < times[32] / times[1] < 4.1
    assert times[64] / times[32] < 1.1
    weights_us = 32 * 2 * 3 * 4096 * 14336 * 2 / (H200.gpu.memory_bw_gbps * 1e3)
    assert weights_us < times[1] < 1.3 * weights_us


def test_layers_of_stages() -> None:
    """Dense layers at the beginning are the first stage's, with their own network."""
    stages = step_model(SHARED, ExpertLayout(1, 3)).stages(decode(8))
    assert ["experts" in stage.parts for stage in stages] == [False, True, True]
    assert ["gate_up" in stage.parts for stage in stages] == [True, False, False]
    assert "shared" in stages[1].parts
    (all_layers,) = step_model(SHARED, ExpertLayout(1, 1)).stages(decode(8))
    assert all_layers.parts["experts"] == pytest.approx(2 * stages[1].parts["experts"])
    assert all_layers.parts["qkv"] == pytest.approx(3 * stages[1].parts["qkv"])


def test_attention_of_each_rank_alone() -> None:
    """With sequences of its own, a rank exchanges rows instead of sums, and all ranks' rows meet at the experts."""
    together = parts(QWEN, ExpertLayout(8, 1, 8), decode(64))
    apart = parts(QWEN, ExpertLayout(8, 1, 8, dp_attention=True), decode(8))
    assert "all_to_all" not in together
    assert "all_reduce" not in apart
    assert apart["experts"] == pytest.approx(together["experts"], rel=0.01)
    assert apart["qkv"] > 2 * together["qkv"], "each rank has all heads"
    far = step_model(QWEN, ExpertLayout(8, 1, 8, dp_attention=True), gpus_per_node=4).stages(decode(8))[0].parts
    assert far["all_to_all"] > 1.5 * apart["all_to_all"]
    # there and back, a copy for each group that has one of a row's experts, and as long as the fullest rank's
    work = fullest_group(QWEN, 8, 64)
    sent = 8 * groups_of_row(QWEN, 8) * 2048 * 2 * work.rows / work.mean_rows
    each_us = all_to_all_us(CollectiveCosts.on(DGX, H200.link), sent, 8)
    assert apart["all_to_all"] == pytest.approx(48 * 2 * each_us)
    assert each_us > H200.link.fixed_us + H200.link.step_us + sent * 7 / 8 / (H200.link.bw_gbps * 1e3)


def test_shared_experts_of_ranks_with_sequences_of_their_own() -> None:
    """They are whole on each rank, in memory and in time."""
    layouts = [ExpertLayout(4, 1, 4, dp_attention=apart) for apart in (False, True)]
    together, apart = (parts(SHARED, layout, decode(64))["shared"] for layout in layouts)
    assert apart > 2 * together
    query = Query(SHARED, "x", "", DGX, 8, 512, 128)
    weights = [memory_of(query, layout).weights for layout in layouts]
    shared = 4 * 3 * SHARED.hidden * 5632 * 2
    without = replace(query, model=replace(SHARED, experts=replace(SHARED.experts, shared=0, shared_gate=False)))
    assert weights[1] - memory_of(without, layouts[1]).weights == pytest.approx(shared, rel=1e-3)
    assert weights[0] - memory_of(without, layouts[0]).weights == pytest.approx(shared / 4, rel=1e-3)


def test_rows_of_experts_take_memory() -> None:
    """A row of a step is there for each of its experts: thrice with its width, twice with that of the residual."""
    query = Query(QWEN, "x", "", DGX, 8, 512, 128)
    # queries, keys and values and three rows; eight experts a row; each value twice, in bfloat16
    expected = 2 * 2 * (3 * 2048 + (32 + 2 * 4) * 128 + 8 * (2 * 2048 + 3 * 768))
    assert memory_of(query, ExpertLayout(1, 1)).per_row == expected


def test_latent_attention_keeps_one_latent_on_every_rank() -> None:
    """DeepSeek-V3 keeps 576 values of a token in a layer, however many ranks share the heads."""
    query = Query(DEEPSEEK, "deepseek-v3", "fp8", DGX, 8, 512, 128)
    for ranks in (1, 8):
        assert memory_of(query, ExpertLayout(ranks, 1)).per_token == 61 * 576 * 2
    assert memory_of(query, ExpertLayout(2, 4)).per_token == 16 * 576 * 2
    whole, shared = memory_of(query, ExpertLayout(1, 1)).weights, memory_of(query, ExpertLayout(8, 1)).weights
    assert whole == pytest.approx(DEEPSEEK.parameters + DEEPSEEK.vocab * DEEPSEEK.hidden * 2, rel=0.01)
    assert shared == pytest.approx(whole / 8, rel=0.04), "the latents' own products are on every rank"


def test_latent_attention_is_bound_by_reading_or_arithmetic() -> None:
    """All heads read the latents once, so that eight ranks save nothing of it; with 128 heads arithmetic is more."""

    def attention(ranks: int, sequences: int, context: float) -> float:
        return parts(DEEPSEEK, ExpertLayout(ranks, 1), StepWork(sequences, context, (), sequences))["attention"] / 61

    read_us = 128 * 16385 * 576 * 2 / (H200.kinds["decode_attention"].cost.first_rate * 1e3)
    assert attention(8, 128, 16384.0) == pytest.approx(read_us, rel=0.05)
    assert attention(1, 128, 16384.0) > 2 * read_us
    assert attention(1, 128, 16384.0) == pytest.approx(2 * attention(2, 128, 16384.0))
    prompt = StepWork(0, 0.0, ((2048, 0),), 1)
    later = StepWork(0, 0.0, ((2048, 6144),), 1)
    first, second = (parts(DEEPSEEK, ExpertLayout(8, 1), work) for work in (prompt, later))
    assert second["qkv"] > 1.2 * first["qkv"], "latents of tokens before are expanded again"
    assert second["attention"] > 4 * first["attention"]


@pytest.mark.parametrize("name", sorted(EXPERT_PRESETS))
@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_expert_parallel_divides_the_memory_of_experts(name: str, quantization: str) -> None:
    query = Query(EXPERT_PRESETS[name], name, quantization, DGX, 8, 512, 128)

    def held(*layout: int, dp: bool = False) -> int:
        return memory_of(query, ExpertLayout(*layout, dp_attention=dp)).weights

    model = query.model
    assert isinstance(model, ExpertModel)
    item = 1 if quantization else 2
    routed = (
        model.expert_layers(range(model.layers))
        * model.experts.number
        * 3
        * model.hidden
        * model.experts.intermediate
        * item
    )
    if not quantization:
        assert held(1, 1) == model.parameters * 2
    for ranks in (2, 4, 8):
        for groups in (1, 2, ranks):
            # scales of outputs are whole where columns are divided, and 12 blocks of 64 columns not even for 8 ranks
            even = model.experts.intermediate // 64 % (ranks // groups) == 0
            assert held(ranks, 1, groups) / held(ranks, 1, ranks) == pytest.approx(1 if even else 1.32, rel=0.01)
        apart = held(ranks, 1, ranks, dp=True)
        assert held(1, 1) - apart == pytest.approx(routed * (1 - 1 / ranks), rel=0.01), "all but experts are whole"
    assert held(1, 4) == pytest.approx(held(1, 1) / 4, rel=0.1)


def test_all_layouts_are_tried() -> None:
    query = Query(MIXTRAL, "mixtral-8x7b", "", DGX, 8, 512, 128)
    found = {layout for layout, _ in layouts(query)}
    assert {
        ExpertLayout(8, 1),
        ExpertLayout(8, 1, 2),
        ExpertLayout(8, 1, 8),
        ExpertLayout(8, 1, 8, True),
        ExpertLayout(4, 2, 4, True),
    } <= found
    assert not any(layout.dp_attention and layout.expert_parallel != layout.tensor_parallel for layout in found)
    assert str(ExpertLayout(8, 1, 8, True)) == "8x1 ep8 dp"


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (MIXTRAL, ExpertLayout(8, 1, 3), "8 ranks do not divide into 3 groups"),
        (MIXTRAL, ExpertLayout(16, 1, 16), "8 experts cannot be divided between 16 groups"),
        (MIXTRAL, ExpertLayout(8, 1, 2, True), "expert parallel must be 8, not 2"),
        (MIXTRAL, ExpertLayout(1, 40), "cannot be divided between 40 stages"),
    ],
)
def test_refused_layouts(model: ExpertModel, layout: ExpertLayout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step_model(model, layout)
    with pytest.raises(ConfigError, match=message):
        memory_of(Query(model, "x", "", DGX, 8, 512, 128), layout)


def planned(name: str, gpus: int, target: str = "throughput", where: str = "dgx-h200") -> Plan:
    query = Query(EXPERT_PRESETS[name], name, "fp8", cluster.load(where), gpus, 1024, 256, Target.parse(target))
    return plan(query, H200)


def test_plans_of_experts() -> None:
    found = planned("qwen3-235b-a22b", 8)
    assert found.best is not None
    assert found.best.layout.dp_attention, "with many sequences, whole heads and wide products"
    alone = planned("qwen3-235b-a22b", 8, "latency").best
    assert alone is not None
    assert alone.layout == ExpertLayout(8, 1)
    assert found.best.tokens_per_s > 10 * alone.tokens_per_s
    # all sequences have at most their own speed, and arithmetic has its peak
    model = EXPERT_PRESETS["qwen3-235b-a22b"]
    for point in found.points:
        conc = point.sequences * point.engines * point.layout.replicas
        assert point.tokens_per_s <= conc * 1e3 / point.tpot_ms * 1.01 * 256 / 255
        flops = 2 * (model.active_parameters - 2 * model.vocab * model.hidden)
        assert point.tokens_per_s_per_gpu * (1 + 1023 / 256) * flops < 1979e12
        memory = point.memory
        held = memory.weights + memory.steps(point.sequences) + memory.per_token * 1280 * point.sequences
        assert held <= memory.usable
    assert {ExpertLayout(8, 1), ExpertLayout(8, 1, 8), ExpertLayout(8, 1, 8, True)} <= {
        point.layout for point in found.points
    }


def test_wide_expert_parallel_over_nodes() -> None:
    """Attention of each rank alone needs no sums, so that its ranks may be on more nodes than our sums serve."""
    found = planned("qwen3-235b-a22b", 64)
    assert ExpertLayout(64, 1, 64, True) in {point.layout for point in found.points}
    assert "native kernels serve up to" in found.refused["64x1"]


def test_the_sequences_of_a_point_are_those_of_each_rank() -> None:
    """Two ranks with sequences of their own give twice the tokens that a step of one rank gives."""
    found = planned("qwen3-30b-a3b", 2)
    apart = ExpertLayout(2, 1, 2, True)
    point = next(point for point in found.points if point.layout == apart and point.sequences == 64)
    model = ExpertStepModel(found.query.model, apart, H200, CollectiveCosts.on(DGX, H200.link), "fp8")
    (stage,) = model.stages(StepWork(64, 1024 + 256 / 2, (), 64))
    assert sum(point.parts.values()) == pytest.approx(stage.time_us)
    assert 0.5 < point.tokens_per_s * stage.time_us / (2 * 64 * 1e6) < 1, "prompts take the rest of the time"
    assert point.gpus == 2
    assert point.algorithm == ""


def test_the_command_prints_the_best_of_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    plan_experts.main(["--model", "mixtral-8x7b", "--gpus", "2", "--target", "latency"])
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert {row.split("|")[1].strip() for row in rows[1:]} >= {"2x1", "2x1 ep2", "2x1 ep2 dp", "1x2"}
    with pytest.raises(ConfigError, match="accepted: a preset"):
        plan_experts.main(["--model", "deepseek-v2"])


PROMPTS = StepWork(0, 0.0, ((512, 0),) * 4, 4)


@pytest.mark.parametrize("quantization", ["", "fp8"])
@pytest.mark.parametrize(("model", "many_rows"), [(MIXTRAL, True), (DEEPSEEK, False)])
def test_products_of_many_rows_take_longer_in_a_row(model: ExpertModel, many_rows: bool, quantization: str) -> None:
    """2048 rows are 512 for each expert of Mixtral, and 64 for each of DeepSeek-V3's, which take kernels of few."""
    (stage,) = step_model(model, ExpertLayout(1, 1), quantization).stages(PROMPTS)
    kinds = {kind: fit for kind, fit in H200.kinds.items() if not kind.startswith("sustained")}
    rested_costs = replace(H200, kinds=kinds)
    costs = CollectiveCosts.on(DGX, H200.link)
    (rested,) = ExpertStepModel(model, ExpertLayout(1, 1), rested_costs, costs, quantization).stages(PROMPTS)
    assert rested.saved_us == 0
    assert stage.time_us - stage.saved_us == pytest.approx(rested.time_us)
    assert (stage.parts["experts"] > 1.01 * rested.parts["experts"]) == many_rows
    assert stage.parts["qkv"] > 1.01 * rested.parts["qkv"]
