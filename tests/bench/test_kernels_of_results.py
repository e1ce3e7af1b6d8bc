"""Results carry the fingerprints of the kernels that made them."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shotcast.bench import kernels, report
from shotcast.bench.engine_report import EngineRow
from shotcast.cli import app

ROOT = Path(__file__).parents[2]
ROW = report.Row.from_ranks(
    op="all_reduce",
    device="cuda",
    world_size=4,
    dtype="float32",
    algorithm="one_shot",
    nbytes=64,
    medians_us=[1.0],
    p99s_us=[1.0],
    errors=0,
)
ENGINE_ROW = EngineRow("m", "cuda", "bfloat16", "1x1", "auto", 1, 1, 2, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0)


def row(algorithm: str, op: str = "all_reduce", device: str = "cuda", world_size: int = 4) -> report.Row:
    return dataclasses.replace(ROW, algorithm=algorithm, op=op, device=device, world_size=world_size)


class TestNames:
    @pytest.mark.parametrize(
        ("one", "names"),
        [
            (row("two_shot"), ["all_reduce/two_shot"]),
            (row("nccl"), []),
            (row("torch_one_shot"), []),
            (row("gloo", device="cpu"), []),
            (row("auto", "reduce_scatter"), ["reduce_scatter/one_shot", "reduce_scatter/vendor"]),
            (
                row("auto", "reduce_scatter", world_size=2),
                [f"reduce_scatter/{n}" for n in ("one_shot", "ring", "vendor")],
            ),
        ],
    )
    def test_of_a_row(self, one: report.Row, names: list[str]) -> None:
        assert list(kernels.of_rows([one])) == names

    def test_gpus_and_cpu_ranks_have_kernels_of_their_own(self) -> None:
        assert kernels.of_rows([row("ring")]) != kernels.of_rows([row("ring", device="cpu")])

    def test_hosts_have_kernels_of_their_own(self) -> None:
        hosts = dataclasses.replace(row("auto", device="cpu", world_size=8), nodes=8)
        between = {f"all_reduce/{n}" for n in ("nvrar", "nvrar_halving", "nvrar_pairs", "nvrar_two_shot", "vendor")}
        assert set(kernels.of_rows([hosts])) == between
        one_host = kernels.of_rows([row("vendor", device="cpu")])
        assert kernels.of_rows([hosts])["all_reduce/vendor"] != one_host["all_reduce/vendor"]

    def test_of_an_engine(self) -> None:
        alone = kernels.of_engine([ENGINE_ROW])
        assert "kernels.triton.gemv" in alone
        assert not any("/" in name for name in alone), "one rank does not communicate"
        two = kernels.of_engine([dataclasses.replace(ENGINE_ROW, layout="2x1")])
        assert {"all_reduce/one_shot", "all_reduce_rms_norm/two_shot", "send/one_shot"} < two.keys()
        assert "all_reduce/two_shot_fp8" not in two
        by_nccl = kernels.of_engine([dataclasses.replace(ENGINE_ROW, layout="2x1", algorithm="nccl")])
        assert "all_reduce/one_shot" not in by_nccl
        cpu = kernels.of_engine([dataclasses.replace(ENGINE_ROW, device="cpu")])
        assert {"kernels.cpu.gemv", "kernels.cpu.attention"} < cpu.keys()


class TestCommands:
    def test_bench_writes_fingerprints(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        command = ["bench", "all-reduce", "--device", "cpu", "--world-size", "2", "-b", "64", "-e", "64", "-n", "5"]
        result = CliRunner().invoke(app, [*command, "--algorithms", "one_shot,gloo", "--json", str(path)])
        assert result.exit_code == 0, result.output
        assert json.loads(path.read_text())["kernels"] == kernels.of_rows([row("one_shot", device="cpu")])


def test_all_stored_results_of_kernels_have_fingerprints() -> None:
    for path in (ROOT / "benchmarks" / "data").rglob("*.json"):
        if not path.name.startswith(
            ("frontend", "llama_cpp", "server_fuzz", "torch_suite")
        ) and path.parent.name not in (
            "exploration",
            "external",
        ):
            document = json.loads(path.read_text())
            for result in document.get("runs", [document]):  # runs of stress have kernels of their own
                assert result.get("kernels"), path


@pytest.mark.parametrize("name", ["linear", "decode_attention", "prompt_attention"])
def test_scripts_write_the_fingerprints_of_their_kernels(name: str) -> None:
    tree = ast.parse((ROOT / "research" / f"{name}.py").read_text())
    modules = [
        argument.value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "kernels.of_modules"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]
    assert modules
    assert list(kernels.of_modules(*modules)) == modules
