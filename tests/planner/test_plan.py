"""Plans: published layouts are ordered as published, every point is within its GPU, and bad questions are answered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from engine_runs import metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shotcast.cli import app
from shotcast.engine.scheduler import SchedulerConfig
from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.hardware.cluster import NetworkSpec
from shotcast.models.presets import preset
from shotcast.planner import picture, report
from shotcast.planner.calibration import load
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.model_name import named_model
from shotcast.planner.plan import Limits, Plan, Query, Target, memory_of, plan
from shotcast.planner.step import Layout, StepModel, StepWork
from shotcast.simulator.serving import Arrival, serve
from shotcast.simulator.traffic import PricedSteps

RUNNER = CliRunner()


def planned(
    model: str = "llama-3.1-405b",
    quantization: str = "fp8",
    where: str = "h200x8",
    gpus: int = 8,
    prompt: int = 2048,
    output: int = 128,
    target: str = "throughput",
) -> Plan:
    query = Query(preset(model), model, quantization, cluster.load(where), gpus, prompt, output, Target.parse(target))
    return plan(query, load("NVIDIA H200"))


def run(*arguments: str, code: int = 0) -> str:
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_latency_of_405b_on_eight_h200() -> None:
    """TensorRT-LLM published 5.6 times the speed of PP8 for TP8; nothing here was fitted to that."""
    found = planned(target="latency")
    assert found.best is not None
    assert found.best.layout == Layout(8, 1)
    one = {point.layout: point for point in found.points if point.sequences == 1 and point.engines == 1}
    ratio = one[Layout(1, 8)].latency_ms(128) / one[Layout(8, 1)].latency_ms(128)
    assert ratio == pytest.approx(5.6, rel=0.2)
    assert [one[Layout(tp, 8 // tp)].tpot_ms for tp in (8, 4, 2, 1)] == sorted(point.tpot_ms for point in one.values())


def test_throughput_of_405b_on_eight_h200() -> None:
    """PP8 has 1.5 times the published throughput of TP8."""
    best = {point.layout: point.tokens_per_s for point in planned().best_of_each_layout() if point.engines == 1}
    assert best[Layout(1, 8)] / best[Layout(8, 1)] == pytest.approx(1.5, rel=0.2)


@pytest.mark.full
@given(
    st.sampled_from(["llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b", "smollm2-135m"]),
    st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24]),
    st.sampled_from(sorted(cluster.PACKAGED)),
    st.integers(1, 4000),
    st.integers(2, 2000),
)
@settings(max_examples=15, deadline=None)
def test_every_point_is_possible(model: str, gpus: int, where: str, prompt: int, output: int) -> None:
    spec = cluster.load(where)
    whole_nodes = gpus <= spec.gpus_per_node or gpus % spec.gpus_per_node == 0
    if not whole_nodes or (model == "llama-3.1-70b" and gpus < 4):
        return
    found = planned(model, "", where, gpus, prompt, output)
    assert found.points
    for point in found.points:
        memory = point.memory
        tokens = prompt + output
        assert point.gpus == gpus
        held = memory.weights + memory.steps(point.sequences) + memory.per_token * tokens * point.sequences
        assert held <= memory.usable <= spec.gpu.memory_bytes
        vocabulary = preset(model).vocab
        assert memory.steps(point.sequences) >= 2 * point.sequences * vocabulary * 4
        assert point.tpot_ms > 0
        assert point.ttft_ms > 0
        # all sequences have at most their own speed, and arithmetic has its peak
        assert point.tokens_per_s <= point.engines * point.sequences * 1e3 / point.tpot_ms * 1.01 * output / (
            output - 1
        )
        flops = 2 * (preset(model).parameters - preset(model).vocab * preset(model).hidden * 2)
        assert point.tokens_per_s_per_gpu * (1 + (prompt - 1) / output) * flops < spec.gpu.bf16_tflops * 1e12
    front = found.pareto()
    assert [point.tokens_per_s_per_user for point in front] == sorted(
        (point.tokens_per_s_per_user for point in front), reverse=True
    )
    for point in found.points:
        assert any(
            other.tokens_per_s_per_user >= point.tokens_per_s_per_user
            and other.tokens_per_s_per_gpu >= point.tokens_per_s_per_gpu
            for other in front
        )
    assert report.command(found).count("--max-num-seqs") == 1


@pytest.mark.parametrize(("layout", "sequences"), [(Layout(8, 1), 64), (Layout(2, 4), 64), (Layout(1, 8), 128)])
def test_closed_forms_are_those_of_the_simulated_engine(layout: Layout, sequences: int) -> None:
    """Throughput by the equation of the page, beside the scheduler on the same steps."""
    query = Query(preset("llama-3.1-70b"), "x", "", cluster.load("h200x8"), 8, 512, 128)
    calibration = load("NVIDIA H200")
    (point,) = [
        point
        for point in plan(query, calibration).points
        if (point.layout, point.engines, point.sequences) == (layout, 1, sequences)
    ]
    model = StepModel(query.model, layout, calibration, CollectiveCosts.on(query.cluster, calibration.link))
    config = SchedulerConfig(sequences, 2048, 16, 1 << 20, 640, False, 1, layout.pipeline_parallel)
    found = metrics(serve([Arrival(0.0, 512, 128)] * sequences, config, PricedSteps(model), model.client_us / 1e6))
    assert point.tokens_per_s == pytest.approx(found["tokens_per_s"], rel=0.12)
    alone = metrics(serve([Arrival(0.0, 512, 128)], config, PricedSteps(model), model.client_us / 1e6))
    assert point.ttft_ms == pytest.approx(alone["ttft_ms"], rel=0.02)


@pytest.mark.parametrize("layout", [Layout(1, 16), Layout(2, 8), Layout(4, 4)])
def test_one_sequence_on_stages_of_two_nodes(layout: Layout) -> None:
    """Each token takes every hop, within nodes and between, by the closed form as in the simulated engine."""
    calibration, spec = load("NVIDIA H200"), cluster.load("h200x8")
    slow = replace(spec, network=NetworkSpec("slow", 50.0, 1000.0, "made up"))
    query = Query(preset("llama-3.1-8b"), "x", "", slow, 16, 512, 64)
    (point,) = [
        point
        for point in plan(query, calibration).points
        if (point.layout, point.engines, point.sequences) == (layout, 1, 1)
    ]
    model = StepModel(query.model, layout, calibration, CollectiveCosts.on(slow, calibration.link))
    config = SchedulerConfig(1, 2048, 16, 1 << 20, 640, False, 1, layout.pipeline_parallel)
    found = metrics(serve([Arrival(0.0, 512, 64)], config, PricedSteps(model), model.client_us / 1e6))
    assert point.tpot_ms == pytest.approx(found["tpot_ms"], rel=0.01)
    assert point.ttft_ms == pytest.approx(found["ttft_ms"], rel=0.01)
    # the two hops between nodes, of 1 ms each, which are among the parts of the step
    steps_ms = sum(stage.time_us for stage in model.stages(StepWork(1, 544.0, (), 1))) / 1e3
    assert 2 < point.tpot_ms - steps_ms < 2.2
    assert sum(point.parts.values()) / 1e3 == pytest.approx(point.tpot_ms)
    share = point.parts["transfer"] / sum(point.parts.values())
    only = plan(query, calibration, [(layout, 1)])
    assert only.best is not None
    assert f"transfers between stages {share:.0%}" in report.reason(replace(only, best=point))


def test_sequences_bring_their_logits() -> None:
    """The most sequences that fit have room for keys and values and for logits of all; one more has not."""
    model = preset("llama-3.1-405b")
    query = Query(model, "405b", "fp8", cluster.load("h200x8"), 8, 128, 256)
    for tokens in (16, 256, 2048):
        memory = memory_of(query, Layout(1, 8))
        most = memory.sequences(tokens)
        held = [sequences * tokens * memory.per_token - memory.cache(sequences) for sequences in (most, most + 1)]
        assert held[0] <= 0 < held[1]
        assert memory.steps(most + 1) - memory.steps(most) >= 2 * 4 * model.vocab
    # with logits of 256 sequences alone, 3004 would fit
    assert (
        max(point.sequences for point in plan(query, load("NVIDIA H200")).points if point.layout == Layout(1, 8)) < 3004
    )


def test_bounds_are_kept_and_named() -> None:
    found = planned("llama-3.1-70b", target="ttft=500,tpot=20")
    assert found.best is not None
    assert found.best.ttft_ms <= 500
    assert found.best.tpot_ms <= 20
    within = [point for point in found.points if point.ttft_ms <= 500 and point.tpot_ms <= 20]
    assert found.best.tokens_per_s == max(point.tokens_per_s for point in within)
    assert {(point.layout, point.engines) for point in found.best_of_each_layout()} == {
        (point.layout, point.engines) for point in within
    }
    tight = planned("llama-3.1-70b", target="ttft=5,tpot=2ms")
    assert tight.best is None
    assert report.reason(tight).startswith(
        "No layout has throughput with first token within 5 ms and each later token within 2 ms. The nearest is TP8"
    )


def test_the_reason_names_what_the_step_is() -> None:
    text = report.reason(planned(target="latency"))
    assert re.match(r"TP8 x PP1 with 1 sequence: [\d.]+ ms a token, [\d.,]+ tokens/s\. With other loads, 16 ", text)
    assert ". A step that decodes is matmuls " in text
    assert "sums between ranks (one-shot) " in text
    assert "Next is " in text
    assert "slowest stage takes " in report.reason(planned())


def test_the_answer_says_what_users_feel_of_each_load() -> None:
    """It has the latency and the throughput of the best layout's own points, and warns of one that nobody wants."""
    found = planned("llama-3.1-70b", quantization="", gpus=4)
    best, text = found.best, report.reason(found)
    assert best is not None
    speeds = re.findall(r"(\d+) sequences?: ([\d.]+) ms a token, ([\d.,]+) tokens/s", text)
    said = {int(sequences): (float(ms), float(rate.replace(",", ""))) for sequences, ms, rate in speeds}
    assert set(said) == {*report.LOADS, best.sequences}
    for point in found.points:
        if (point.layout, point.engines) == (best.layout, best.engines) and point.sequences in said:
            assert said[point.sequences] == pytest.approx((point.tpot_ms, point.tokens_per_s), rel=1e-3)
    assert best.tpot_ms > report.READING_MS
    assert "slower than people read it; a chat needs a bound" in text
    bounded = planned("llama-3.1-70b", quantization="", gpus=4, target="tpot=50")
    assert "people read" not in report.reason(bounded)


def test_the_command_can_be_run_as_it_stands() -> None:
    """A plan for one request starts no server of one user, and a preset is a folder of that name."""
    single, many = (planned("llama-3.1-70b", quantization="", gpus=4, target=text) for text in ("latency", "tpot=50"))
    assert single.best is not None
    assert many.best is not None
    assert single.best.sequences == 1 < many.best.sequences
    assert "--max-num-seqs" not in report.command(single)
    assert f"--max-num-seqs {many.best.sequences}" in report.command(many)
    text = run("plan", "llama-3.1-70b", "-g", "4", "--target", "latency")
    assert "To start it, with the model's files in ./llama-3.1-70b: shotcast serve ./llama-3.1-70b --device" in text


def test_a_thousand_gpus_take_a_minute_at_most() -> None:
    began = time.process_time()
    found = planned(quantization="", where="h200x4", gpus=1024, target="latency")
    assert time.process_time() - began < 60
    assert found.best is not None
    assert report.command(found).startswith("torchrun --nnodes ")
    assert found.refused["32x32"] == "sums of 32 GPUs: native kernels serve up to 16 of them on several nodes"
    assert {point.layout.tensor_parallel for point in found.points} == {4, 8, 16, 2, 1}


def test_a_rack_of_one_link_has_several_hosts() -> None:
    """The plan joins its GPUs by their link; a command for one host of 72 GPUs would be for no machine there is."""
    text = "gpu: B200\nnode: {num_gpus_per_node: 4, inter_node_bw: 900.0e+9, p2p_latency: 1.0e-6, "
    text += "num_gpus_per_rack: 72, inter_rack_bw: 50.0e+9}"
    rack = cluster.parse(text, "rack.yaml")
    model = preset("llama-3.1-405b")
    for gpus, within in ((4, True), (8, False)):
        found = plan(Query(model, "405b", "fp8", rack, gpus, 2048, 128, Target("latency")), load("NVIDIA H200"))
        assert found.best is not None
        assert found.best.layout == Layout(gpus, 1)
        assert (report.command(found) is not None) == within
        assert ("has several hosts of 4 GPUs" in report.unsupported_reason(found)) != within


def test_the_reason_leaves_no_part_out() -> None:
    config, name = named_model("llama-3.1-70b")
    query = Query(config, name, "fp8", cluster.load("h200x8"), 16, 512, 64)
    named = {part for parts in report.KINDS.values() for part in parts}
    for point in plan(query, load("NVIDIA H200")).points:
        assert point.parts.keys() <= named


def test_each_kind_of_refusal_is_said_once() -> None:
    lines = report.refusals(planned(quantization="", gpus=128), 3)
    assert lines == [
        "Refused: 1x1 x 128, 1x2 x 64, 1x4 x 32 and 3 more. 1x1 x 128: the weights of a rank take 756 GiB, "
        "steps about 3.74 GiB, and it may use 126 GiB, so a sequence of 2176 tokens has no room.",
        "Refused: 1x128: 126 layers cannot be divided between 128 stages.",
        "Refused: 32x1 x 4, 32x2 x 2, 32x4 and 3 more. 32x1 x 4: sums of 32 GPUs: native kernels serve up to 16 of "
        "them on several nodes.",
    ]


def test_engines_do_not_lie_across_nodes() -> None:
    found = planned("llama-3.1-70b", gpus=24)
    assert found.refused["3x8"] == "a stage of 3 ranks lies across nodes of 8 GPUs"
    assert found.refused["2x3 x 4"] == "an engine of 6 ranks lies across nodes of 8 GPUs"
    assert {point.layout for point in found.points} >= {Layout(8, 3), Layout(1, 24), Layout(2, 4)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "gpus must be from 1 to 1024, not 0"),
        ({"gpus": 12}, "12 GPUs are no whole number of nodes of 8"),
        ({"prompt": 0}, "input must be at least 1 token"),
        ({"output": 1}, "output at least 2"),
        ({"prompt": 200_000}, "takes 131072 tokens of a sequence, and 200000 . 128 are asked for"),
        ({"quantization": "int4"}, "quantization must be"),
        ({"where": "a100x4"}, "has no FP8 arithmetic"),
        ({"target": "cheap"}, "a target is latency, throughput, or bounds"),
        ({"target": "ttft=0"}, "a target is latency"),
        ({"target": "ttft=1,tpot"}, "a target is latency"),
        ({"target": "ttft=500,tpot=20,ttft=5"}, "has two bounds of ttft; give one"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(**options)  # type: ignore[arg-type]


def test_a_model_that_does_not_fit() -> None:
    found = planned(gpus=1)
    assert found.best is None
    assert "the weights of a rank take 382 GiB" in report.reason(found)
    # the reason that is given is of the layout that is named, the one that divides the model most
    found = planned(gpus=2, quantization="")
    assert "whatever the layout; 2x1: the weights of a rank take 378 GiB" in report.reason(found)
    assert "tokens/s" not in run("plan", "llama-3.1-405b", "-g", "1", code=1), "no empty table"
    assert memory_of(found.query, Layout(1, 1)).cache(1) < 0


@pytest.mark.full
def test_from_a_config_to_a_command(tmp_path: Path) -> None:
    """A new user's way: a config.json without weights, a cluster of one's own, an answer, and the files of it."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.yaml").write_text("gpu: H200 SXM\nnode: {num_gpus_per_node: 4}\n")
    # a name that rich would take for markup
    marked = tmp_path / "[" / "b] my model"
    marked.mkdir(parents=True)
    (marked / "config.json").write_text(json.dumps(config))
    assert f"serve '{marked}' --device" in run("plan", str(marked))
    files = ["--json", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plan.svg")]
    text = run("plan", str(folder), "--cluster", str(tmp_path / "mine.yaml"), "-g", "4", "--target=latency", *files)
    assert f"To start it: shotcast serve {folder} --device cuda --tensor-parallel 4" in text
    result = json.loads((tmp_path / "plan.json").read_text())
    assert result["calibrated"] is True
    best = result["best"]
    assert (best["tp"], best["pp"], best["dp"], best["conc"], best["isl"], best["osl"]) == (4, 1, 1, 1, 2048, 128)
    assert best["tput_per_gpu"] == pytest.approx(best["output_tput_per_gpu"] * (2048 + 128) / 128)
    assert best["median_intvty"] == pytest.approx(1 / best["median_tpot"])
    assert best in result["points"]
    assert (tmp_path / "plan.svg").read_text().lstrip().startswith("<?xml")
    assert named_model(str(folder / "config.json")).name == str(folder)


@pytest.mark.full
def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    assert "similar presets: llama-3.1-70b" in run("plan", "llama-3.1-70", code=2)
    assert "has no config.json" in run("plan", str(tmp_path), code=2)
    assert "no cluster 'h200x16'" in run("plan", "llama-3.1-8b", "--cluster", "h200x16", code=2)
    assert all(name in run("plan", "--help") for name in cluster.PACKAGED)
    missing = str(tmp_path / "x.yml")
    assert "cannot read the cluster" in run("plan", "llama-3.1-8b", "--cluster", missing, code=2)
    refused = run("plan", "llama-3.1-8b", "--plot", str(tmp_path / "x.xyz"), code=2)
    assert "accepted: .png, .svg, .pdf" in refused
    assert "tokens in" not in refused, "refused before the plan is made"
    for name in ("a" * 300, "~nobody-has-this-name/model"):
        assert "there is no model" in run("plan", name, code=2)
    assert "there is no cluster" in run("plan", "llama-3.1-8b", "--cluster", "a" * 300, code=2)
    (tmp_path / "other.json").write_text("{}")
    assert "a file that is called config.json" in run("plan", str(tmp_path / "other.json"), code=2)
    assert "the model is empty" in run("plan", "", code=2)
    (tmp_path / "config.json").write_text('{"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}')
    assert "architecture MixtralForCausalLM is not supported" in run("plan", str(tmp_path), code=2)
    assert "give --rate" in run("plan", "llama-3.1-8b", "--requests", "5", code=2)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for option in ("--cluster", "--calibration"):
        assert "no text in UTF-8" in run("plan", "llama-3.1-8b", option, str(binary), code=2)
    assert "No layout has" in run("plan", "llama-3.1-8b", "--target", "ttft=0.001", code=1)


@pytest.mark.full
def test_files_are_not_lost(tmp_path: Path) -> None:
    """No output overwrites an input or another output, and a plan outlives the simulation that follows it."""
    question = ["plan", "llama-3.1-8b", "-g", "1"]
    trace, both, result = tmp_path / "trace.jsonl", tmp_path / "both.png", tmp_path / "plan.json"
    text = '{"time_s": 0, "prompt": 90000, "output": 20}\n'
    trace.write_text(text)
    assert "a file of its own" in run(*question, "--trace", str(trace), "--json", str(trace), code=2)
    assert trace.read_text() == text
    assert "a file of its own" in run(*question, "--json", str(both), "--plot", str(both), code=2)
    assert not both.exists()
    # a pipe that is closed, as by head
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shotcast", *question, "--json", str(result)]
    assert subprocess.run(command, stdout=writer, stderr=subprocess.DEVNULL, check=False).returncode != 0
    os.close(writer)
    assert json.loads(result.read_text())["best"]["tp"] == 1
    result.unlink()
    assert "cannot write /dev/full: No space left" in run(*question, "--json", "/dev/full", code=2)
    small = tmp_path / "small.yaml"
    small.write_text(
        "gpu: {mem_bw: 4.8e+12, mem_capacity: 25.0e+9, float16_tc_flops: 1.0e+15}\n"
        "node: {num_gpus_per_node: 1, intra_node_bw: 450.0e+9}\n"
    )
    crowded = [*question, "--cluster", str(small), "--trace", str(trace), "--json", str(result)]
    assert "To start it" in run(*crowded, code=2), "the request is longer than the cache"
    assert json.loads(result.read_text())["best"]["tp"] == 1
    result.unlink()
    trace.write_text(text.replace("90000", "200000"))
    assert "one has 200020" in run(*crowded, code=2)
    assert not result.exists(), "refused before the plan is made"


@pytest.mark.full
def test_pictures_have_formats(tmp_path: Path) -> None:
    for name in ("plan.PNG", "plan.pdf"):
        run("plan", "llama-3.1-8b", "-g", "1", "--plot", str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.full
def test_pictures_name_the_layouts_on_the_front(tmp_path: Path) -> None:
    found = planned("llama-3.1-8b", "")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        picture.draw(found, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    leading = {point.layout.label for point in found.pareto()}
    assert len(leading) > 1
    assert all(label in text for label in leading)
    assert Layout(1, 8).label not in text, "layouts that are never the best have no name"
    assert text.count(">the others<") == 1


def test_a_gpu_without_calibration_is_said(tmp_path: Path) -> None:
    file, said = tmp_path / "plan.json", "has no calibration"
    text = run("plan", "llama-3.1-8b", "--cluster", "b200x8", "-g", "1", "--json", str(file))
    assert f"The B200 {said}: rates are those of the H200 SXM by the ratio of the data sheets" in text
    assert json.loads(file.read_text())["calibrated"] is False
    assert said not in run("plan", "llama-3.1-8b", "-g", "1", "--json", str(file))
    assert json.loads(file.read_text())["calibrated"] is True


def test_more_gpus_than_there_are() -> None:
    where = replace(cluster.load("h200x8"), nodes=2)
    Query(preset("llama-3.1-8b"), "x", "", where, 16, 1000, 100)
    with pytest.raises(ConfigError, match="h200x8 is 2 nodes of 8 GPUs, and 24 are asked for"):
        Query(preset("llama-3.1-8b"), "x", "", where, 24, 1000, 100)


def test_limits_of_an_engine() -> None:
    """Points keep to what an engine is started with, and only the layouts that are asked for have any."""
    calibration, where, layout = load("NVIDIA H200"), cluster.load("h200x8"), Layout(2, 1)
    limits = Limits(sequences=24, batch_tokens=512, utilization=0.8, algorithm="two_shot")
    query = Query(preset("llama-3.1-8b"), "x", "", where, 2, 1000, 100, limits=limits)
    found = plan(query, calibration, [(layout, 1)])
    assert {point.layout for point in found.points} == {layout}
    assert [point.sequences for point in found.points] == [1, 2, 4, 8, 16, 24]
    assert {point.algorithm for point in found.points} == {"two-shot"}
    assert found.points[0].memory.usable == int(where.gpu.memory_bytes * 0.8)
    by_default = plan(replace(query, limits=Limits()), calibration, [(layout, 1)])
    # two chunks of a prompt read the weights twice, and have smaller activations
    assert found.points[0].ttft_ms > 1.05 * by_default.points[0].ttft_ms
    assert found.points[0].memory.steps(1) < by_default.points[0].memory.steps(1)
    assert plan(replace(query, limits=Limits(algorithm="nvrar")), calibration, [(layout, 1)]).refused.keys() == {"2x1"}


def test_keys_and_values_of_one_byte() -> None:
    """They take half of the memory and less time to read, as far as reading bounds attention; nothing else changes."""
    calibration, layout = load("NVIDIA H200"), Layout(1, 1)
    query = Query(preset("llama-3.1-70b"), "x", "fp8", cluster.load("h200x8"), 1, 2048, 2048)
    two, one = (plan(replace(query, limits=Limits(kv_item=item)), calibration) for item in (None, 1))
    memory = [memory_of(found.query, layout) for found in (two, one)]
    assert memory[0].per_token == 2 * memory[1].per_token
    assert replace(memory[0], per_token=0) == replace(memory[1], per_token=0)
    parts = [next(point.parts for point in found.points if point.sequences == 32) for found in (two, one)]
    assert parts[1].keys() == parts[0].keys()
    assert {name for name in parts[0] if parts[0][name] != parts[1][name]} == {"attention"}
    assert parts[1]["attention"] < 0.95 * parts[0]["attention"]
    assert max(point.sequences for point in one.points) > 1.9 * max(point.sequences for point in two.points)


def test_sums_of_several_leaves_are_priced_as_those_between_them() -> None:
    text = "gpu: H200 SXM\nnode: {num_gpus_per_node: 8, inter_node_bw: 50e+9, p2p_latency: 5e-6}\n"
    switch = "switch: {num_nodes_per_leaf: 2, oversubscription: 4, hop_latency: 1e-6, source: made up}"
    plain, leaves = (
        CollectiveCosts.on(cluster.parse(each, "x.yaml"), load("NVIDIA H200").link) for each in (text, text + switch)
    )
    assert leaves.network_over(2) == plain.network_over(2) == plain.network_over(4)
    assert leaves.network_over(4)[:2] == (7.0, plain.network.bw_gbps / 4)
    assert leaves.all_reduce(1 << 20, 16, 2) == plain.all_reduce(1 << 20, 16, 2)
    assert leaves.all_reduce(1 << 20, 32, 2).time_us > plain.all_reduce(1 << 20, 32, 2).time_us
    assert leaves.all_gather(1 << 20, 32) > plain.all_gather(1 << 20, 32)


def test_sums_by_a_named_algorithm() -> None:
    """A named algorithm is priced if it has a model, and is otherwise refused with the names of those that do."""
    arguments = ["plan", "llama-3.1-70b", "-g", "8", "--target", "latency"]
    own, named = run(*arguments), run(*arguments, "--algorithm", "two-shot")
    assert "sums between ranks (two-shot)" in named
    assert "--algorithm two_shot" in named
    assert "--algorithm" not in own
    query = Query(preset("llama-3.1-70b"), "x", "", cluster.load("h200x8"), 8, 512, 64)
    for name in ("vendor", "nvls", "multimem", "two_shot_fp8"):
        with pytest.raises(
            ConfigError, match=f"there is no model of '{name}'; choose from auto, one_shot, two_shot, ring"
        ):
            replace(query, limits=Limits(algorithm=name))
