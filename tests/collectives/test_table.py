"""Tuned tables: what is read, what is refused and in which words, and which row serves a size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotcast.collectives.table import load, packaged, parse
from shotcast.errors import ConfigError
from shotcast.wire import ALGORITHMS, LaunchShape


def made(**changes: Any) -> str:
    whole = {
        "format": 1,
        "part": "NVIDIA H200",
        "world_size": 4,
        "provenance": {"date": "2026-01-01"},
        "entries": {
            "all_reduce": {
                "bfloat16": [
                    [1024, "one_shot", {"programs": 8, "block_words": 64, "num_warps": 1}],
                    [65536, "two_shot", None],
                    [None, "vendor", None],
                ],
                "float32": [[4096, "ring", None]],
            }
        },
    }
    return json.dumps({key: value for key, value in (whole | changes).items() if value != "absent"})


class TestLookup:
    @pytest.mark.parametrize(
        ("nbytes", "algorithm"),
        [
            (0, "one_shot"),
            (1024, "one_shot"),
            (1025, "two_shot"),
            (65536, "two_shot"),
            (65537, "vendor"),
            (1 << 40, "vendor"),
        ],
    )
    def test_row_serves_up_to_its_size(self, nbytes: int, algorithm: str) -> None:
        row = parse(made(), "t").lookup("all_reduce", "bfloat16", nbytes)
        assert row is not None
        assert row.algorithm == algorithm

    def test_launch(self) -> None:
        table = parse(made(), "t")
        row = table.lookup("all_reduce", "bfloat16", 5)
        assert row is not None
        assert row.launch == LaunchShape(programs=8, block_words=64, num_warps=1)
        assert table.lookup("all_reduce", "bfloat16", 2000).launch is None

    @pytest.mark.parametrize(
        ("op", "dtype", "nbytes"),
        [("all_reduce", "float32", 4097), ("all_reduce", "float16", 1), ("broadcast", "bfloat16", 1)],
    )
    def test_says_nothing_of_the_rest(self, op: str, dtype: str, nbytes: int) -> None:
        assert parse(made(), "t").lookup(op, dtype, nbytes) is None

    @given(
        st.lists(st.integers(0, 1 << 34), unique=True, min_size=1, max_size=20).map(sorted),
        st.booleans(),
        st.integers(0, 1 << 34),
        st.data(),
    )
    def test_is_the_first_row_that_is_large_enough(
        self, bounds: list[int], endless: bool, nbytes: int, data: st.DataObject
    ) -> None:
        limits: list[int | None] = [*bounds, None] if endless else list(bounds)
        rows = [[limit, data.draw(st.sampled_from(ALGORITHMS)), None] for limit in limits]
        row = parse(made(entries={"all_reduce": {"int8": rows}}), "t").lookup("all_reduce", "int8", nbytes)
        wanted = next((r for r in rows if r[0] is None or nbytes <= r[0]), None)
        if wanted is None:
            assert row is None
        else:
            assert row is not None
            assert (row.nbytes, row.algorithm) == (float("inf") if wanted[0] is None else wanted[0], wanted[1])


def entries(*rows: Any, op: str = "all_reduce", dtype: str = "bfloat16") -> dict[str, Any]:
    return {"entries": {op: {dtype: list(rows)}}}


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"format": 2}, "has format 2; this version reads format 1"),
            ({"format": "absent"}, "has format None"),
            ({"part_name": "x"}, "unknown keys: part_name"),
            ({"part": "absent"}, r"not as described in shotcast.collectives.table: KeyError\('part'\)"),
            ({"world_size": "four"}, "not as described"),
            ({"entries": "absent"}, "'entries'"),
            ({"entries": []}, "not as described"),
            (entries([1024, "tree", None]), "unknown algorithm 'tree'"),
            (entries([1024, "ring"]), "not enough values"),
            (entries([1024, "ring", {"blocks": 3}]), "blocks"),
            (entries(["1K", "ring", None]), "not as described"),
            (entries([2048, "ring", None], [1024, "one_shot", None]), "all_reduce/bfloat16: sizes must ascend"),
            (entries([1024, "ring", None], [1024, "one_shot", None]), "sizes must ascend"),
            (entries([None, "ring", None], [1024, "one_shot", None]), "sizes must ascend"),
            (entries([1024, "ring", None], op="allreduce"), "allreduce/bfloat16, which is no operation and dtype"),
            (entries([1024, "ring", None], dtype="bf16"), "all_reduce/bf16, which is no operation and dtype"),
        ],
    )
    def test_says_what_is_wrong_and_where(self, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said) as caught:
            parse(made(**changes), "my.json")
        assert "my.json" in str(caught.value)

    @pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ("[]", "has format 'list'"), ("3", "'int'")])
    def test_no_table_at_all(self, text: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            parse(text, "my.json")


class TestFiles:
    def test_loaded(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_text(made())
        table = load(str(path), "NVIDIA H200", 4)
        assert (table.name, table.part, table.world_size, table.text) == (str(path), "NVIDIA H200", 4, made())

    @pytest.mark.parametrize(("part", "world_size"), [("NVIDIA H200", 8), ("NVIDIA H100", 4), ("cpu", 4)])
    def test_for_other_hardware(self, tmp_path: Path, part: str, world_size: int) -> None:
        path = tmp_path / "t.json"
        path.write_text(made())
        said = f"SHOTCAST_TABLE: {path} was made for 4 x NVIDIA H200; this is {world_size} x {part}"
        with pytest.raises(ConfigError) as caught:
            load(str(path), part, world_size)
        assert str(caught.value) == said

    def test_unreadable(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="SHOTCAST_TABLE: cannot read"):
            load(str(tmp_path), "cpu", 2)

    def test_packaged_ones_are_sound_and_found(self) -> None:
        folder = Path(__file__).parents[2] / "src/shotcast/collectives/tables"
        for file in folder.glob("*.json"):
            table = parse(file.read_text(), file.name)
            assert packaged(table.part, table.world_size) == table, "a table is found by the hardware it names"

    def test_none_packaged(self) -> None:
        assert packaged("no such part", 3) is None
