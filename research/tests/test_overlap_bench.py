"""The benchmark of overlap: its figures, its table and picture, and real runs on CPU ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import bench_overlap
import overlap_bench_targets as targets
import pytest
from overlap_bench import measure, report, result
from overlap_bench.config import OverlapConfig
from overlap_bench.result import Measured, OverlapRow
from rich.console import Console
from simulated_hosts.facts import HostsConfig
from typer.testing import CliRunner

from hosts import needs_hosts
from shotcast.errors import ConfigError
from shotcast.launcher.spawn import spawn

SPANS = (
    {"name": "compute 0", "lane": 0, "begin_us": 0.0, "end_us": 10.0},
    {"name": "communicate 0", "lane": 1, "begin_us": 10.0, "end_us": 14.0},
)
ROW = OverlapRow(
    *("plain", "all_reduce", "cpu", "float32"),
    *(2, 4096, (8, 8, 8), 3, 4, 1, 2, 5000.0),
    *(110.0, 90.0, 80.0, 170.0, 110.0),
    spans=SPANS,
)
MEASURED = Measured(
    tuple(dataclasses.replace(ROW, way=way, time_us=time_us, spans=SPANS if way in ("sequential", "plain") else ())
          for way, time_us in (("compute", 90.0), ("communication", 80.0), ("sequential", 170.0), ("plain", 110.0))),
    "plain: why",
)  # fmt: skip
CONFIG = OverlapConfig("all_reduce", "cpu", "float32", 2, 4096, (64, 64, 64), 2, steps=3, rounds=1, seconds=0.0)


def test_the_part_that_is_hidden() -> None:
    assert ROW.ideal_us == 90
    assert ROW.hidden == (170 - 110) / (170 - 90)


def test_table_picture_and_file(tmp_path: Path) -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(MEASURED))
    text = " ".join(console.export_text().split())
    assert "4 steps of 3 x 8x8x8 and all_reduce of 4 KiB (float32), 2 cpu ranks, 2 hosts at 5 ms one way" in text
    assert "75%" in text
    assert text.count("%") == 1
    report.plot([MEASURED], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    file = tmp_path / "file.json"
    file.write_text(result.document([MEASURED], {}, "command", {}))
    assert result.read(file) == (MEASURED,)
    printed = CliRunner().invoke(bench_overlap.app, ["--markdown", "--json", str(file)])
    assert "| plain | 0.11 | 0.65 | 1.00 | 1.22 | 75% |" in printed.output
    assert "`auto` took plain: why." in printed.output
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a result of bench_overlap\.py"):
        result.read(file)
    bare = Measured((dataclasses.replace(ROW, spans=()),), "")
    with pytest.raises(ConfigError, match="none of the results has a timeline"):
        report.plot([bare], tmp_path / "picture.png")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"op": "broadcast"}, "overlap is measured with all_reduce"),
        ({"nbytes": 0, "repeat": 0}, "one fits the other"),
        ({"steps": 0}, "1 or more"),
        ({"device": "cuda", "lanes": 2}, "one lane of communication"),
        ({"ratio": 0.0}, "above 0"),
        ({"whole": True}, "with its size"),
        ({"whole": True, "nbytes": 0, "repeat": 1, "gemm": (3, 8, 8)}, "3 rows are not divisible"),
    ],
)
def test_wrong_configurations_are_refused(change: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        dataclasses.replace(CONFIG, **change)  # type: ignore[arg-type]


def test_the_command_measures(tmp_path: Path) -> None:
    options = "--size 4K --gemm 64x64x64 --repeat 2 --steps 2 --rounds 1 --seconds 0 --device cpu --world-size 2"
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    done = CliRunner().invoke(bench_overlap.app, [*options.split(), *files])
    assert done.exit_code == 0, done.output
    (measured,) = result.read(tmp_path / "a.json")
    names = [row.way for row in measured.rows]
    own = ["compute", "communication", "sequential", "plain"]
    assert names == [*own, "library communication", "library", "library plain"]
    assert all(row.time_us > 0 and row.nbytes == 4096 for row in measured.rows)
    lanes = {span["lane"] for row in measured.rows if row.way == "plain" for span in row.spans}
    assert lanes == {0, 1}
    assert json.loads((tmp_path / "a.json").read_text())["kernels"]


@pytest.mark.full
@pytest.mark.parametrize("op", ["reduce_scatter", "reduce_scatter_all_gather", "all_gather", "all_to_all"])
def test_every_operation_is_measured(op: str) -> None:
    measured = measure.run(dataclasses.replace(CONFIG, op=op))
    assert {"sequential", "plain"} <= {row.way for row in measured.rows}


@pytest.mark.full
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_whole_matrices_are_measured(op: str) -> None:
    measured = measure.run(dataclasses.replace(CONFIG, op=op, nbytes=0, repeat=1, whole=True))
    assert all(row.time_us is not None and row.nbytes == 64 * 64 * 4 for row in measured.rows)
    assert "a whole matrix, 16 KiB" in report.title(measured.rows[0])


SHAPES = {
    "a message of a part of the product": {"nbytes": 4096},
    "a message of more than the product": {"nbytes": 64 << 10},
    "the whole product": {"nbytes": 0, "whole": True},
}


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("all_reduce", "a message of a part of the product"),
        ("all_gather", "the whole product"),
        pytest.param("all_reduce", "a message of more than the product", marks=pytest.mark.full),
        pytest.param("reduce_scatter", "the whole product", marks=pytest.mark.full),
        pytest.param("reduce_scatter_all_gather", "a message of a part of the product", marks=pytest.mark.full),
        pytest.param("all_gather", "a message of more than the product", marks=pytest.mark.full),
        pytest.param("all_to_all", "a message of a part of the product", marks=pytest.mark.full),
        pytest.param("all_to_all", "a message of more than the product", marks=pytest.mark.full),
    ],
)
def test_a_message_that_goes_ahead_of_its_product_is_wrong(op: str, shape: str) -> None:
    config = dataclasses.replace(CONFIG, op=op, repeat=1, **SHAPES[shape])  # type: ignore[arg-type]
    found = spawn(targets.out_of_order, 2, config, timeout_s=300)
    assert [one["in order"] for one in found] == ["", ""]
    # what a product writes may all be sent to one rank
    for fault in ("too early", "left out"):
        assert any("2" in one[fault] for one in found), found
        assert not any("0" in one[fault] for one in found), found


def test_product_and_message_in_one_call_are_checked() -> None:
    config = dataclasses.replace(CONFIG, nbytes=0, repeat=1, whole=True)
    for found in spawn(targets.in_one_call, 2, config, timeout_s=300):
        assert found == ["", "wrong results: message 1", "", "wrong results: message 1", "", "wrong results: product 1"]


@needs_hosts
@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize(("lanes", "repeat"), [(1, 0), (3, 8)])
def test_the_delay_of_a_network_is_hidden(lanes: int, repeat: int) -> None:
    """At least 60% is hidden: by products of that time in one lane, and by shorter ones in several."""
    hosts = HostsConfig(2, 1, 5000.0)
    sides = (256, 256, 256)
    config = OverlapConfig(
        "all_reduce", "cpu", "float32", 2, 4096, sides, repeat, seconds=0.1, lanes=lanes, hosts=hosts
    )
    hidden = [row.hidden for _ in range(3) for row in measure.run(config).rows if row.way == "plain"]
    assert max(hidden) >= 0.6, hidden
