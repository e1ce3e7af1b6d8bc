"""The model of a step counts what a model computes, and no more."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from gpu_calibration.least_squares import Fit
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.collectives.registry import registered
from shotcast.cost.collective import LinkCost
from shotcast.cost.inference import DECODE_BEGINNING, KINDS, FusedNormCost, HostCost, KernelCost
from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.models.presets import PRESETS, preset
from shotcast.planner.calibration import FUSED_NORMS, Calibration, load
from shotcast.planner.collectives import CollectiveCosts, may_be_chosen
from shotcast.planner.step import HOST_RESIDUAL, Layout, StepModel, StepWork, kernel_error
from shotcast.wire import NodeShape

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "data" / "h200"
MODELS = ["llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b", "smollm2-135m"]


def constants(only: str, rate: str, value: float) -> Calibration:
    """Return a calibration by which all kinds take no time but those that begin so, by one of their two rates."""
    free = Fit(KernelCost(0.0, math.inf, math.inf), 0.0, 0.0, 1)
    rates = {"first_rate": math.inf, "second_rate": math.inf} | {rate: value}
    counted = free._replace(cost=KernelCost(0.0, **rates))
    kinds = {kind: counted if kind.startswith(only) else free for kind in KINDS}
    fused_norms = {
        kind: Fit(FusedNormCost(0.0, 0.0, value if kind.startswith(only) else math.inf), 0.0, 0.0, 1)
        for kind in FUSED_NORMS
    }
    return Calibration("NVIDIA H200", kinds, LinkCost(0.0, 0.0, math.inf), 0.0, (), {}, fused_norms=fused_norms)


@cache
def costs() -> tuple[Calibration, CollectiveCosts]:
    calibration = load("NVIDIA H200")
    return calibration, CollectiveCosts.on(cluster.load("h200x8"), calibration.link)


def decode(sequences: int, context: float = 512) -> StepWork:
    return StepWork(sequences, context, (), sequences)


def total_us(model: StepModel, work: StepWork) -> float:
    return sum(stage.time_us for stage in model.stages(work))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_reads_every_matrix_once(name: str) -> None:
    """Microseconds of reading at 1e9 bytes a second are kilobytes; the sizes of matrices come from the checkpoint."""
    model = preset(name)
    calibration = constants("product", "first_rate", 1.0)
    shapes = model.tensors()
    embeddings = 0 if model.tied else math.prod(shapes[f"{model.names.embeddings}.weight"])
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2) - embeddings
    one_rank = StepModel(model, Layout(1, 1), calibration, costs()[1])
    assert total_us(one_rank, decode(4)) * 1e3 == pytest.approx(2 * matrices, rel=1e-9)
    stages = StepModel(model, Layout(1, 3), calibration, costs()[1])
    assert total_us(stages, decode(4)) * 1e3 == pytest.approx(2 * matrices, rel=1e-9)
    quantised = StepModel(model, Layout(1, 1), calibration, costs()[1], "fp8")
    head = model.vocab * model.hidden
    assert total_us(quantised, decode(4)) * 1e3 == pytest.approx(matrices + head, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_takes_two_operations_a_weight_and_token(name: str) -> None:
    model = preset(name)
    calibration = constants("product", "second_rate", 1.0)
    shapes = model.tensors()
    vocab = math.prod(shapes[f"{model.names.embeddings}.weight"])
    layers = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2) - vocab * (1 if model.tied else 2)
    one_rank = StepModel(model, Layout(1, 1), calibration, costs()[1])
    work = StepWork(0, 0, ((300, 0), (212, 100)), 2)
    # the head sees two rows, the last ones of the prompts
    assert total_us(one_rank, work) * 1e3 == pytest.approx(2 * 512 * layers + 2 * 2 * vocab, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_values_are_read_once(name: str) -> None:
    model = preset(name)
    one_rank = StepModel(model, Layout(1, 1), constants("decode", "first_rate", 1.0), costs()[1])
    begun = 101 + DECODE_BEGINNING  # those before it and its own, and the keys in whose time it begins
    expected = 5 * begun * 2 * model.layers * model.kv_heads * model.head_dim * 2
    assert total_us(one_rank, decode(5, 100)) * 1e3 == pytest.approx(expected, rel=1e-9)


names = st.sampled_from(sorted(PRESETS))
layouts = st.builds(lambda ranks, stages: Layout(ranks, stages), st.sampled_from([1, 2, 4, 8]), st.integers(1, 8))
works = st.builds(
    lambda decoding, context, prompts: StepWork(decoding, context, tuple(prompts), decoding + len(prompts)),
    st.integers(0, 512),
    st.integers(0, 4000),
    st.lists(st.tuples(st.integers(2, 2048), st.integers(0, 4000)), max_size=3),
).filter(lambda work: work.rows > 0)


@settings(max_examples=60, deadline=None)
@given(names, layouts, works)
def test_a_step_takes_some_time_with_an_error_below_it(name: str, layout: Layout, work: StepWork) -> None:
    model = StepModel(preset(name), layout, *costs())
    stages = model.stages(work)
    assert len(stages) == layout.pipeline_parallel
    for stage in stages:
        assert 0 < stage.time_us < 1e8
        assert 0 < stage.error_us < stage.time_us
        assert all(part > 0 for part in stage.parts.values())
    transfers_us = model.transfers_us(work)
    assert len(transfers_us) == len(stages)
    assert all(each > 0 for each in transfers_us) == (len(stages) > 1)


@settings(max_examples=30, deadline=None)
@given(names, layouts, st.integers(1, 200), st.integers(0, 3000))
def test_more_of_anything_takes_longer(name: str, layout: Layout, sequences: int, context: int) -> None:
    model = StepModel(preset(name), layout, *costs())
    base = total_us(model, StepWork(0, 0, ((sequences + 1, context),), 1))
    assert total_us(model, StepWork(0, 0, ((sequences + 1, context + 500),), 1)) >= base
    longer = [total_us(model, decode(sequences, length)) for length in (context, context + 512)]
    # a window hides what is beyond it
    assert longer[0] <= longer[1]


@settings(max_examples=40, deadline=None)
@given(names, layouts, st.sampled_from(["", "fp8"]), st.integers(1, 300), st.integers(1, 40))
def test_more_rows_take_no_less(name: str, layout: Layout, quantization: str, rows: int, more: int) -> None:
    """Kernels of one row, of few and of many were fitted one by one; where they meet, times do not fall."""
    model = StepModel(preset(name), layout, *costs(), quantization)
    assert total_us(model, decode(rows)) <= total_us(model, decode(rows + more))
    prompts = [total_us(model, StepWork(0, 0, ((tokens, 0),), 1)) for tokens in (rows + 1, rows + 1 + more)]
    assert prompts[0] <= prompts[1]


def test_more_rows_take_no_less_where_kernels_meet() -> None:
    model = StepModel(preset("llama-3.1-405b"), Layout(1, 8), *costs(), "fp8")
    for before, after in ((1, 2), (63, 65), (64, 65)):
        assert total_us(model, decode(before)) <= total_us(model, decode(after))


def test_hops_lie_within_nodes_or_between() -> None:
    calibration, collectives = costs()
    model = StepModel(preset("llama-3.1-70b"), Layout(4, 4), calibration, collectives)
    nbytes = 2 * 8192
    near_us, far_us = (collectives.send(nbytes, far) for far in (False, True))
    # two stages a node; the last one sends a token of 8 bytes to the first
    assert model.transfers_us(decode(1)) == [near_us, far_us, near_us, collectives.send(8, True)]
    on_one = StepModel(preset("llama-3.1-70b"), Layout(2, 4), calibration, collectives)
    assert on_one.transfers_us(decode(1)) == [near_us] * 3 + [collectives.send(8, False)]
    wide = StepModel(preset("llama-3.1-70b"), Layout(16, 2), calibration, collectives)
    assert wide.transfers_us(decode(1))[0] == far_us


def test_more_ranks_take_less_until_latency_counts() -> None:
    one, eight = (
        total_us(StepModel(preset("llama-3.1-70b"), Layout(ranks, 1), *costs()), decode(1)) for ranks in (1, 8)
    )
    assert 4 < one / eight < 8
    one, eight = (
        total_us(StepModel(preset("smollm2-135m"), Layout(ranks, 1), *costs()), decode(1)) for ranks in (1, 8)
    )
    assert eight > one / 2


def test_several_nodes_take_the_network() -> None:
    calibration, collectives = costs()
    model = StepModel(preset("llama-3.1-70b"), Layout(16, 1), calibration, collectives)
    near = StepModel(preset("llama-3.1-70b"), Layout(8, 1), calibration, collectives)
    assert model.stages(decode(1))[0].parts["all_reduce"] > 2 * near.stages(decode(1))[0].parts["all_reduce"]
    assert collectives.all_reduce(1 << 14, 16, 2).algorithm.startswith("nvrar")
    with pytest.raises(ConfigError, match="12 ranks are no whole number of nodes of 8 GPUs"):
        collectives.shape(12)
    with pytest.raises(ConfigError, match="no model of nvrar for 1x8 ranks"):
        collectives.all_reduce(1 << 14, 8, 2, "nvrar")
    assert collectives.all_reduce(1 << 14, 8, 2, "ring").algorithm == "ring"


@pytest.mark.parametrize(
    ("beyond_us", "at_least_us", "norm_us", "error_us"),
    [
        (5.0, 0.0, 5.0, math.hypot(0.1 * 45, 0.3 * 40)),
        (5.0, 100.0, 60.0, 0.1 * 100),  # whatever the sum takes
        (0.0, 0.0, 0.0, math.hypot(0.1 * 40, 0.3 * 40)),
        (1e-9, 0.0, 1e-9, math.hypot(0.1 * 40, 0.3 * 40)),
    ],
)
def test_a_norm_in_the_kernel_of_a_sum(beyond_us: float, at_least_us: float, norm_us: float, error_us: float) -> None:
    """The call takes a moment more than a sum of 40 us, or what norming the rows takes."""
    fit = Fit(FusedNormCost(beyond_us, at_least_us, math.inf), 0.1, 0.1, 9)
    calibration = replace(
        constants("no kind", "first_rate", 1.0), link_residual=0.3, fused_norms=dict.fromkeys(FUSED_NORMS, fit)
    )
    sums = CollectiveCosts.on(cluster.load("h200x8"), LinkCost(40.0, 0.0, math.inf))
    model = StepModel(preset("llama-3.1-8b"), Layout(2, 1), calibration, sums)
    prices = model._sum_and_norm(8)
    assert prices["norm"].time_us == pytest.approx(norm_us)
    assert prices["all_reduce"].time_us == pytest.approx(40)
    errors = [price.time_us * price.residual for price in prices.values()]
    assert math.hypot(*errors) == pytest.approx(error_us)


def test_the_error_of_a_first_token_has_that_of_the_host() -> None:
    """Without kernels it is all of the host, and with kernels alone all theirs."""
    prefill = StepWork(0, 0.0, ((512, 0),), 1)
    host = HostCost(100.0, 0.0, 0.0, True, "x", per_request_us=200.0, client_us=300.0)
    free = replace(constants("no kind", "first_rate", 1.0), host=host)
    model = preset("llama-3.1-8b")
    assert StepModel(model, Layout(1, 1), free, costs()[1]).first_token_error([prefill]) == HOST_RESIDUAL
    calibration = replace(costs()[0], host=HostCost(0.0, 0.0, 0.0, True, "x"))
    kernels = StepModel(model, Layout(1, 1), calibration, costs()[1])
    assert kernels.first_token_error([prefill]) == pytest.approx(kernel_error(kernels.stages(prefill)))
    both = StepModel(model, Layout(1, 1), replace(calibration, host=host), costs()[1])
    kernels_us = sum(stage.time_us for stage in both.stages(prefill))
    error_us = math.hypot(kernel_error(both.stages(prefill)) * kernels_us, 600 * HOST_RESIDUAL)
    assert both.first_token_error([prefill]) == pytest.approx(error_us / (kernels_us + 600))
    # of several steps, the first one alone waits for the host
    error_us = math.hypot(2 * kernel_error(both.stages(prefill)) * kernels_us, 600 * HOST_RESIDUAL)
    assert both.first_token_error([prefill] * 2) == pytest.approx(error_us / (2 * kernels_us + 600))


def test_only_what_gpus_have_kernels_for_is_chosen() -> None:
    """Between nodes: those that keep the bits, and not two-shot, which CPU hosts alone have."""
    one_node, nodes = (
        {name for name, one in registered().items() if may_be_chosen(one, shape)}
        for shape in (NodeShape(1, 8), NodeShape(2, 4))
    )
    assert one_node == {"one_shot", "two_shot"}
    assert nodes == {"nvrar", "nvrar_halving", "nvrar_pairs"}


def test_a_model_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="cannot be divided between 40 stages"):
        StepModel(preset("llama-3.1-8b"), Layout(1, 40), *costs())


@pytest.mark.parametrize(
    ("kind", "ranks", "rows", "bytes_of_row"),
    [
        ("norm_fp8", 1, 8, 2 * 7 * 8192),
        ("norm_fp8", 1, 2, 0),
        ("fused_norm_fp8", 2, 8, 2 * 2 * 8192),
        ("fused_norm_fp8", 2, 2, 0),
        ("rows_pass_fp8", 1, 64, 0),
        ("rows_pass_fp8", 1, 128, 5 * 28672),
    ],
)
def test_passes_that_write_fp8_are_kinds_of_their_own(kind: str, ranks: int, rows: int, bytes_of_row: int) -> None:
    """Norms give more than two rows in FP8, and beyond 64 rows so does the activation, which products have before."""
    config = preset("llama-3.1-70b")
    calibration = constants(kind, "first_rate", 1.0)
    sums = CollectiveCosts.on(cluster.load("h200x8"), calibration.link)
    model = StepModel(config, Layout(ranks, 1), calibration, sums, "fp8")
    assert total_us(model, decode(rows)) * 1e3 == pytest.approx(config.layers * rows * bytes_of_row, abs=1e-3)
