"""research/bench_hosts.py: what it refuses, and real runs on simulated hosts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import bench_hosts
import engine_results
import pytest
import torch
import transformers
from typer.testing import CliRunner

from hosts import needs_hosts
from shotcast.errors import ConfigError

ROOT = Path(__file__).parents[2]


def failure(*arguments: str) -> BaseException | None:
    return CliRunner().invoke(bench_hosts.app, arguments).exception


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--delay-us", "1000"], "for simulated hosts: say --hosts too"),
        (["--ranks-per-host", "2"], "for simulated hosts: say --hosts too"),
        ([], "say how many --hosts"),
        pytest.param(["--hosts", "1"], "joins 2 to 64 hosts, not 1", marks=needs_hosts),
    ],
)
def test_wrong_options(args: list[str], text: str) -> None:
    error = failure("collective", *args, "all-reduce")
    assert isinstance(error, ConfigError)
    assert text in str(error)


def test_layouts_have_all_ranks() -> None:
    error = failure("engine", "--hosts", "2", "--layouts", "1x2,2x2")
    assert isinstance(error, ConfigError)
    assert str(error) == "2 ranks are divided by a layout; 2x2 has 4"


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root (as in `sudo make bench-hosts`)" in str(failure("collective", "--hosts", "2", "all-reduce"))


def test_make_says_that_it_needs_root(tmp_path: Path) -> None:
    """The target fails before it installs or measures anything."""
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(
        ["make", "--silent", "bench-hosts", "BIN=/nowhere", "INSTALLED="],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == "network namespaces need root: sudo make bench-hosts"


@needs_hosts
@pytest.mark.full
def test_two_hosts_beside_gloo(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    result = CliRunner().invoke(
        bench_hosts.app,
        [
            *("collective", "--hosts", "2", "--delay-us", "500", "--json", str(file), "all-reduce", "--iters", "8"),
            *("--seconds", "0.02", "--warmup_iters", "1", "-b", "1K", "-e", "64K", "-f", "64"),
            *("--algorithms", "nvrar,auto,gloo"),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "network: 500 us one way. Unloaded, the relay adds" in result.stdout
    document = json.loads(file.read_text())
    network = document["network"]
    assert network["config"] == {"hosts": 2, "ranks_per_host": 1, "delay_us": 500.0, "bandwidth_gbps": 0.0}
    assert network["throughput_gbps"] > 0
    assert network["packets"] > 100
    assert {row["algorithm"] for row in document["rows"]} == {"nvrar", "auto", "gloo"}
    for row in document["rows"]:
        assert (row["nodes"], row["delay_us"], row["errors"]) == (2, 500.0, 0)
        assert row["time_us"] > 500
        assert (row["predicted_us"] is None) == (row["algorithm"] == "gloo")


@needs_hosts
@pytest.mark.full
@pytest.mark.timing
def test_the_engine_beside_gloo(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    stored = tmp_path / "a.json"
    options = ["--layouts", "4x1,2x2", "--batches", "1", "--prompt", "8", "--output", "9", "--rounds", "1"]
    hosts = ["--hosts", "2", "--ranks-per-host", "2", "--delay-us", "2000", "--algorithms", "auto,gloo"]
    words = ["engine", "-m", str(tmp_path), *options, *hosts, "--json", str(stored)]
    result = CliRunner().invoke(bench_hosts.app, words)
    assert result.exit_code == 0, result.output
    rows = {(row.layout, row.algorithm): row for row in engine_results.read(stored)}
    assert list(rows) == [(layout, algorithm) for layout in ("4x1", "2x2") for algorithm in ("auto", "gloo")]
    assert {(row.hosts, row.delay_us, row.device) for row in rows.values()} == {(2, 2000.0, "cpu")}
    # two layers reduce four times, after the embedding once, and gather logits; each crosses the network once or more
    assert rows["4x1", "auto"].tpot_ms > 5 * 2.0
    assert rows["4x1", "gloo"].tpot_ms > rows["4x1", "auto"].tpot_ms
    assert result.output.split()[:2] == ["hosts", "one"]
