"""``layout="auto"``: what is taken, the engine accepts, and the planner finds best; what does not fit is explained."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shotcast.cli import app
from shotcast.engine import layout_choice
from shotcast.engine.config import EngineConfig, max_model_len_of
from shotcast.engine.layout_choice import LayoutChoice, choose_layout
from shotcast.engine.llm import LLM
from shotcast.engine.memory import MemoryBudget
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.startup import select_device, start_facts
from shotcast.errors import ConfigError
from shotcast.hardware import detect
from shotcast.hardware.detect import GpuFacts
from shotcast.layers.attention import KVCache
from shotcast.layers.rope import Rope
from shotcast.models.config import ModelConfig
from shotcast.models.memory_estimate import require_division, weight_bytes
from shotcast.models.presets import preset
from shotcast.planner.machine import calibration_of, cluster_of_gpus
from shotcast.planner.plan import Limits, Query, Target, fullest_rank, plan
from shotcast.planner.step import Layout

CALIBRATION = Path(__file__).parents[2] / "benchmarks" / "data" / "cpu" / "calibration_x1.json"
H200_BYTES = 150109880320  # as CUDA reports it
GPUS = {
    "NVIDIA A100-SXM4-80GB": (79 << 30, (8, 0)),
    "NVIDIA H100 80GB HBM3": (79 << 30, (9, 0)),
    "NVIDIA H200": (H200_BYTES, (9, 0)),
    "NVIDIA B200": (178 << 30, (10, 0)),
}


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHOTCAST_CALIBRATION", "SHOTCAST_SHARE_GPUS"):
        monkeypatch.delenv(name, raising=False)


def see(monkeypatch: pytest.MonkeyPatch, *names: str, memory: int | None = None) -> None:
    """Let this process see such GPUs."""
    gpus = tuple(
        GpuFacts(index, name, memory or GPUS.get(name, (24 << 30,))[0], GPUS.get(name, (0, (8, 9)))[1], 100, None)
        for index, name in enumerate(names)
    )
    monkeypatch.setattr(detect, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(detect, "has_cuda_driver", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))


def chosen(model: str, **options: Any) -> LayoutChoice:
    """Return the choice for a preset on the GPUs that are seen."""
    config = EngineConfig(f"random:{model}", **({"layout": "auto"} | options))
    return choose_layout(select_device(config), preset(model))


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        chosen(model, **options)
    return str(caught.value)


# --- the property -----------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Models of the Llama kind, from some megabytes to more than eight GPUs hold."""
    kv_heads = draw(st.integers(1, 16))
    head_dim = draw(st.sampled_from([32, 64, 128]))
    heads = kv_heads * draw(st.integers(1, 8))
    return ModelConfig(
        hidden=heads * head_dim,
        intermediate=64 * draw(st.integers(1, 800)),
        layers=draw(st.integers(1, 126)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=draw(st.integers(3, 200000)),
        norm_eps=1e-5,
        rope=Rope(10000.0),
        max_position=draw(st.integers(64, 131072)),
        tied=draw(st.booleans()),
    )


def accepted(config: EngineConfig, model: ModelConfig, layout: Layout, total: int) -> bool:
    """Return whether the engine has no objection, by its own functions and plain sums of bytes."""
    divided = config.divided(str(layout))

    class Memory:
        free = total

        def release(self) -> None: ...

    Memory.total = total  # type: ignore[attr-defined]
    try:
        require_division(model, divided.tensor_parallel, divided.pipeline_parallel)
        weights = weight_bytes(model, 2, divided.tensor_parallel, divided.pipeline_parallel, config.quantization)
        MemoryBudget.find(divided, Memory(), 1, weights, "bfloat16")  # type: ignore[arg-type]
    except ConfigError:
        return False
    memory = fullest_rank(model, config.quantization, layout, 0, divided.max_step_tokens)
    blocks = -(-max_model_len_of(config, model) // config.block_size) + 1
    taken = weights + memory.steps(config.max_num_seqs) + blocks * config.block_size * memory.per_token
    return divided.tensor_parallel <= 8 and taken <= int(total * config.gpu_memory_utilization)


@pytest.mark.full
@given(
    models(),
    st.sampled_from(sorted(GPUS)),
    st.integers(1, 16),
    st.sampled_from([1, 16, 64, 256]),
    st.integers(0, 20000),
    st.sampled_from(["throughput", "latency"]),
    st.booleans(),
    st.none() | st.floats(0.9, 1.1),
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_what_is_taken_is_accepted_and_the_best_of_what_is(
    monkeypatch: pytest.MonkeyPatch,
    model: ModelConfig,
    name: str,
    gpus: int,
    sequences: int,
    length: int,
    target: str,
    fp8: bool,
    part: float | None,
) -> None:
    """On GPUs as they are, or with nearly the memory that tensor parallelism needs."""
    assume(length != 1 and length <= model.max_position)
    assume(not fp8 or GPUS[name][1] >= (8, 9))
    total = GPUS[name][0]
    if part is not None:
        assume(gpus <= model.vocab)
        memory = fullest_rank(model, "fp8" if fp8 else "", Layout(gpus, 1), 0, 2048)
        tokens = length or min(model.max_position, 8192)
        total = int(part / 0.9 * (memory.weights + memory.steps(sequences) + tokens * memory.per_token))
    see(monkeypatch, *[name] * gpus, memory=total)
    config = EngineConfig(
        "m",
        layout="auto",
        device="cuda",
        quantization="fp8" if fp8 else "",
        max_num_seqs=sequences,
        max_model_len=length,
        target=target,
    )
    every = [Layout(tensor, gpus // tensor) for tensor in range(1, gpus + 1) if gpus % tensor == 0]
    possible = [layout for layout in every if accepted(config, model, layout, total)]
    if not possible:
        with pytest.raises(ConfigError, match=r"does not fit|is possible"):
            choose_layout(config, model)
        return
    found = choose_layout(config, model)
    assert found.layout in possible
    assert set(found.refused) == {str(layout) for layout in every if layout not in possible}
    assert EngineConfig("m", layout=str(found.layout)).ranks == gpus

    # the planner, asked about the same layouts at once, with all memory of the GPU
    assert found.plan is not None
    asked = found.plan.query
    cluster = cluster_of_gpus([name], gpus)
    usable = int(total * config.gpu_memory_utilization)
    limits = Limits(sequences, config.max_num_batched_tokens, usable / cluster.gpu.memory_bytes)
    query = Query(model, "m", asked.quantization, cluster, gpus, asked.prompt, asked.output, Target(target), limits)
    best = plan(query, calibration_of(cluster.gpu), [(layout, 1) for layout in possible]).best
    assert best is not None
    mine = found.plan.best
    assert mine is not None
    if target == "latency":
        assert mine.latency_ms(asked.output) == best.latency_ms(asked.output)
    elif part is None:  # the engine has logits of all sequences that it may have, the planner of those that fit
        assert mine.tokens_per_s >= 0.95 * best.tokens_per_s


# --- the same answer as shotcast plan ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "gpus"), [("llama-3.1-8b", 2), ("llama-3.1-70b", 4), ("llama-3.1-70b", 8)])
@pytest.mark.parametrize("target", ["throughput", "latency", "ttft=2000,tpot=40"])
def test_the_answer_is_that_of_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, gpus: int, target: str
) -> None:
    see(monkeypatch, *["NVIDIA H200"] * gpus)
    found = chosen(model, target=target)
    for cluster in ("h200x8", "here"):
        command = ["plan", model, "--gpus", str(gpus), "--target", target, "--cluster", cluster, "--engines", "1"]
        file = tmp_path / f"{cluster}.json"
        result = CliRunner().invoke(app, [*command, "--max-num-seqs", "64", "--json", str(file)])
        assert result.exit_code == 0, result.output
        answer = json.loads(file.read_text())
        assert found.layout == Layout(answer["best"]["tp"], answer["best"]["pp"])
        assert answer["reason"] in found.reason
        assert {row["dp"] for row in answer["points"]} == {1}


def test_engines_that_do_not_divide_gpus() -> None:
    result = CliRunner().invoke(app, ["plan", "llama-3.1-8b", "--gpus", "8", "--engines", "3"])
    assert result.exit_code == 2
    assert "8 GPUs are no 3 equal engines" in result.stderr


def test_the_reason_names_the_question_and_the_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *["NVIDIA H200"] * 4)
    found = chosen("llama-3.1-70b", workload="512+512")
    text = str(found)
    assert text.startswith(f"layout {found.layout}: for throughput of 512+512 tokens on 4 NVIDIA H200. TP")
    assert found.plan is not None
    assert f"Next is {found.plan.best_of_each_layout()[1].layout.label}" in text
    assert "scaled" not in text
    assert "\n" not in text


def test_a_gpu_without_calibration_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *["NVIDIA B200"] * 2)
    text = str(chosen("llama-3.1-8b"))
    assert text.endswith("Rates are scaled by the data sheets, as nothing was measured on the B200.")
    see(monkeypatch, *["NVIDIA H100 80GB HBM3"] * 2)
    assert "data sheets" not in str(chosen("llama-3.1-8b"))


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_all_visible_gpus_are_taken_or_as_many_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *["NVIDIA H200"] * 6)
    assert chosen("llama-3.1-8b").layout.ranks == 6
    assert chosen("llama-3.1-8b", layout="auto:2").layout.ranks == 2


def test_gpus_are_never_left_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *["NVIDIA H200"] * 2)
    config = EngineConfig("m", layout="auto:4")
    with pytest.raises(ConfigError, match="layout auto:4 is of 4 ranks on this machine, and 2 GPUs are visible"):
        select_device(config)
    assert select_device(replace(config, device="cpu")).device == "cpu"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="layout auto is of 4 ranks on this machine, and 2 GPUs are visible"):
        select_device(EngineConfig("m", layout="auto"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is of 4 ranks on this machine, and 2 GPUs"):
        select_device(EngineConfig("m", layout="auto"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    see(monkeypatch, "NVIDIA H200")  # a launcher shows each rank its own
    assert select_device(EngineConfig("m", layout="auto")).device == "cuda"


def job_of(monkeypatch: pytest.MonkeyPatch, ranks: int, local: int) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", local), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "node0")


@pytest.mark.parametrize("visible", [1, 8])
@pytest.mark.parametrize("target", ["latency", "throughput"])
def test_ranks_of_several_hosts(monkeypatch: pytest.MonkeyPatch, visible: int, target: str) -> None:
    """Stages lie within hosts. A launcher may show each rank all GPUs of its host, or its own."""
    see(monkeypatch, *["NVIDIA H200"] * visible)
    job_of(monkeypatch, 16, 8)
    found = chosen("llama-3.1-405b", target=target)
    assert found.layout.ranks == 16
    assert 8 % found.layout.tensor_parallel == 0
    assert set(found.refused) == {"16x1"}
    assert "16 NVIDIA H200 on 2 hosts" in found.reason
    job_of(monkeypatch, 8, 4)
    assert chosen("llama-3.1-405b", target=target).refused.keys() == {"8x1"}
    job_of(monkeypatch, 16, 8)
    with pytest.raises(ConfigError, match="layout auto:4 is of 4 ranks, and the job has 16"):
        choose_layout(EngineConfig("m", layout="auto:4", device="cuda"), preset("llama-3.1-8b"))
    job_of(monkeypatch, 15, 8)
    with pytest.raises(ConfigError, match="different numbers of ranks"):
        chosen("llama-3.1-405b")


def test_ranks_of_a_job_compare_what_they_plan_for(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *["NVIDIA H200"] * 4)
    job_of(monkeypatch, 8, 4)
    planned, given = (
        start_facts(EngineConfig("random:smollm2-135m", layout=layout, device="cuda")) for layout in ("auto", "4x2")
    )
    assert {"the GPU": "NVIDIA H200, 140 GiB", "the number of ranks on a host": "4"}.items() <= planned.items()
    assert {name for name in planned if name not in given} == {"the GPU", "the number of ranks on a host"}


def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", "1")
    see(monkeypatch, "NVIDIA H200")
    assert chosen("llama-3.1-8b", layout="auto:2").layout.ranks == 2
    text = refusal("qwen2.5-72b", layout="auto:4")
    assert re.search(r"it may use 31.5 GiB \(90% of 140 GiB, shared by 4 ranks\)", text)


# --- what is unknown, and what does not fit ---------------------------------------------------------------------------


def test_an_unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *["NVIDIA GeForce RTX 4090"] * 2)
    text = refusal("smollm2-1.7b")
    assert "plans know the GPUs A100 SXM 80 GB, H100 SXM, H200 SXM, B200, and not NVIDIA GeForce RTX 4090" in text
    assert "give a layout by hand, such as 4x1" in text
    one = chosen("smollm2-1.7b", layout="auto:1")  # there is nothing to choose
    assert (one.layout, one.plan) == (Layout(1, 1), None)


def test_gpus_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "NVIDIA H200", "NVIDIA H100 80GB HBM3")
    assert "this machine has NVIDIA H200, NVIDIA H100 80GB HBM3; give a layout by hand" in refusal("llama-3.1-8b")


def test_what_is_missing_and_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "NVIDIA H200")
    text = refusal("llama-3.1-70b")
    assert "random:llama-3.1-70b does not fit on 1 NVIDIA H200. 1x1, which needs least: the weights of a rank" in text
    assert "take 131 GiB as bfloat16; it may use 126 GiB (90% of 140 GiB)" in text
    assert text.endswith("It would fit with 2 NVIDIA H200 or quantization fp8 on these")
    assert chosen("llama-3.1-70b", quantization="fp8").layout == Layout(1, 1)
    see(monkeypatch, *["NVIDIA H200"] * 2)
    assert chosen("llama-3.1-70b").layout.ranks == 2
    see(monkeypatch, "NVIDIA A100-SXM4-80GB")  # has no FP8
    assert refusal("llama-3.1-70b").endswith("It would fit with 2 NVIDIA A100-SXM4-80GB")
    for name, help_ in (("NVIDIA A100-SXM4-80GB", "2 NVIDIA"), ("NVIDIA H200", "NVIDIA H200 or quantization fp8")):
        see(monkeypatch, name, memory=16 << 30)
        text = refusal("llama-3.1-8b")
        assert help_ in text
        assert ("on these" in text) == (name == "NVIDIA H200")
    see(monkeypatch, "NVIDIA A100-SXM4-80GB")
    assert "no FP8" in refusal("llama-3.1-8b", quantization="fp8")


def test_a_long_sequence_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "NVIDIA A100-SXM4-80GB", memory=24 << 30)
    text = refusal("llama-3.1-8b", max_model_len=131072)
    found = re.search(r"fewer than one sequence of max_model_len 131072 .*lower max_model_len to (\d+) or less", text)
    assert found is not None, text
    assert chosen("llama-3.1-8b", max_model_len=int(found[1])).layout == Layout(1, 1)


def test_a_cache_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "NVIDIA H200")
    assert "the cache has room for 32 tokens (1 MiB), fewer than" in refusal("llama-3.2-1b", kv_cache_bytes=1 << 20)
    beside_weights = int(H200_BYTES * 0.9) - weight_bytes(preset("llama-3.2-1b"), 2)
    text = refusal("llama-3.2-1b", kv_cache_bytes=beside_weights)
    assert re.search(r"steps about \S+ GiB and kv_cache_bytes 12\d GiB, together 12\d GiB; it may use 126 GiB", text)
    few = chosen("llama-3.2-1b", kv_cache_bytes=1 << 30).plan
    assert few is not None
    assert max(point.sequences for point in few.points) == (1 << 30) // (2 * 16 * 8 * 64 * 2 * 2176)


def test_keys_and_values_in_fp8_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes are those that the engine allocates, scales included, and they take less time to read."""
    see(monkeypatch, "NVIDIA H200")
    model, options = preset("llama-3.1-8b"), {"workload": "4096+4096", "max_num_seqs": 64}
    plain, fp8 = (chosen("llama-3.1-8b", kv_cache_dtype=dtype, **options).plan for dtype in ("", "fp8"))
    assert plain is not None
    assert fp8 is not None
    cache = KVCache(1, 1, model.kv_heads, model.head_dim, torch.float8_e4m3fn, torch.device("cpu"))
    assert {point.memory.per_token for point in fp8.points} == {model.layers * cache.nbytes}
    attention = [next(each.parts for each in found.points if each.sequences == 32) for found in (plain, fp8)]
    assert attention[1]["attention"] < 0.95 * attention[0]["attention"]
    # the least cache that holds a sequence of 8192 tokens
    least = 8192 * model.layers * cache.nbytes
    assert chosen("llama-3.1-8b", kv_cache_dtype="fp8", kv_cache_bytes=least).layout == Layout(1, 1)
    assert "fewer than one sequence" in refusal("llama-3.1-8b", kv_cache_dtype="fp8", kv_cache_bytes=least - 1)


def test_no_layout_meets_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *["NVIDIA H200"] * 2)
    text = refusal("llama-3.1-70b", target="ttft=1,tpot=1")
    assert text.startswith("No layout has throughput with first token within 1 ms")
    assert "The nearest is TP2 x PP1 with 1 sequence" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"target": "fast"}, "a target is latency, throughput, or bounds"),
        ({"workload": "9000+1"}, "workload 9000+1 takes 9001 tokens, and max_model_len is 8192"),
        ({"dtype": "float32"}, "not of float32; give a layout by hand"),
        ({"algorithm": "nvrar"}, "cannot be priced: there is no model of nvrar for 1x2 ranks"),
        ({"algorithm": "vendor"}, "there is no model of 'vendor'; choose from auto, one_shot"),
    ],
)
def test_questions_that_no_plan_answers(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], text: str) -> None:
    see(monkeypatch, *["NVIDIA H200"] * 2)
    assert text in refusal("llama-3.1-8b", **options)


def test_float16_is_priced_as_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *["NVIDIA H200"] * 2)
    half, brain = (chosen("llama-3.1-8b", dtype=dtype).plan for dtype in ("float16", "bfloat16"))
    assert half is not None
    assert brain is not None
    assert half.points == brain.points
    assert (half.precision, brain.precision) == ("fp16", "bf16")


# --- CPU ranks --------------------------------------------------------------------------------------------------------


def measured(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let the calibration in a file be that of this machine."""
    monkeypatch.setenv("SHOTCAST_CALIBRATION", str(path))
    monkeypatch.setattr(detect, "cpu_model", lambda: json.loads(path.read_text())["part"])


def test_cpu_ranks_of_which_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch)
    found = chosen("smollm2-135m")
    assert (found.layout, found.plan) == (Layout(1, 1), None)
    assert "one CPU rank, since nothing was measured of this machine (shotcast calibrate" in str(found)
    assert chosen("smollm2-135m", layout="auto:4").layout == Layout(4, 1)
    job_of(monkeypatch, 8, 2)
    assert chosen("smollm2-135m").layout == Layout(2, 4)
    with monkeypatch.context() as others:
        measured(others, CALIBRATION)
        assert "nothing was measured of the network between hosts" in chosen("smollm2-135m").reason
    assert "whether a layout has throughput with first token within 5 ms is not known" in refusal(
        "smollm2-135m", target="ttft=5"
    )


@pytest.mark.parametrize(
    ("options", "part", "why"),
    [
        ({"dtype": "bfloat16"}, "AMD EPYC", "SHOTCAST_CALIBRATION is of float32, and weights are bfloat16"),
        ({"algorithm": "vendor"}, "AMD EPYC", "SHOTCAST_CALIBRATION says nothing of sums by vendor"),
        ({"layout": "auto:2"}, "AMD EPYC", "SHOTCAST_CALIBRATION is of 1 ranks (shotcast calibrate"),
        ({}, "another", "SHOTCAST_CALIBRATION is of AMD EPYC, and this machine's ranks are of another"),
    ],
)
def test_a_calibration_of_something_else(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], part: str, why: str
) -> None:
    see(monkeypatch)
    measured(monkeypatch, CALIBRATION)
    monkeypatch.setattr(detect, "cpu_model", lambda: part)
    assert why in chosen("smollm2-135m", **options).reason


def test_cpu_ranks_by_the_calibration_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    see(monkeypatch)
    measured(monkeypatch, CALIBRATION)
    found = chosen("smollm2-135m", max_num_seqs=8, workload="64+32")
    assert found.layout == Layout(1, 1)
    assert found.plan is not None
    assert found.plan.best is not None
    assert found.plan.best.sequences == 8
    # a machine whose ranks are as fast where two share it
    value = json.loads(CALIBRATION.read_text())
    value["shares"]["2"] = value["shares"]["1"]
    file = tmp_path / "two.json"
    file.write_text(json.dumps(value))
    measured(monkeypatch, file)
    found = chosen("smollm2-135m", max_num_seqs=8, workload="64+32")
    assert found.layout.ranks == 2
    assert found.plan is not None
    assert len(found.plan.best_of_each_layout()) > 1


def test_a_model_that_does_not_fit_into_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch)
    monkeypatch.setattr(layout_choice, "available_bytes", lambda: 1 << 30)
    text = refusal("llama-3.1-8b")
    assert "does not fit on 1 CPU rank. 1x1, which needs least: the weights of a rank take 29.9 GiB as float32" in text


# --- real ranks -------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_same_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    params, prompts = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), [[1, 2, 3], [4] * 40]
    options = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
    with caplog.at_level(logging.INFO), LLM(tmp_path, layout="auto:2", **options) as llm:
        planned = llm.generate(prompts, params)
        layout, choice = llm.config.layout, llm.layout_choice
    assert choice is not None
    assert str(choice.layout) == layout == "2x1"
    assert str(choice) in caplog.messages
    with LLM(tmp_path, tensor_parallel=2, **options) as llm:
        assert llm.layout_choice is None
        assert [one.tokens for one in llm.generate(prompts, params)] == [one.tokens for one in planned]
