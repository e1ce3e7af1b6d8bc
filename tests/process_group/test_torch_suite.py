"""PyTorch's own distributed suite with ranks of the backend "shotcast", and the results that are kept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch_suite

KEPT = Path(__file__).parents[2] / "benchmarks" / "data" / "cpu" / "torch_suite.json"
EARLIER = KEPT.with_name("torch_suite_2_11.json")
PAGE = KEPT.parents[3] / "docs" / "reference" / "compatibility.md"
KINDS = ("passed", "failed", "skipped")
SHORT = [
    "test_all_gather_object_subgroup",
    "test_all_reduce_sum_complex",
    "test_barrier_timeout_full_group",
    "test_gather_checks",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_reduce_full_group_max",
    "test_sparse_all_reduce_sum",
]


def kept_runs() -> dict[tuple[str, int], dict[str, Any]]:
    return {(run["backend"], run["world_size"]): run for run in json.loads(KEPT.read_text())["runs"]}


@pytest.mark.full
def test_short_selection_passes(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.json"
    command = [sys.executable, torch_suite.__file__, "--selection", "gloo", "--world-size", "2", "--out", str(path)]
    done = subprocess.run([*command, *SHORT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(path.read_text())
    assert {name: outcome["outcome"] for name, outcome in outcomes.items()} == dict.fromkeys(SHORT, "passed"), outcomes


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_whole_suite(world_size: int, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        outcomes = torch_suite.run("shotcast", world_size, log=log)
    found, kept = torch_suite.summary("shotcast", world_size, outcomes), kept_runs()["shotcast", world_size]
    assert not found["failed"]
    assert set(found["passed"]) >= set(kept["passed"])
    assert all(map(torch_suite.explanation, found["skipped"])), list(found["skipped"])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_kept_results_contain_those_of_gloo(world_size: int) -> None:
    own, gloo = kept_runs()["shotcast", world_size], kept_runs()["gloo", world_size]
    assert own["failed"] == {}
    assert set(own["passed"]) >= set(gloo["passed"])
    assert len(own["passed"]) == own["counts"]["passed"] >= 90


def test_every_skipped_test_of_kept_results_is_explained() -> None:
    runs = [run for (backend, _), run in kept_runs().items() if backend == "shotcast"]
    why = {reason: torch_suite.explanation(reason) for run in runs for reason in run["skipped"]}
    assert all(why.values()), why
    settled = {name for run in runs for name in run["passed"]}  # or left out where it had the ranks that it needs
    later = set()
    for run in runs:
        for reason, names in run["skipped"].items():
            (later if "runs with" in why[reason] else settled).update(names)
    assert later <= settled


def test_the_page_has_the_kept_counts() -> None:
    page = PAGE.read_text()
    shown = re.findall(r"^\| (\d) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    kept = kept_runs()
    assert [tuple(map(int, row)) for row in shown] == [
        (size, *(kept[backend, size]["counts"][kind] for backend in ("shotcast", "gloo") for kind in KINDS))
        for size in (2, 3, 4)
    ]


def test_the_earliest_version_fails_nothing_either() -> None:
    document = json.loads(EARLIER.read_text())
    assert document["environment"]["versions"]["torch"].startswith("2.11.")
    for run in document["runs"]:
        assert run["backend"] == "shotcast"
        assert run["failed"] == {}
        assert all(map(torch_suite.explanation, run["skipped"]))
        assert run["counts"]["passed"] == len(run["passed"]) >= 100
    assert [run["world_size"] for run in document["runs"]] == [2, 3]
    assert "With the 2.11 suite, no test failed on two and three ranks" in " ".join(PAGE.read_text().split())
