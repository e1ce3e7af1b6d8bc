"""research/process_group.py: its checks, times and limits on CPU ranks, and the figures of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import process_group
from shotcast.errors import ConfigError
from shotcast.launcher.spawn import spawn

ROOT = Path(__file__).parents[2]


def test_every_operation_is_checked_and_timed() -> None:
    ops = list(process_group.OPERATIONS)
    rows = spawn(process_group.rows, 2, "cpu", ops, [4, 4096], 1, 0.001, timeout_s=300)[0]
    ways = (process_group.OWN, process_group.DIRECT, "gloo")
    assert [(row["op"], row["bytes"], row["way"]) for row in rows] == [
        (op, nbytes, way) for op in ops for nbytes in (4, 4096) for way in ways
    ]
    assert all(row["us"] > 0 and row["calls"] >= 10 for row in rows)
    assert len(process_group.table(rows).splitlines()) == 2 + len(ops) * 3


def test_a_wrong_result_is_not_timed() -> None:
    with pytest.raises(ConfigError, match="all_reduce by gloo gave 2 wrong elements of 4"):
        process_group.checked("gloo", "all_reduce", lambda: None, torch.ones(4), torch.tensor([1.0, 2.0, 1.0, 3.0]))


def test_limits() -> None:
    def rows(device: str, mode: str, nbytes: int, *us: float) -> list[process_group.Row]:
        ways = process_group.OWN, process_group.DIRECT, process_group.LIBRARY[device]
        facts = {"op": "all_reduce", "device": device, "mode": mode, "bytes": nbytes}
        return [facts | {"way": way, "us": time} for way, time in zip(ways, us, strict=True)]

    assert process_group.beyond_limits(rows("cpu", "eager", 4, 3.0, 1.0, 30.0)) == []
    (said,) = process_group.beyond_limits(rows("cpu", "eager", 65536, 3.0, 1.0, 29.0))
    assert said == "eager all_reduce of 64 KB: gloo takes 9.67 of its time, below 10"
    assert process_group.beyond_limits(rows("cpu", "eager", 1 << 20, 3.0, 1.0, 3.1)) == []
    assert process_group.beyond_limits(rows("cuda", "captured", 8192, 5.0, 4.0, 9.0)) == []
    (said,) = process_group.beyond_limits(rows("cuda", "captured", 8192, 5.1, 4.0, 9.0))
    assert "1.27 of the communicator's time, above 1.25" in said
    assert len(process_group.beyond_limits(rows("cuda", "eager", 8192, 9.0, 4.0, 8.0))) == 2


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "data").rglob("process_group*.json")), ids=lambda path: path.stem
)
def test_the_page_has_the_figures(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["command"].split()[0].endswith("/process_group.py")
    assert process_group.table(document["rows"]) in (ROOT / "benchmarks" / "results.md").read_text()
