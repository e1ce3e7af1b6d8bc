"""The columns, bandwidths and files of a benchmark."""

from __future__ import annotations

import io
import json
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from rich.console import Console

from shotcast.bench import report
from shotcast.bench.report import Row


def row(algorithm: str = "ring", nbytes: int = 1 << 20, time_us: float = 100.0, **change: object) -> Row:
    facts = {"op": "all_reduce", "device": "cpu", "world_size": 4, "dtype": "bfloat16", "errors": 0, **change}
    return Row.from_ranks(
        [time_us - 3, time_us], [time_us * 3, time_us * 2], algorithm=algorithm, nbytes=nbytes, **facts
    )


@pytest.mark.parametrize(
    ("op", "n", "factor"),
    [
        ("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5), ("all_reduce", 8, 1.75),
        ("reduce_scatter", 4, 0.75), ("all_gather", 8, 0.875), ("all_to_all", 4, 0.75), ("broadcast", 4, 1.0),
        ("reduce", 8, 1.0), ("gather", 2, 0.5), ("scatter", 4, 0.75),
    ],
)  # fmt: skip
def test_busbw_factors_are_those_of_nccl_tests(op: str, n: int, factor: float) -> None:
    assert report.busbw_factor(op, n) == factor


def test_row_takes_the_slowest_rank() -> None:
    point = row()
    assert (point.time_us, point.p99_us, point.skew_us) == (100.0, 300.0, 3.0)
    assert point.algbw_gbps == pytest.approx(10.48576)
    assert point.busbw_gbps == pytest.approx(15.72864)


def test_rows_have_the_times_of_single_rounds() -> None:
    point = row(rounds_us=[[3.0, 4.0, 1.0], [5.0, 2.0, 2.0]])
    assert (point.lowest_us, point.highest_us) == (2.0, 5.0), "the slowest rank counts in each round"


def test_the_algorithm_that_auto_took_is_named() -> None:
    rows = [row("auto", chosen="two_shot"), row("ring", time_us=200.0), row("auto", 2 << 20, chosen="ring")]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.table(rows))
    names = re.findall(r"sum +(\S+) ", console.export_text())
    assert names == ["auto:two_shot", "ring", "auto:ring"]


def test_mean_bandwidths_are_of_implementations_that_served_every_size() -> None:
    rows = [row("auto"), row("ring"), row("auto", 2 << 20)]
    assert report.mean_bandwidths(rows) == "auto 23.59"
    assert report.mean_bandwidths(rows[:2]) == "", "of one size it is that of the row"


def test_results_are_written_with_what_made_them(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = report.Result.now([row()], environment={}, command="shotcast bench all-reduce", kernels={"a/b": "1"})
    report.write(path, result)
    document = json.loads(path.read_text())
    assert list(document) == ["environment", "command", "date", "kernels", "rows"]
    assert [Row(**one) for one in document["rows"]] == [row()]
    assert list(document["rows"][0]) == [
        "op", "device", "world_size", "dtype", "algorithm", "nbytes", "time_us", "p99_us", "skew_us", "algbw_gbps",
        "busbw_gbps", "errors", "nodes", "predicted_us", "lowest_us", "highest_us", "reduction", "chosen",
    ]  # fmt: skip


def test_wrong_result_has_no_time() -> None:
    point = Row.from_ranks(
        op="all_reduce", device="cpu", world_size=2, dtype="float32", algorithm="ring", nbytes=8,
        medians_us=[], p99s_us=[], errors=3,
    )  # fmt: skip
    assert (point.time_us, point.algbw_gbps, point.errors) == (None, None, 3)


@pytest.mark.parametrize(
    ("op", "count"),
    [
        ("all_reduce", 1 << 19), ("reduce_scatter", 1 << 17), ("all_gather", 1 << 17), ("broadcast", 1 << 19),
        ("reduce", 1 << 19), ("all_to_all", 1 << 17),
    ],
)  # fmt: skip
def test_count(op: str, count: int) -> None:
    assert row(op=op).count == count


def text_of(rows: list[Row]) -> list[str]:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(report.table(rows))
    return capture.get().splitlines()


def test_table_has_the_columns_of_nccl_tests() -> None:
    title, header, units, first, *_ = text_of([row(), row("one_shot", time_us=12.345)])
    assert title.split() == ["all_reduce,", "4", "cpu", "ranks"]
    assert header.split() == ["size", "time", "algbw", "busbw", "p99", "skew"]
    assert units.split() == [
        "(B)", "count", "type", "redop", "algorithm", "(us)", "(GB/s)", "(GB/s)", "#wrong", "(us)", "(us)"
    ]  # fmt: skip
    assert first.split() == [
        "1048576", "524288", "bfloat16", "sum", "ring", "100.0", "10.49", "15.73", "0", "300.0", "3.00"
    ]  # fmt: skip


def test_table_of_hosts_compares_with_the_model() -> None:
    hosts = {"nodes": 2}
    own = replace(row("auto", time_us=50.0), **hosts, predicted_us=40.0)
    title, header, units, first, second, *_ = text_of([own, replace(row("gloo", time_us=100.0), **hosts)])
    assert title.strip().split(", ") == ["all_reduce", "4 cpu ranks on 2 hosts"]
    assert header.split()[-1] == "model"
    assert units.split()[-1] == "(us)"
    assert (first.split()[-1], second.split()[-1]) == ("40.00", "-")


def test_table_shows_what_was_not_compared_or_timed() -> None:
    wrong = Row.from_ranks(
        op="all_gather", device="cpu", world_size=4, dtype="float32", algorithm="ring", nbytes=64,
        medians_us=[], p99s_us=[], errors=7,
    )  # fmt: skip
    lines = text_of([wrong, row("gloo", 64, op="all_gather", dtype="float32", errors=None)])
    assert lines[3].split() == ["64", "4", "float32", "none", "ring", "-", "-", "-", "7", "-", "-"]
    assert lines[4].split()[8] == "N/A"


OTHERS = (
    "llama_cpp",
    "engine_",
    "linear",
    "overlap_",
    "shaped_products",
    "decode_attention",
    "prompt_attention",
    "frontend",
    "server_fuzz",
    "fault_matrix",
    "deepspeed_",
    "torch_suite",
    "stress",
    "sm_wires",
    "launch_sweep",
    "few_sms",
    "legal_programs",
    "training",
    "frameworks",
    "process_group",
    "calibration_",
    "kernels_",
    "served_trace",
    "nvrar_",
    "nodes_engine_",
    "vllm_",
    "few_sms_",
    "launches_",
    "headers_",
    "prefill_",
    "fused_products_",
    "generation_",
    "faults_",
    "forecast_before_",
    "mapped_tensors",
    "first_use",
    "programs_",
    "shared_calls_",
    "mixed_requests",
    "constrained_rows",
)
"""File names of other results: those of the engine, of the scripts in research, and of long tests."""
KEPT = sorted(
    path
    for path in (Path(__file__).parents[2] / "benchmarks" / "data").rglob("*.json")
    if not path.name.startswith(OTHERS) and path.parent.name != "external"  # published by others
)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_kept_results_have_rows_like_these(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["rows"]
    needed = {field.name for field in fields(Row) if field.default is MISSING}
    assert all(needed <= one.keys() for one in document["rows"])
    assert document["command"].startswith(("shotcast bench ", "research/bench_modes.py "))
    assert document["date"][:2] == "20"
    assert report.Result(document["environment"], "", "", ()).machine


def test_kept_results_name_no_folder_of_a_machine() -> None:
    for path in (Path(__file__).parents[2] / "benchmarks" / "data").rglob("*.json"):
        document = json.loads(path.read_text())
        command = document.get("command", "") if isinstance(document, dict) else ""
        folders = [word for word in command.split() if word.startswith("/")]
        assert not folders, path


def test_machine_is_hardware_versions_and_date() -> None:
    gpus = [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}]
    versions = {"python": "3.12", "torch": "2.11.0+cu130", "nccl": "2.28.9"}
    environment = {"cpu_model": "some processor", "gpus": gpus, "versions": versions}
    result = report.Result(environment, "", "2026-11-21T07:00:00+00:00", ())
    assert result.machine == "NVIDIA H200, PyTorch 2.11.0, NCCL 2.28.9, 2026-11-21"
    without = report.Result({**environment, "gpus": []}, "", "", ())
    assert without.machine == "some processor, PyTorch 2.11.0"
    assert report.Result({}, "", "", ()).machine == ""
