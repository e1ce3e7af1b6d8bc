"""The engine on ranks that torchrun started on several hosts, whose part this machine takes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import engine_nodes_targets as targets
import pytest
import transformers

from job_ranks import other_ranks
from shotcast.engine.llm import LLM
from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import ConfigError, EngineDead
from shotcast.launcher.monitor import wait_for_reports
from shotcast.launcher.spawn import RankGroup

PROMPTS = [[1, 2, 3], [4, 5], [6] * 40]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    save(folder)
    return str(folder)


def save(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)


def options(tensor: int, stages: int, **others: Any) -> dict[str, Any]:
    layout = {"tensor_parallel": tensor, "pipeline_parallel": stages, "device": "cpu", "max_model_len": 256}
    return layout | {"timeout_s": 100.0} | others


def codes(others: RankGroup) -> list[Any]:
    wait_for_reports(others.ranks, time.monotonic() + 300, stop_at_failure=False)
    for rank in others.ranks:
        rank.process.join(300)
    return [rank.value if rank.succeeded else rank.process.exitcode for rank in others.ranks]


@pytest.mark.parametrize(
    ("tensor", "stages", "planned"),
    [(2, 2, False), (2, 2, True), pytest.param(4, 1, False, marks=pytest.mark.full)],
    ids=["2x2", "auto", "4x1"],
)
def test_outputs_are_those_of_one_host(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    model: str,
    tensor: int,
    stages: int,
    planned: bool,
) -> None:
    """The layout is given, or rank 0 plans it and tells the others."""
    monkeypatch.delenv("SHOTCAST_CALIBRATION", raising=False)
    given = options(tensor, stages)
    with LLM(model, **given) as llm:
        expected = [output.tokens for output in llm.generate(PROMPTS, greedy(12))]
    if planned:
        given = {name: value for name, value in given.items() if "parallel" not in name} | {"layout": "auto"}
    with other_ranks(monkeypatch, 4, 2, targets.member, model, given) as others:
        with LLM(model, **given) as llm:
            assert (llm.config.tensor_parallel, llm.config.pipeline_parallel) == (tensor, stages)
            assert [output.tokens for output in llm.generate(PROMPTS, greedy(12))] == expected
            assert len(llm.pids) == 1  # the others are processes of the job
            assert os.getpgid(llm.pids[0]) != os.getpgid(0)  # signals to the group of this process do not reach it
        assert codes(others) == [0, 0, 0]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("running", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_killed_rank_of_another_host_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], model: str, running: bool
) -> None:
    with (
        other_ranks(monkeypatch, 4, 2, targets.member, model, options(2, 2)) as others,
        LLM(model, **options(2, 2)) as llm,
    ):
        stream = llm.stream([5], greedy(250))
        next(stream)
        if not running:
            list(stream)
        os.kill(others.pids[2], signal.SIGKILL)
        started = time.monotonic()
        while llm.dead is None:
            assert time.monotonic() - started < 50
            time.sleep(0.01)
        with pytest.raises(EngineDead, match=r"rank 3 failed: host .*: its process ended, or its host"):
            list(stream) if running else llm.generate([[1]])
        assert codes(others) == [1, 1, -signal.SIGKILL]
        assert time.monotonic() - started < 90  # of 100
    errors = capfd.readouterr().err
    assert "rank 1 ends: rank 3 failed" in errors
    assert "rank 2 ends: rank 3 failed" in errors


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (options(1, 1), "tensor_parallel x pipeline_parallel is 1 x 1, but the job has 2 ranks: they have to be equal"),
        (options(2, 1, max_model_len=128), "max_model_len is 256 on rank 1 .* and 128 on rank 0"),
    ],
)
def test_what_does_not_fit_the_job_is_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, model: str, own: dict[str, Any], message: str
) -> None:
    theirs = own if own["tensor_parallel"] == 1 else options(2, 1)
    with other_ranks(monkeypatch, 2, 1, targets.member, model, theirs) as others:
        with pytest.raises(ConfigError, match=message) as refusal:
            LLM(model, **own)
        assert codes(others) == [f"ConfigError: {refusal.value}"]


def test_hosts_with_other_weights_are_refused(monkeypatch: pytest.MonkeyPatch, model: str, tmp_path: Path) -> None:
    save(tmp_path)  # the same sizes, other values
    with other_ranks(monkeypatch, 2, 1, targets.member, str(tmp_path), options(2, 1)) as others:
        with pytest.raises(
            ConfigError, match=r"not started alike: model\.safetensors is of \d+ bytes, digest"
        ) as refusal:
            LLM(model, **options(2, 1))
        assert codes(others) == [f"ConfigError: {refusal.value}"]


def test_a_host_without_the_model_is_named(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    with other_ranks(monkeypatch, 2, 1, targets.member, "/no/such/model", options(2, 1)) as others:
        with pytest.raises(ConfigError, match=r"rank 1 \(host .*\): there is no model '/no/such/model'"):
            LLM(model, **options(2, 1))
        (found,) = codes(others)
        assert found.startswith("ConfigError: there is no model '/no/such/model'")
