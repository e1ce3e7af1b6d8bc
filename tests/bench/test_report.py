"""The columns, bandwidths and files of a benchmark."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shotcast.bench import report
from shotcast.bench.report import Row
from shotcast.errors import ConfigError


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
        ("reduce", 8, 1.0), ("gather", 2, 0.5), ("scatter", 4, 0.75), ("all_reduce_rms_norm", 4, 1.5),
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


def test_times_with_an_algorithm_in_each_column() -> None:
    rows = [row("auto", chosen="two_shot"), row("ring", time_us=200.0), row("auto", 2 << 20, chosen="ring")]
    console = Console(width=160, no_color=True, force_terminal=True, file=io.StringIO(), record=True)
    view = report.columns(rows)
    assert view is not None
    console.print(view)
    lines = console.export_text(clear=False).splitlines()
    assert [line.split() for line in lines] == [
        ["size", "auto", "ring"],
        ["(B)", "(us)", "(us)"],
        ["1048576", "100.0", "two_shot", "200.0"],
        ["2097152", "100.0", "ring", "-"],
    ]
    assert "\x1b[1m100.0 two_shot" in console.export_text(styles=True), "the fastest is highlighted"
    assert report.columns(rows[:1]) is None, "of one algorithm it would say nothing more"


def test_mean_bandwidths_are_of_implementations_that_served_every_size() -> None:
    rows = [row("auto"), row("ring"), row("auto", 2 << 20)]
    assert report.mean_bandwidths(rows) == "auto 23.59"
    assert report.mean_bandwidths(rows[:2]) == "", "of one size it is that of the row"


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


def test_table_of_hosts_compares_with_gloo_and_the_model() -> None:
    hosts = {"nodes": 2, "delay_us": 1000.0}
    own = replace(row("auto", time_us=50.0), **hosts, predicted_us=40.0)
    title, header, units, first, second, *_ = text_of([own, replace(row("gloo", time_us=100.0), **hosts)])
    assert title.strip().split(", ") == ["all_reduce", "4 cpu ranks on 2 hosts", "1000 us one way"]
    assert header.split()[-1] == "model"
    assert units.split()[-2:] == ["Gloo/this", "(us)"]
    assert first.split()[-2:] == ["2.00x", "40.00"]
    assert second.split()[-2:] == ["1.00x", "-"]


def test_table_shows_what_was_not_compared_or_timed() -> None:
    wrong = Row.from_ranks(
        op="all_gather", device="cpu", world_size=4, dtype="float32", algorithm="ring", nbytes=64,
        medians_us=[], p99s_us=[], errors=7,
    )  # fmt: skip
    lines = text_of([wrong, row("gloo", 64, op="all_gather", dtype="float32", errors=None)])
    assert lines[3].split() == ["64", "4", "float32", "none", "ring", "-", "-", "-", "7", "-", "-"]
    assert lines[4].split()[8] == "N/A"


def test_json_round_trip(tmp_path: Path) -> None:
    rows = [row(), row("gloo", errors=None)]
    path = tmp_path / "result.json"
    result = report.Result.now(rows, environment={}, command="shotcast bench all-reduce", kernels={"a/b": "1"})
    report.write(path, result)
    assert report.read(path) == result
    document = json.loads(path.read_text())
    assert list(document) == ["environment", "command", "date", "kernels", "rows"]
    assert list(document["rows"][0]) == [
        "op", "device", "world_size", "dtype", "algorithm", "nbytes", "time_us", "p99_us", "skew_us", "algbw_gbps",
        "busbw_gbps", "errors", "measure", "hidden", "work", "work_us", "allocations", "nodes", "delay_us",
        "predicted_us", "lowest_us", "highest_us", "reduction", "chosen",
    ]  # fmt: skip


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    report.write(path, report.Result.now([row(hidden=64)], environment={}, command="", kernels={}))
    document = json.loads(path.read_text())
    for name in ("measure", "hidden", "work", "work_us", "allocations"):
        del document["rows"][0][name]
    del document["kernels"]
    path.write_text(json.dumps(document))
    assert report.read(path).rows == (row(),)
    assert report.read(path).kernels is None


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
def test_kept_results_are_read(path: Path) -> None:
    result = report.read(path)
    assert result.rows
    assert result.command.startswith("shotcast bench ")
    assert result.date[:2] == "20"
    assert result.machine


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


def test_only_calls_back_to_back_have_bandwidths() -> None:
    for measure in ("between", "host"):
        point = row(measure=measure)
        assert (point.time_us, point.algbw_gbps, point.busbw_gbps) == (100.0, None, None)


def test_the_work_alone_is_the_slowest_ranks() -> None:
    assert row(measure="between", works_us=[7.0, 9.0, 8.0]).work_us == 9.0


def test_tokens() -> None:
    assert row(nbytes=3 * 64 * 2, hidden=64).tokens == 3
    assert row().tokens == 0


def columns(rows: list[Row]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, the names of the columns, and the cells."""
    title = str(report.table(rows).title)
    lines = text_of(rows)
    units_at = next(number for number, line in enumerate(lines) if line.strip().startswith("(B)"))
    header, units, lines = lines[units_at - 1], lines[units_at], lines[units_at + 1 :]
    names = [name for name in (header + " " + units).split() if not name.startswith("(")]
    return title, names, [line.split() for line in lines if line.strip()]


def test_table_of_work_between_calls() -> None:
    point = row("one_shot", 256, 3.0, measure="between", hidden=64, work="gemm 8x64", works_us=[7.25])
    title, names, cells = columns([point])
    assert "gemm 8x64 between calls: a call and the work before it, less the work alone" in title
    assert "algbw" not in names
    assert cells[0] == ["256", "128", "bfloat16", "sum", "one_shot", "3.00", "0", "9.00", "3.00", "2", "7.25"]


def test_table_of_host_time() -> None:
    title, names, cells = columns([row("one_shot", 256, 30.0, measure="host", device="cuda", allocations=2)])
    assert title == "all_reduce, 4 cuda ranks, host time of a call"
    assert "#alloc" in names
    assert cells[0][-1] == "2"
    title, _, cells = columns([row("one_shot", 256, 30.0, measure="host")])
    assert title.endswith("(on the CPU a call returns when it is done: this is the call's time)")
    assert cells[0][-1] == "N/A"


def fused(algorithm: str, time_us: float, **change: object) -> Row:
    return row(algorithm, 256, time_us, **{"op": "all_reduce_rms_norm", "hidden": 64, **change})


def test_table_of_fused_calls_says_what_is_above_plain() -> None:
    rows = [fused("auto", 8.0), fused("plain", 6.5), fused("plain_one_shot", 6.0), fused("nccl", 5.0)]
    _, names, cells = columns(rows)
    assert {"above", "plain", "tokens"} <= set(names)
    assert [line[4] for line in cells] == ["auto", "plain", "plain_one_shot", "nccl"]
    assert [line[-1] for line in cells] == ["2.00", "-", "-", "-1.00"]
    assert [line[-2] for line in cells] == ["2"] * 4


def test_what_is_above_plain_compares_like_with_like() -> None:
    own = fused("auto", 8.0)
    assert report.above_plain_us(own, [own]) is None
    for other in (
        fused("plain", 6.0, world_size=2),
        fused("plain", 6.0, measure="host"),
        fused("plain", 6.0, hidden=32),
    ):
        assert report.above_plain_us(own, [other]) is None
    assert report.above_plain_us(own, [fused("plain", 6.0), fused("unfused", 1.0)]) == 2.0


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows": [{"op": "all_reduce"}]}', '{"rows": [3]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        report.read(path)


def test_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    report.write(path, report.Result.now([row()], environment={}, command="", kernels={}))
    path.write_text(path.read_text().replace('"skew_us"', '"skew_ms"'))
    with pytest.raises(ConfigError, match="skew_ms, skew_us"):
        report.read(path)
