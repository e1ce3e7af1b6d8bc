"""Measuring a GPU without one: kernels are checked before they are timed; results; what the command refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calibrate_gpu
import gpu_calibration.case
import pytest
import torch
from call_modes.mode_config import ModeConfig
from call_modes.rows import CallRow, read
from gpu_calibration import measurement, products
from gpu_calibration.attention import DecodeShape, PromptShape, decode_shapes, prompt_shapes
from gpu_calibration.case import off_by
from gpu_calibration.fit import KERNELS_FILE, calibrate, host_cost, kernel_point
from gpu_calibration.host import HostSteps
from gpu_calibration.measurement import Measurement
from gpu_calibration.passes import PassShape, pass_shapes
from gpu_calibration.products import ProductShape
from gpu_cases_targets import checked, host_rows

from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.cost.inference import FP8
from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.hardware.detect import GpuFacts
from shotcast.launcher.spawn import spawn
from shotcast.layers.linear import Linear
from shotcast.planner.calibration import load

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "data" / "h200"


@pytest.fixture
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_calibration.case, "BYTES_BETWEEN", 2)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the GPUs that this machine seems to have, to be filled."""
    names: list[str] = []
    real = measurement.detect()

    class Facts:
        @property
        def gpus(self) -> list[GpuFacts]:
            return [GpuFacts(number, name, 1, (9, 0), 132, None) for number, name in enumerate(names)]

        def as_json(self) -> dict[str, Any]:
            return real.as_json() | {"gpus": [{"name": name} for name in names]}

    monkeypatch.setattr(measurement, "detect", Facts)
    return names


@pytest.mark.usefixtures("few_copies")
def test_products_are_checked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("qkv", "gate_up"):  # the activation is in the kernel of few rows
        cases = list(ProductShape(f"8b/8 {part}", 256, 128, False, (1, 2, 65)).cases(CPU, True))
        assert [case.row["rows"] for case in cases] == [1, 2, 65]
        assert cases[0].turns == 2
        for case in cases:
            case.check()
        assert cases[0].call(0).shape == (1, 128 if part == "gate_up" else 256)
        assert cases[2].call(1).shape == (65, 256)
    right = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda layer, x: right(layer, x) * 1.02)
    (case,) = ProductShape("8b/8 qkv", 256, 128, False, (4,)).cases(CPU, True)
    with pytest.raises(ArithmeticError, match=r"8b/8 qkv: the error is .* times the allowed one, so nothing"):
        case.check()


def test_what_is_no_number_is_wrong() -> None:
    exact = torch.ones(3)
    off_by("x", exact * (1 + 2**-9), exact, 0.0, 2.0**-8)
    with pytest.raises(ArithmeticError, match="x: the error is 2 times"):
        off_by("x", exact * (1 + 2**-7), exact, 0.0, 2.0**-8)
    with pytest.raises(ArithmeticError, match="x: the error is nan times"):
        off_by("x", torch.tensor([1.0, float("nan"), 1.0]), exact, 0.0, 1.0)


@pytest.mark.full
def test_kernels_of_gpus_pass_their_checks_interpreted() -> None:
    names = ("norm", "activation", "embedding", "logits", "sampling", "norm_fp8", "quantization", "activation_fp8")
    shapes = [
        *(PassShape(name, 256, 0, (1, 3)) for name in names),
        PassShape("rotation", 4, 2, (1, 3)),
        PromptShape(4, 2, (((20, 3), (5, 0)), ((33, 0),))),
    ]
    (rows,) = interpret(checked, 1, shapes, env=GPU_COLLECTIVES)
    assert [row["rows"] for row in rows[:-2]] == [1, 3] * (len(names) + 1)
    assert [row["kernel"] for row in rows[-2:]] == ["prompt_attention"] * 2
    assert rows[-2] | {"us": 1.0} == {
        "kernel": "prompt_attention", "tokens": 25, "parts": [[20, 3], [5, 0]],
        "heads": 4, "kv_heads": 2, "head_dim": 128, "us": 1.0,
    }  # fmt: skip
    assert all(kernel_point(row | {"us": 1.0}) is not None for row in rows)


def test_attention_that_decodes_passes_its_check() -> None:
    """By host code, which attends where there is no GPU."""
    (rows,) = spawn(checked, 1, [DecodeShape(4, 2, ((1, 17), (3, 40)))])
    assert [(row["sequences"], row["context"]) for row in rows] == [(1, 17), (3, 40)]


@pytest.mark.full
def test_the_host_is_measured_by_the_engine_itself() -> None:
    """Interpreted, so that graphs are steps on static memory: every step that the fit needs is there."""
    steps = HostSteps((1, 2), (1, 2), (16, 32), 8, 6, 1)
    (rows,) = interpret(host_rows, 1, steps, env=GPU_COLLECTIVES)
    assert len(rows) == 2 * 2 * (2 + 2)
    shapes = {(row["graphs"], row["layers"], row["sequences"], row["rows"]) for row in rows}
    assert (True, 2, 2, 2) in shapes
    assert (False, 1, 1, 32) in shapes
    assert all(row["us"] > 0 for row in rows)
    assert host_cost(rows).hidden, "the fit takes them; the times themselves mean nothing here"


def test_everything_is_of_the_shapes_that_models_have() -> None:
    whole, without = Measurement.everything(True), Measurement.everything(False)
    assert {shape.fp8 for shape in without.products + without.sustained} == {False}
    assert not any(shape.name.endswith(FP8) for shape in pass_shapes(False))
    assert set(pass_shapes(False)) < set(pass_shapes(True))
    by_name = {(shape.name, shape.fp8): shape for shape in whole.products}
    assert by_name["70b/4 gate_up", False][1:3] == (14336, 8192)
    assert by_name["70b/4 output", False][1:3] == (8192, 2048)
    assert by_name["405b/8 qkv", True][1:3] == ((16 + 2) * 128, 16384)
    assert by_name["8b/2 head", False].rows == products.HEAD_ROWS
    assert ("405b/1 head", False) not in by_name, "models in FP8 have the head of others"
    assert len({(*shape[1:], shape.name.endswith("gate_up")) for shape in whole.products}) == len(whole.products)
    assert {step for shape in decode_shapes() for step in shape.steps} >= {(1, 128), (512, 576), (64, 8192)}
    assert all(parts[0][0] > 1 for shape in prompt_shapes() for parts in shape.steps)


@pytest.mark.parametrize(
    ("names", "number", "message"),
    [
        ([], 1, "PyTorch finds no usable GPU to calibrate; shotcast calibrate measures this machine's CPU"),
        (["NVIDIA H200"], 2, "--world-size must be from 1 to the 1 GPUs of this machine, not 2"),
        (["NVIDIA H200"], 0, "--world-size must be from 1 to the 1 GPUs of this machine, not 0"),
        (["NVIDIA H200", "NVIDIA B200"], 2, "of one kind of GPU, and this machine has NVIDIA B200, NVIDIA H200"),
        (["Toaster"], 1, "Toaster is not in the catalog of GPUs, so the fit does not know where to begin"),
    ],
)
def test_gpus_that_cannot_be_calibrated(gpus: list[str], names: list[str], number: int, message: str) -> None:
    gpus += names
    with pytest.raises(ConfigError, match=message):
        measurement.require_gpus(number)


def test_the_script_says_what_is_wrong(tmp_path: Path, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["", str(folder), "--output", str(tmp_path / "c.json"), *arguments])
        with pytest.raises(ConfigError) as raised:
            calibrate_gpu.main()
        return str(raised.value)

    results = tmp_path / "results"
    assert "no usable GPU" in refused(results, "--measure")
    assert not list(tmp_path.iterdir()), "no folder for results that will not be"
    gpus.append("NVIDIA H200")
    assert "from 1 to the 1 GPUs" in refused(results, "--measure", "--world-size", "2")
    assert "leave out --part" in refused(results, "--measure", "--part", "NVIDIA H200")
    assert "no results to calibrate by" in refused(tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot make the folder" in refused(tmp_path / "file" / "x", "--measure")


@pytest.mark.full
def test_the_script_fits_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    monkeypatch.setattr(sys, "argv", ["", str(RESULTS), "--output", str(file)])
    calibrate_gpu.main()
    assert "product_many_rows 230" in " ".join(capsys.readouterr().out.replace("│", "").split())
    assert file.read_text() == f"{calibrate(RESULTS).as_json()}\n"


def test_results_are_kept_group_by_group(
    tmp_path: Path, gpus: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a target that fails, what was measured before stays in the file."""
    gpus.append("NVIDIA H200")
    monkeypatch.setattr(measurement, "compile_all", lambda points: None)
    names = {measurement.cases_of_rank: "product", measurement.sustained_of_rank: "sustained_product"}

    shown = []

    def fake(target: Any, world_size: int, *arguments: Any) -> list[list[dict[str, Any]]]:
        assert world_size == 1
        shown.extend(arguments[1:] if target is measurement.cases_of_rank else ())
        if target not in names:
            raise RuntimeError("the host")
        return [[{"kernel": names[target], "us": 1.234567}]]

    monkeypatch.setattr(measurement, "spawn", fake)
    with pytest.raises(RuntimeError, match="the host"):
        measurement.measure(tmp_path, 1, "a command", True, Measurement((), (), (), HostSteps()))
    document = json.loads((tmp_path / "kernels_x1.json").read_text())
    assert list(document) == ["environment", "command", "date", "kernels", "rows"]
    assert [row["kernel"] for row in document["rows"]] == ["product", "product", "sustained_product"]
    assert document["rows"][0]["us"] == 1.2346
    assert "kernels.triton.gemv" in document["kernels"]
    assert shown == ["products", "attention and passes"], "ranks were not told to show what they measure"
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[1/1]")]
    assert lines == [f"[1/1] {part} (0 s)" for part in ("compiling kernels", "products in a row", "the host")]


def test_sums_of_several_gpus_are_measured_as_the_bench_does(
    tmp_path: Path, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are those that the fit reads: with results of earlier runs, it finds about the packaged link."""
    gpus += ["NVIDIA H200"] * 4
    kept = {"all_reduce": "all_reduce_bf16_x4.json", "all_reduce_rms_norm": "fused_bf16_x4.json"}
    asked = []

    def run(config: ModeConfig, ranks: int) -> list[CallRow]:
        assert config.progress
        asked.append((config.op, config.algorithms, config.sizes[0], config.sizes[-1], ranks))
        return [row for row in read(RESULTS / kept[config.op]).rows if row.algorithm in config.algorithms]

    monkeypatch.setattr(measurement.harness, "run", run)
    files = list(measurement._link(tmp_path, 4, True, "a command", True))
    assert [file.name for file in files] == list(kept.values())
    assert asked[0] == ("all_reduce", ("one_shot", "two_shot", "ring"), 1 << 10, 1 << 28, 4)
    assert asked[1][2:] == (8192 * 2, 512 * 8192 * 2, 4)
    (tmp_path / KERNELS_FILE).write_text((RESULTS / KERNELS_FILE).read_text())
    found, packaged = calibrate(tmp_path), load("NVIDIA H200")
    assert found.sources == ("fused_bf16_x4.json", "all_reduce_bf16_x4.json", KERNELS_FILE)
    assert found.fused_norms.keys() == packaged.fused_norms.keys()
    for kind, norm in packaged.fused_norms.items():
        assert found.fused_norms[kind].points == norm.points / 2
    assert found.link.bw_gbps == pytest.approx(packaged.link.bw_gbps, rel=0.25)
    list(measurement._link(tmp_path, 4, False, "a command", True))
    assert "fp8_dynamic" in asked[1][1]
    assert "fp8_dynamic" not in asked[3][1]
    # an H200 has FP8, whose norm is then the packaged one
    assert calibrate(tmp_path).sources[-1] == "fused_norm_fp8 of the packaged calibration of NVIDIA H200"


def test_the_machine_is_a_cluster_that_plans_take(gpus: list[str]) -> None:
    gpus += ["NVIDIA H200"] * 4
    found = cluster.parse(measurement.cluster_text(), "here.yaml")
    assert (found.name, found.gpu.name, found.gpus_per_node, found.network) == ("4 x NVIDIA H200", "H200 SXM", 4, None)
    assert "900 GB/s both ways together" in measurement.cluster_text(), "the figure of the link has its source"


def test_cases_are_of_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shape:
        def cases(self, device: torch.device, filled: bool) -> Iterator[tuple[str, bool]]:
            yield device.type, filled

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(measurement, "gpu_of", lambda rank: rank)
    shapes: list[Any] = [Shape(), Shape()]
    assert list(measurement._cases(shapes, True)) == [("cuda", True)] * 2
