"""research/nvrar_nodes.py: the ranks that exchange sums in separate launches, and ways that fail or stall."""

from __future__ import annotations

import json
import time
from pathlib import Path

import nvrar_nodes
import nvrar_way_targets
import pytest


@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (2, 2), (4, 1), (4, 2), (2, 4), (8, 1)])
def test_every_rank_has_the_sum_of_its_number_in_all_nodes(nodes: int, local: int) -> None:
    held = [{rank} for rank in range(nodes * local)]
    exchanges = [nvrar_nodes.partners(rank, nodes, local) for rank in range(nodes * local)]
    for turn in range(len(exchanges[0])):
        for rank, partners in enumerate(exchanges):
            assert exchanges[partners[turn]][turn] == rank, "both put to each other in the same turn"
        held = [held[rank] | held[partners[turn]] for rank, partners in enumerate(exchanges)]
        assert all(len(ranks) == 2 ** (turn + 1) for ranks in held), "nothing is added twice"
    assert held == [{node * local + rank % local for node in range(nodes)} for rank in range(nodes * local)]


@pytest.mark.full
def test_a_way_that_fails_or_stalls_leaves_its_rows_and_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ways = {
        "fails": (nvrar_way_targets.fails,),
        "stalls": (nvrar_way_targets.stalls,),
        "measures": (nvrar_way_targets.measures, 0.5),
    }
    monkeypatch.setattr(nvrar_nodes, "WAYS", ways)
    file = tmp_path / "rows.json"
    began = time.monotonic()
    nvrar_nodes.main(["--ways", ",".join(ways), "--limit", "8", "-b", "1K", "-e", "8K", "--json", str(file)])
    assert time.monotonic() - began < 50
    printed = capfd.readouterr().out
    assert printed.index("no such adapter") < printed.index("in stalls") < printed.index("4096.0 us")
    assert json.loads(file.read_text())["rows"] == [
        {"bytes": 1 << 10, "fails": 1.0, "stalls": 2.0, "measures": 512.0},
        {"bytes": 8 << 10, "measures": 4096.0},
    ]


def test_no_way_begins_after_the_total(capfd: pytest.CaptureFixture[str]) -> None:
    nvrar_nodes.main(["--ways", "nccl,node", "--total", "0"])
    printed = capfd.readouterr().out
    assert "nccl: not begun" in printed
    assert "node: not begun" in printed
