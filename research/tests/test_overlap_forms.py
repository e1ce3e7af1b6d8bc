"""research/overlap_forms.py: forms that fail, NCCL without thread blocks, and the published tiles."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import bench_overlap
import overlap_forms
import overlap_forms_targets as targets
import pytest
import zero_ctas
from large_gemm import shared_bytes
from occupancy import Kernel, multiprocessor, resident_blocks
from overlap_bench import report
from overlap_bench.config import OverlapConfig
from overlap_bench.result import Measured, OverlapRow
from overlap_verdicts import verdicts
from typer.testing import CliRunner

from shotcast.errors import RankFailed

ROW = OverlapRow(
    *("plain", "all_reduce", "cpu", "float32"),
    *(2, 4096, (8, 8, 8), 3, 4, 1, 2, 5000.0),
    *(110.0, 90.0, 80.0, 170.0, 110.0),
)
CONFIG = OverlapConfig("all_reduce", "cpu", "float32", 2, 4096, (64, 64, 64), 2, steps=3, rounds=1, seconds=0.0)


def test_the_command_measures(tmp_path: Path) -> None:
    chain = "--size 4K --gemm 64x64x64 --repeat 2 --steps 2 --rounds 1 --seconds 0 --device cpu --world-size 2"
    file = tmp_path / "a.json"
    done = CliRunner().invoke(bench_overlap.app, ["--sets", "own,published", *chain.split(), "--json", str(file)])
    assert done.exit_code == 0, done.output
    ways = [row["way"] for row in json.loads(file.read_text())["rows"]]
    assert ways[:4] == ["compute", "communication", "sequential", "plain"]


def test_sets_that_there_are_not() -> None:
    done = CliRunner().invoke(bench_overlap.app, ["--sets", "own,others"])
    assert done.exit_code == 2
    assert "others" in done.output


@pytest.mark.full
def test_a_peer_that_fails_gives_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ends the ranks, and one that never ends."""
    monkeypatch.setattr(overlap_forms, "measure_on_rank", targets.with_bad_peers)
    rows = {row.way: row for row in overlap_forms.run(CONFIG, ("own", "library", "torch")).rows}
    reasons = {name: row.reason for name, row in rows.items() if row.reason}
    assert reasons["raises"] == "RuntimeError: not on this machine ... second line"
    assert reasons["wrong"].startswith("wrong results: product 0")
    assert reasons["raises on one rank"] == "it failed on another rank"
    assert reasons["dies"].startswith("LeftOutError: it ended the ranks")
    assert reasons["hangs"].startswith("LeftOutError: it ended the ranks")
    assert len(reasons) == 5
    assert all(rows[name].time_us is None for name in reasons)
    assert rows["library plain"].time_us
    text = report.sentences(Measured(tuple(rows.values()), ""))
    assert "raises: not available: RuntimeError: not on this machine ... second line" in text


def h200(way: str, time_us: float | None, by: str = "", **change: object) -> OverlapRow:
    facts = {"device": "cuda", "op": "all_gather", "compute_us": 1400.0, "communication_us": 1500.0,
             "library_us": 1450.0, "library_plain_us": 2000.0}  # fmt: skip
    return dataclasses.replace(ROW, way=way, time_us=time_us, by=by, **facts | change)  # type: ignore[arg-type]


def said(*rows: OverlapRow) -> list[str]:
    return verdicts(Measured(rows, ""))[1:]


def test_thresholds() -> None:
    assert h200("plain", 1.0).ideal_us == 1450
    own, slow = h200("16 SMs", 1500.0, "own"), h200("plain", 1900.0, "own")
    assert said(slow, own) == [
        "16 SMs takes 1.03 of the ideal, 1.10 or less: holds",
        "16 SMs is 25% below the library's plain overlap, 15% or more: holds",
    ]
    assert [line.rpartition(": ")[2] for line in said(slow)] == ["does not hold"] * 2
    assert said(dataclasses.replace(own, compute_us=900.0))[0].endswith("15% or more: holds")
    assert said(dataclasses.replace(own, library_plain_us=1600.0)) == [
        "16 SMs takes 1.03 of the ideal, 1.10 or less: holds"
    ]
    peer = h200("torch fused", 1450.0, "torch", whole=True)
    assert "does not hold" in said(dataclasses.replace(own, whole=True), peer)[-1]
    assert verdicts(Measured((dataclasses.replace(own, library_plain_us=None),), "")) == []


SEEN = zero_ctas.Seen(2100.0, 1500.0, ("copy",))
LOGGED = "host:1:2 [0] NCCL INFO AllGather [Copy Engine]: 64 bytes"


@pytest.mark.parametrize("outcome", ["logged", "not logged", "failed"])
def test_nccl_without_thread_blocks_is_timed_where_its_log_names_copy_engines(
    outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(fn: object, world_size: int, config: OverlapConfig, timeout_s: float, env: dict[str, str]) -> list[object]:
        assert (config.nbytes, config.repeat, timeout_s) == (4096, 3, 9.0)
        if outcome == "failed":
            raise RankFailed(0, "Traceback\nRuntimeError: no windows\n(ranks that failed as well: 1)")
        line = LOGGED if outcome == "logged" else "NCCL INFO Ring"
        Path(env["NCCL_DEBUG_FILE"].replace("%p", "1")).write_text(line)
        return [SEEN]

    monkeypatch.setattr(zero_ctas, "spawn", job)
    before = Measured((h200("compute", 1400.0, "alone"), h200("library plain", 2000.0, "library")), "")
    after = zero_ctas.with_zero_ctas(before, dataclasses.replace(CONFIG, nbytes=0), 9.0)
    assert after.rows[:2] == before.rows
    row = after.rows[2]
    assert (row.way, row.by, row.library_plain_us) == ("library, zero CTAs", "library", 2000.0)
    if outcome == "logged":
        assert (row.time_us, row.reason) == (1500.0, "")
        assert "AllGather [Copy Engine]: 64 bytes; kernels of a message: copy; ranks of its own" in row.evidence
    else:
        assert row.time_us is None
        assert row.evidence == ""
        none = "none of 1 lines of NCCL's log names copy engines; kernels of a message: copy"
        assert row.reason == (none if outcome == "not logged" else "RuntimeError: no windows")


def test_published_tiles_leave_so_many_blocks() -> None:
    sm = multiprocessor((9, 0))
    found = dict(overlap_forms.published_tiles(sm))
    assert len(found) == 8
    for name, config in found.items():
        blocks = resident_blocks(Kernel(64, 128, shared_bytes(config) + 24), sm)
        wanted = name.split(", ")[1].split()[0]
        assert wanted == "all" or blocks == int(wanted), (name, blocks)
