"""Results carry the fingerprints of the kernels that made them, and documents say when these have changed."""

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
from shotcast.errors import ConfigError

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
            (row("plain_two_shot", "all_reduce_rms_norm"), ["all_reduce/two_shot"]),
            (row("nccl", "all_reduce_rms_norm"), ["kernels.triton.norm"]),
            (row("gloo", "all_reduce_rms_norm", "cpu"), ["transport.cpu.norm_rows"]),
            (
                row("fp8_static", "all_reduce_rms_norm"),
                [f"all_reduce_rms_norm/{n}" for n in ("one_shot", "two_shot", "vendor")],
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


class TestNote:
    def note(self, tmp_path: Path, *recorded: dict[str, str] | None) -> str:
        paths = []
        for number, fingerprints in enumerate(recorded):
            paths.append(tmp_path / f"{number}.json")
            report.write(paths[-1], report.Result({}, "", "", (ROW,), fingerprints))
        return kernels.note(paths)

    def test_results_of_the_kernels_of_today_need_none(self, tmp_path: Path) -> None:
        assert self.note(tmp_path, kernels.of_rows([ROW, row("two_shot")])) == ""

    def test_libraries_alone_need_none(self, tmp_path: Path) -> None:
        assert self.note(tmp_path, {}) == ""

    def test_names_few_kernels_that_changed(self, tmp_path: Path) -> None:
        now = kernels.of_rows([ROW, row("two_shot")])
        assert (
            self.note(tmp_path, now | {"all_reduce/two_shot": "0"})
            == "*Made by earlier kernels (all_reduce/two_shot).*"
        )

    def test_all_that_changed_need_no_names(self, tmp_path: Path) -> None:
        assert self.note(tmp_path, {"all_reduce/one_shot": "0"}) == "*Made by earlier kernels.*"

    def test_names_the_commit_where_the_result_does(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        report.write(path, report.Result({}, "", "", (ROW,), {"all_reduce/one_shot": "0"}))
        path.write_text(json.dumps(json.loads(path.read_text()) | {"recorded_in": "1604f71"}))
        assert kernels.note([path]) == "*Made by the kernels of commit 1604f71.*"
        assert report.read(path).rows == (ROW,)

    def test_a_kernel_that_does_not_exist_any_more_is_an_earlier_one(self, tmp_path: Path) -> None:
        recorded = kernels.of_rows([ROW]) | {"all_reduce/gone": "0", "other/one_shot": "0", "kernels.triton.gone": "0"}
        said = "*Made by earlier kernels (all_reduce/gone, other/one_shot, gone).*"
        assert self.note(tmp_path, recorded) == said

    def test_results_without_fingerprints_say_so(self, tmp_path: Path) -> None:
        assert self.note(tmp_path, None) == "*Made by kernels whose fingerprints were not recorded.*"

    def test_files_that_differ_are_named(self, tmp_path: Path) -> None:
        said = self.note(tmp_path, None, kernels.of_rows([ROW]), {"all_reduce/one_shot": "0"})
        assert said == (
            "*`0.json`: made by kernels whose fingerprints were not recorded. `2.json`: made by earlier kernels.*"
        )

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3, "kernels": {}}', '{"rows": [], "kernels": 3}'])
    def test_another_file_is_an_error(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"other\.json is not a benchmark result"):
            kernels.note([path])


class TestCommands:
    def test_a_table_has_the_note_below_it(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        report.write(path, report.Result({}, "", "", (ROW,), {"all_reduce/one_shot": "0"}))
        for command in (["table", "--json", str(path)], ["kernels", "--json", str(path)]):
            result = CliRunner().invoke(app, ["bench", *command])
            assert result.exit_code == 0, result.output
            assert result.output.rstrip().endswith("*Made by earlier kernels.*")
        report.write(path, report.Result({}, "", "", (ROW,), kernels.of_rows([ROW])))
        assert "kernels" not in CliRunner().invoke(app, ["bench", "table", "--json", str(path)]).output

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
