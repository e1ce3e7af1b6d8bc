"""Columns, bandwidths and files of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from shotcast.bench import report
from shotcast.bench.report import Row
from shotcast.errors import ConfigError


def row(algorithm: str = "ring", nbytes: int = 1 << 20, time_us: float = 100.0, **change: object) -> Row:
    facts = {"op": "all_reduce", "device": "cpu", "world_size": 4, "dtype": "bfloat16", "errors": 0, **change}
    return Row.of(
        algorithm=algorithm,
        nbytes=nbytes,
        medians_us=[time_us - 3, time_us],
        p99s_us=[time_us * 3, time_us * 2],
        **facts,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "n", "factor"),
    [
        ("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5), ("all_reduce", 8, 1.75),
        ("reduce_scatter", 4, 0.75), ("all_gather", 8, 0.875),
    ],
)  # fmt: skip
def test_busbw_factors_are_those_of_nccl_tests(op: str, n: int, factor: float) -> None:
    assert report.busbw_factor(op, n) == factor


def test_row_takes_the_slowest_rank() -> None:
    point = row()
    assert (point.time_us, point.p99_us, point.skew_us) == (100.0, 300.0, 3.0)
    assert point.algbw_gbps == pytest.approx(10.48576)
    assert point.busbw_gbps == pytest.approx(15.72864)


def test_wrong_result_has_no_time() -> None:
    point = Row.of(
        op="all_reduce", device="cpu", world_size=2, dtype="float32", algorithm="ring", nbytes=8,
        medians_us=[], p99s_us=[], errors=3,
    )  # fmt: skip
    assert (point.time_us, point.algbw_gbps, point.errors) == (None, None, 3)


@pytest.mark.parametrize(
    ("op", "count"), [("all_reduce", 1 << 19), ("reduce_scatter", 1 << 17), ("all_gather", 1 << 17)]
)
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


def test_table_shows_what_was_not_compared_or_timed() -> None:
    wrong = Row.of(
        op="all_gather", device="cpu", world_size=4, dtype="float32", algorithm="ring", nbytes=64,
        medians_us=[], p99s_us=[], errors=7,
    )  # fmt: skip
    lines = text_of([wrong, row("gloo", 64, op="all_gather", dtype="float32", errors=None)])
    assert lines[3].split() == ["64", "4", "float32", "none", "ring", "-", "-", "-", "7", "-", "-"]
    assert lines[4].split()[8] == "N/A"


def test_json_round_trip(tmp_path: Path) -> None:
    rows = [row(), row("gloo", errors=None)]
    path = tmp_path / "new" / "result.json"
    result = report.Result.now(rows, environment={"cores": 2}, command="shotcast bench all-reduce")
    report.write(path, result)
    assert report.read(path) == result
    document = json.loads(path.read_text())
    assert list(document) == ["environment", "command", "date", "rows"]
    assert list(document["rows"][0]) == [
        "op", "device", "world_size", "dtype", "algorithm", "nbytes", "time_us", "p99_us", "skew_us", "algbw_gbps",
        "busbw_gbps", "errors", "measure", "hidden", "work", "work_us", "allocations",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows": [{"op": "all_reduce"}]}', '{"rows": [3]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        report.read(path)


def test_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    report.write(path, report.Result.now([row()], environment={}, command=""))
    path.write_text(path.read_text().replace('"skew_us"', '"skew_ms"'))
    with pytest.raises(ConfigError, match="skew_ms, skew_us"):
        report.read(path)


def test_headline_compares_equal_sizes_alone() -> None:
    rows = [row("ring", 64, 30.0), row("one_shot", 64, 10.0), row("ring", 128, 90.0), row("two_shot", 256, 1.0)]
    assert report.headline(rows) == "4 ranks: one_shot is 3.0 times as fast as ring at 64 B"
    assert report.headline([row("gloo")]) == ""
    assert report.headline([row("ring", 64, 10.0), row("two_shot", 64, 9.9)]) == ""
