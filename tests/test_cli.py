"""The command line: the commands that people type, and the errors that they read."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import shotcast
from shotcast.cli import app
from shotcast.cli.engine_options import importing
from shotcast.cli.options import command_line
from shotcast.launcher import rank_server
from shotcast.memory.holdings import HeldMemory, Notice
from shotcast.wire import LaunchShape, NodeShape

pytestmark = pytest.mark.long

QUICK = ["--device", "cpu", "--iters", "8", "--seconds", "0.02", "--warmup_iters", "1"]


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def shell(*args: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shotcast", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


def invoked(*args: str | Path, stdin: str | None = None) -> Result:
    """A command that succeeds, in this process, which has loaded PyTorch."""
    result = CliRunner().invoke(app, list(map(str, args)), input=stdin)
    assert result.exit_code == 0, result.output
    return result


def refused(*args: str) -> str:
    """Return the one line that a refused command prints."""
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("shotcast: ")
    return lines[0]


def test_version() -> None:
    result = shell("--version")
    assert (result.returncode, result.stdout) == (0, f"shotcast {shotcast.__version__}\n")


@pytest.mark.full
@pytest.mark.timing
def test_starts_quickly() -> None:
    best = 60.0
    for _ in range(3):
        start = time.monotonic()
        assert shell("bench", "all-reduce", "--help").returncode == 0
        best = min(best, time.monotonic() - start)
    assert best < 1.0, "help takes as long as importing torch"


@pytest.mark.parametrize("args", [[], ["bench"]])
def test_no_command_shows_help(args: list[str]) -> None:
    assert "Usage" in CliRunner().invoke(app, args).output


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    notice = Notice()
    notice.say("cuda:0", HeldMemory(1 << 20, 1 << 20, 2, 1))
    result = invoked("doctor")
    notice.forget()
    assert "1 MiB of cuda:0 (2 shared and 1 exclusive communicators)" in result.stdout
    for words in ("processor", "cores usable", "/dev/shm", "torch ", "CPU ranks", "torch.distributed", "Ray", "vLLM"):
        assert words in result.stdout


def test_doctor_for_programs() -> None:
    notice = Notice()
    notice.say("cpu", HeldMemory(0, 1 << 20))
    result = invoked("doctor", "--json")
    notice.forget()
    found = json.loads(result.stdout)
    assert list(found) == ["host", "processes", "extras", "integrations", "findings"]
    assert found["host"]["cores"] >= 1
    assert found["processes"][str(os.getpid())] == {"cpu": {"bytes": 1 << 20, "used": 0, "shared": 0, "exclusive": 0}}
    assert {one["name"] for one in found["integrations"]} == {"torch.distributed", "Ray", "vLLM", "SGLang"}
    assert all(one["active"] == (not one["unsupported_reason"]) for one in found["integrations"])
    assert {one["level"] for one in found["findings"]} <= {"good", "note", "problem"}


@pytest.mark.parametrize(
    ("shell_name", "words", "completed"),
    [
        ("bash", "shotcast do", ["doctor"]),
        ("bash", "shotcast bench all-", ["all-reduce", "all-gather", "all-to-all"]),
        ("zsh", "shotcast doctor --js", ["--json"]),
        ("fish", "shotcast ser", ["serve"]),
    ],
)
def test_shells_complete_words(shell_name: str, words: str, completed: list[str]) -> None:
    """They call the program for each word, in the way that --install-completion writes into their settings."""
    result = shell(
        _SHOTCAST_COMPLETE=f"complete_{shell_name}",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
        _TYPER_COMPLETE_ARGS=words,
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert result.returncode == 0, result.stderr
    found = result.stdout
    for word in completed:
        assert word in found
    assert "chat" not in found


def test_completion_is_installed_for_a_shell(tmp_path: Path) -> None:
    result = shell("--install-completion", "bash", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert result.returncode == 0, result.stderr
    assert "shotcast" in (tmp_path / ".bashrc").read_text()


def test_doctor_says_which_packaged_tables_earlier_kernels_made() -> None:
    from shotcast.cli.doctor import _packaged_tables
    from shotcast.collectives.choice.table import all_packaged
    from shotcast.collectives.registry import registered

    host = SimpleNamespace(gpus=[SimpleNamespace(name="NVIDIA H200")])
    lines = _packaged_tables(host)
    aged = [table for table in all_packaged(registered()) if table.earlier_kernels]
    assert len(lines) == len(aged)
    for table, line in zip(aged, lines, strict=True):
        assert line.startswith(f"packaged table {table.name}: made by earlier kernels (")
        assert line.endswith(f"; {table.earlier_kernels}; `shotcast tune` makes one for SHOTCAST_TABLE")
    assert _packaged_tables(SimpleNamespace(gpus=[])) == []


class TestBench:
    @pytest.mark.every(3)
    @pytest.mark.parametrize("op", ["all-reduce", "reduce-scatter", "all-gather"])
    def test_table(self, op: str) -> None:
        result = invoked("bench", op, *QUICK, "-b", "64", "-e", "1K", "-f", "16", "--world-size", "2", "-d", "bfloat16")
        rows = [line.split() for line in result.stdout.splitlines() if line.split()[2:3] == ["bfloat16"]]
        assert {row[0] for row in rows} == {"64", "1024"}
        assert {row[4] for row in rows} >= {"ring", "one_shot", "gloo"}
        assert {row[8] for row in rows} == {"0"}

    def test_takes_what_users_of_nccl_tests_type(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        monkeypatch.setattr("shotcast.bench.harness.run", lambda config, ranks: asked.append((config, ranks)) or [])
        names = {"half": "float16", "bf16": "bfloat16", "float": "float32"}
        for name in names:
            words = ["-b", "8", "-e", "8", "-f", "2", "-g", "3", "-n", "20", "-w", "5", "-c", "1", "-d", name]
            refused("bench", "all-reduce", "--device", "cpu", *words, "--algorithms", "two-shot, one_shot")
        assert [(config.dtype, ranks) for config, ranks in asked] == [(dtype, 3) for dtype in names.values()]
        assert {config.algorithms for config, _ in asked} == {("two_shot", "one_shot")}

    def test_the_nodes_of_the_ranks_are_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of a job under torchrun, and logical ones."""
        asked: list[int] = []
        monkeypatch.setattr("shotcast.bench.harness.run", lambda config, ranks: asked.append(config.nodes) or [])
        monkeypatch.setattr("shotcast.bench.harness.run_under_torchrun", lambda c: asked.append(c.nodes) or [])
        refused("bench", "all-reduce", "--device", "cpu", "-g", "4")
        monkeypatch.setenv("SHOTCAST_RANKS_PER_NODE", "2")
        refused("bench", "all-reduce", "--device", "cpu", "-g", "4")
        monkeypatch.delenv("SHOTCAST_RANKS_PER_NODE")
        job = {"RANK": 0, "WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "host", "MASTER_PORT": 1}
        for name, value in job.items():
            monkeypatch.setenv(name, str(value))
        refused("bench", "all-reduce", "--device", "cpu")
        assert asked == [1, 2, 3]

    @pytest.mark.full
    def test_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        result_file, picture = tmp_path / "result.json", tmp_path / "picture.png"
        arguments = [
            "bench", "all-reduce", *QUICK, "-b", "64", "-e", "4K", "-f", "8", "--world-size", "2,3",
            "--algorithms", "ring,two_shot,gloo", "--json", str(result_file), "--plot", str(picture),
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["shotcast", *arguments])
        invoked(*arguments)
        document = json.loads(result_file.read_text())
        assert document["command"].startswith("shotcast bench all-reduce --device cpu")
        assert document["environment"]["versions"]["torch"]
        points = [(row["world_size"], row["nbytes"], row["algorithm"]) for row in document["rows"]]
        names = ("ring", "two_shot", "gloo")
        assert points == [(n, size, name) for n in (2, 3) for size in (64, 512, 4096) for name in names]
        assert picture.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.full
    def test_under_torchrun(self, tmp_path: Path) -> None:
        result_file = tmp_path / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "shotcast", "bench", "all-reduce", *QUICK, "-b", "64", "-e", "64", "--json", str(result_file)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("all_reduce, 2 cpu ranks") == 1, "every rank printed"
        assert {row["world_size"] for row in json.loads(result_file.read_text())["rows"]} == {2}

    def test_wrong_results_are_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from shotcast.bench import harness
        from shotcast.bench.report import Row

        point = Row.from_ranks(
            op="all_reduce", device="cpu", world_size=2, dtype="float32", algorithm="ring", nbytes=64,
            medians_us=[], p99s_us=[], errors=3,
        )  # fmt: skip
        monkeypatch.setattr(harness, "run", lambda config, world_size: [point])
        result = CliRunner().invoke(app, ["bench", "all-reduce", "--device", "cpu", "--world-size", "2"])
        assert result.exit_code == 1
        assert "some results were wrong" in result.stderr


class TestTune:
    QUICK = ("--device", "cpu", "--world-size", "2", "--seconds", "0.02", "-d", "float32", "--force")

    @pytest.mark.full
    def test_a_table_is_written_and_merged(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        args = ("tune", *self.QUICK, "-b", "256", "-e", "64K", "-f", "16", "-o", path)
        result = shell(*args, "--op", "all_reduce")
        assert result.returncode == 0, result.stderr
        lines = [line.split() for line in result.stdout.splitlines()]
        assert {(line[3], line[4]) for line in lines if line[:3] == ["eager", "all_reduce", "float32"]} >= {
            ("256", "B"),
            ("4", "KiB"),
            ("64", "KiB"),
        }
        assert f"wrote {path}; to use it: export SHOTCAST_TABLE={path}" in result.stdout
        first = json.loads(path.read_text())
        assert first["world_size"] == 2
        assert first["entries"].keys() == {"eager"}
        (run,) = first["provenance"].values()
        assert run["command"].startswith("shotcast tune --device cpu")
        assert run["versions"]["torch"]
        # pretend that another day made it
        path.write_text(path.read_text().replace(next(iter(first["provenance"])), "2020-01-01"))
        invoked(*args, "--op", "reduce_scatter", "--merge")
        second = json.loads(path.read_text())
        assert second["entries"]["eager"].keys() == {"all_reduce", "reduce_scatter"}
        assert second["entries"]["eager"]["all_reduce"] == first["entries"]["eager"]["all_reduce"]
        assert len(second["provenance"]) == 2
        assert len(second["measurements"]) > len(first["measurements"])

    @pytest.mark.full
    def test_under_torchrun(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "shotcast", "tune", "--device", "cpu", "--seconds", "0.01", "--op", "all_gather"]
        command += ["-b", "64", "-e", "64", "-d", "bfloat16", "-o", str(path)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count(f"wrote {path}") == 1, "every rank wrote"
        assert json.loads(path.read_text())["world_size"] == 2

    def test_the_file_is_named_as_packaged_ones_are(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from shotcast.bench import tune

        monkeypatch.chdir(tmp_path)
        for ranks_per_node, shape, end in (("", NodeShape(1, 2), "_x2.json"), ("1", NodeShape(2, 1), "_2x1.json")):
            monkeypatch.setenv("SHOTCAST_RANKS_PER_NODE", ranks_per_node)
            monkeypatch.setattr(tune, "run", lambda config, world_size, shape=shape: ("Some CPU", shape, []))
            result = CliRunner().invoke(app, ["tune", *self.QUICK])
            assert result.exit_code == 0, result.output
            (file,) = tmp_path.iterdir()
            assert file.name.endswith(end)
            written = json.loads(file.read_text())
            assert (written["part"], written.get("nodes", 1)) == ("Some CPU", shape.nodes)
            file.unlink()

    def test_wrong_results_are_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from shotcast.bench import tune
        from shotcast.collectives.choice.choice import Candidate

        best = tune.Timed("one_shot", LaunchShape(), True, 1.0)
        point = tune.TunePoint(
            "eager", "all_reduce", "float32", 64, tune.TunedChoice(best, (), (Candidate("ring", LaunchShape()),))
        )
        monkeypatch.setattr(tune, "run", lambda config, world_size: ("Some CPU", NodeShape(1, 2), [point]))
        result = CliRunner().invoke(app, ["tune", *self.QUICK, "-o", str(tmp_path / "t.json")])
        assert result.exit_code == 1
        assert "all_reduce of float32, 64 B, eager: ring with LaunchShape" in result.stderr
        assert "gives wrong results" in result.stderr

    @pytest.mark.parametrize(
        ("args", "text"),
        [
            (["--op", "broadcast"], "op to tune must be among all_reduce, reduce_scatter, all_gather, not broadcast"),
            (["--dtype", "int8"], "dtype to tune must be among float32, float16, bfloat16, not int8"),
            (["--mode", "graph"], "CPU ranks have no graphs; their only mode is eager"),
            (["--world-size", "2,4"], "a table is for one number of ranks; tune each number separately"),
            (["-b", "2K", "-e", "1K"], "the smallest first"),
        ],
    )
    def test_errors_are_one_line(self, args: list[str], text: str) -> None:
        assert text in refused("tune", "--device", "cpu", *args)

    @pytest.mark.parametrize("name", ["", "file/t.json"])
    def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        from shotcast.bench import tune

        monkeypatch.setattr(tune, "run", lambda config, world_size: pytest.fail("measured"))
        (tmp_path / "file").touch()
        assert f"cannot write {tmp_path / name}: " in refused("tune", *self.QUICK, "-o", str(tmp_path / name))

    def test_a_file_that_cannot_be_merged_is_refused_before_anything_is_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from shotcast.bench import tune

        monkeypatch.setattr(tune, "run", lambda config, world_size: pytest.fail("measured"))
        path = tmp_path / "t.json"
        path.write_text('{"format": 1}')
        assert "has format 1; this version reads format 3" in refused("tune", *self.QUICK, "--merge", "-o", str(path))


class TestErrors:
    @pytest.mark.parametrize(
        ("args", "text"),
        [
            (["-b", "64X"], "not a size: '64X'"),
            (["-b", "2K", "-e", "1K"], "the smallest first"),
            (["-b", "0"], "at least 1 byte"),
            (["--world-size", "two"], "whole numbers"),
            (["--world-size", "1"], "at least 2 ranks"),
            (["--algorithms", "bring"], "unknown algorithms for all_reduce on cpu: bring; known: one_shot,"),
            (["--dtype", "complex64"], "choose from float32"),
            (["--op", "mean"], "choose from sum, prod"),
            (["--op", "avg", "-d", "int"], "avg of int32 is not measured"),
            (["--iters", "1"], "at least 5"),
            (["--plot", "picture.docx"], "picture.docx has the suffix .docx"),
            (["--json", "/"], "cannot write /: Is a directory"),
            (["--json", "/proc/t.json"], "cannot write /proc/t.json: "),
            (["--json", "/nowhere/t.json"], "cannot write /nowhere/t.json: there is no folder /nowhere; make it first"),
            (["--json", f"/{'a' * 300}/t.json"], "make it first"),
        ],
    )
    def test_is_one_line(self, args: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error comes before anything is measured."""
        monkeypatch.setattr("shotcast.bench.harness.run", lambda config, world_size: pytest.fail("measured"))
        assert text in refused("bench", "all-reduce", "--device", "cpu", *args)

    def test_copies_take_no_reduction(self) -> None:
        assert "all_gather takes no reduction" in refused("bench", "all-gather", "--device", "cpu", "-o", "max")

    def test_cuda_without_gpus(self) -> None:
        import torch

        too_many = torch.cuda.device_count() + 2
        assert "GPUs" in refused("bench", "all-reduce", "--device", "cuda", "--world-size", str(too_many))

    def test_incomplete_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        assert "environment is incomplete" in refused("bench", "all-reduce", "--device", "cpu")

    def test_a_failing_rank_is_one_line(self) -> None:
        line = refused("bench", "all-reduce", "--device", "cpu", "--timeout", "0.001")
        assert "had not finished within 0.001 s" in line

    @pytest.mark.full
    def test_from_a_shell(self) -> None:
        result = shell("bench", "all-reduce", "--device", "cpu", "--world-size", "1")
        assert result.returncode == 2
        assert result.stderr == "shotcast: a collective takes at least 2 ranks\n"

    @pytest.mark.full
    def test_traceback_on_request(self) -> None:
        result = shell("--traceback", "bench", "all-reduce", "--device", "cpu", "--world-size", "1")
        assert result.returncode == 1
        assert "Traceback" in result.stderr


class TestEngine:
    @pytest.mark.full
    def test_generate_answers_and_says_what_it_took(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SHOTCAST_CALIBRATION", raising=False)
        planned = ["--layout", "auto:2", "--device", "cpu"]
        result = invoked("generate", "smollm2", "--chat", *planned, "-n", "10", "What is the capital of France?")
        assert "Paris" in result.stdout
        assert result.stderr.startswith("layout 2x1: as many of 2 CPU ranks a stage as a host has, since")
        told = re.search(r"(\d+) tokens in, (\d+) out on 2 cpu ranks; first after \d+ ms", result.stderr)
        assert told is not None, result.stderr
        assert int(told[2]) <= 10
        assert re.search(r"\d+\.\d% of the time in communication", result.stderr)

    @pytest.mark.full
    def test_chat_keeps_the_conversation(self) -> None:
        asked = "Name a fruit.\nName another one.\n\nnever asked\n"
        result = invoked("chat", "smollm2", "--temperature", "0", "-n", "12", stdin=asked)
        assert len([line for line in result.stdout.splitlines() if line.strip()]) >= 2

    @pytest.mark.full
    def test_chat_samples_as_the_model_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Options come first, then the model's file, then the command's own defaults."""
        from shotcast.engine.llm import LLM
        from shotcast.engine.sampling_params import SamplingParams

        sampled: list[SamplingParams] = []
        stream = LLM.stream

        def recorded(llm: LLM, prompt: Any, params: SamplingParams) -> Any:
            sampled.append(params)
            return stream(llm, prompt, params)

        monkeypatch.setattr(LLM, "stream", recorded)
        (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 5, "max_new_tokens": 2}')
        invoked("chat", "smollm2", "--generation-config", str(tmp_path), "--top-k", "0", stdin="Hello\n\n")
        assert sampled == [SamplingParams(temperature=0.3, top_p=0.95, top_k=0, max_tokens=2)]

    def test_interrupt_before_an_answer_takes_the_question_back(self, capsys: pytest.CaptureFixture[str]) -> None:
        """An interrupt later keeps the part of the answer that has arrived."""
        from shotcast.cli.generate import _answer
        from shotcast.engine.outputs import RequestOutput
        from shotcast.engine.sampling_params import SamplingParams

        class Interrupted:
            def __init__(self, *deltas: str):
                self.deltas, self.tokenizer = deltas, self

            def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
                return [1]

            def stream(self, tokens: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
                for delta in self.deltas:
                    yield RequestOutput("r", (1,), text=delta, delta=delta)
                raise KeyboardInterrupt

        asked = [{"role": "user", "content": "why?"}]
        _answer(Interrupted("because"), asked, SamplingParams())  # type: ignore[arg-type]
        assert asked[1:] == [{"role": "assistant", "content": "because"}]
        asked.append({"role": "user", "content": "why that?"})
        _answer(Interrupted(), asked, SamplingParams())  # type: ignore[arg-type]
        assert len(asked) == 2
        assert capsys.readouterr().out == "because\n\n"

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (["generate", "nothing-here", "x"], "there is no model 'nothing-here'"),
            (["generate", "random:llama-9", "x"], "llama-9"),
            (["generate", "smollm2", "x", "--temperature", "-1"], "temperature must be a number of at least 0"),
            (["generate", "smollm2", "x", "-d", "int8"], "dtype must be one of float32, bfloat16, float16"),
            (["generate", "smollm2", "x", "--device", "cuda"], "no usable GPU"),
            (["serve", "smollm2", "--kv-cache", "lots"], "lots"),
            (["serve", "random:smollm2-135m"], "random:smollm2-135m has no tokenizer"),
            (["serve", "smollm2", "--max-queue", "0"], "max_queue must be a whole number of at least 1"),
            (["bench", "engine", "--layouts", "2"], "a layout must be TxP"),
        ],
    )
    def test_refused(self, args: list[str], said: str) -> None:
        assert said in refused(*args)


def test_results_record_files_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shotcast", "bench", "all-reduce", "--json", "/some/folder/x.json", "-e", "64K"])
    assert command_line() == "shotcast bench all-reduce --json x.json -e 64K"


def test_ranks_are_prepared_while_a_command_imports_and_collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(rank_server, "start_for_engine", lambda: started.append(gc.isenabled()))
    with importing():
        assert started
        assert not gc.isenabled()
    assert gc.isenabled()
