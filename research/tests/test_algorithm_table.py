"""The table of algorithms says what their descriptions say."""

from __future__ import annotations

import dataclasses

import pytest
from algorithm_table import algorithm_table

from shotcast.collectives import registry
from shotcast.collectives.registry import register_algorithm, registered
from shotcast.wire import Op


def rows() -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in algorithm_table().split("\n")]
    return {cells[0].strip("`"): cells[1:] for cells in lines if cells[0].startswith("`")}


def test_each_own_all_reduce_has_a_row() -> None:
    table = rows()
    own = {name for name, one in registered().items() if not one.library and Op.ALL_REDUCE in one.forms}
    assert set(table) == own
    assert table["one_shot"][1:4] == ["1", "1, 3, 7", "yes"]
    assert table["two_shot"][1:4] == ["2", "1, 1.5, 1.75", "yes"]
    assert table["ring"][1:4] == ["2, 6, 14", "1, 1.5, 1.75", "with 2 ranks"]
    assert table["two_shot_fp8"][3] == table["multimem"][3] == "no"
    assert "all_gather" in table["ring"][4]
    assert table["multimem"][4] == "-"
    assert table["nvrar"][1:] == ["1, 2, 3", "2, 4, 6"], "float32 sums are twice the bytes of bfloat16"
    assert table["nvrar_pairs"][1:] == ["1", "2, 6, 14"]
    assert table["nvrar_halving"][1:] == ["2, 4, 6", "1.5, 2.25, 2.62"]
    assert table["nvrar_16bit"][1:] == ["1, 2, 2", "1, 1.5, 1.75"], "in 16 bits"
    assert table["nvrar_two_shot"][1:] == ["2", "1.5, 2.25, 2.62"]


def test_a_registered_algorithm_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_added", [])
    two_shot = registered()["two_shot"]
    forms = {Op.ALL_REDUCE: two_shot.forms[Op.ALL_REDUCE]}
    register_algorithm(dataclasses.replace(two_shot, name="mine", summary="moves as it likes", forms=forms))
    assert rows()["mine"][0] == "moves as it likes"
