"""Tuned tables: parsing, the texts of errors, and which row serves a size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotcast import wire
from shotcast.collectives import fingerprints
from shotcast.collectives.algorithm import FUSED, CollectiveProblem, Topology
from shotcast.collectives.choice import table as tables
from shotcast.collectives.choice.candidates import keeps_bits, launch_unsupported_reason, unsupported_reason
from shotcast.collectives.choice.table import (
    MODES,
    Table,
    TableRow,
    all_packaged,
    file_name,
    fit_for,
    load,
    packaged,
    parse,
    render,
)
from shotcast.collectives.registry import registered
from shotcast.errors import ConfigError
from shotcast.hardware.nodes import NodeLayout
from shotcast.transport.triton import GPUS
from shotcast.wire import LaunchShape, NodeShape, Norm, Op
from transports_by_name import named

ALGORITHMS = tuple(registered())
NODES = st.builds(NodeShape, st.integers(1, 4), st.integers(1, 8))


def table_text(**changes: Any) -> str:
    whole = {
        "format": 3,
        "kernels": {"graph/all_reduce/bfloat16": {"one_shot": "0123"}},
        "part": "NVIDIA H200",
        "world_size": 4,
        "provenance": {"2026-01-01": {}},
        "measurements": [],
        "entries": {
            "graph": {
                "all_reduce": {
                    "bfloat16": [
                        [1024, "one_shot", {"programs": 8, "block_words": 64, "num_warps": 1}],
                        [65536, "two_shot", None],
                        [None, "vendor", None],
                    ],
                    "float32": [[4096, "ring", None]],
                }
            },
            "eager": {"all_reduce": {"bfloat16": [[2048, "ring", None]]}},
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
        row = parse(table_text(), "t", registered()).lookup("all_reduce", "bfloat16", nbytes, "graph")
        assert row is not None
        assert row.algorithm == algorithm

    def test_launch(self) -> None:
        table = parse(table_text(), "t", registered())
        row = table.lookup("all_reduce", "bfloat16", 5, "graph")
        assert row is not None
        assert row.launch == LaunchShape(programs=8, block_words=64, num_warps=1)
        row = table.lookup("all_reduce", "bfloat16", 2000, "graph")
        assert row is not None
        assert row.launch is None

    @pytest.mark.parametrize(
        ("mode", "dtype", "nbytes", "found"),
        [
            ("graph", "bfloat16", 2000, ("graph", "two_shot")),
            ("eager", "bfloat16", 2000, ("eager", "ring")),
            ("eager", "float32", 2000, ("graph", "ring")),  # no rows for eager calls, so the other mode serves
            ("eager", "bfloat16", 3000, None),  # rows exist, but they do not reach this size
        ],
    )
    def test_mode(self, mode: str, dtype: str, nbytes: int, found: tuple[str, str] | None) -> None:
        row = parse(table_text(), "t", registered()).lookup("all_reduce", dtype, nbytes, mode)
        assert (row and (row.mode, row.algorithm)) == found

    def test_the_other_mode_serves_either_way(self) -> None:
        table = parse(
            table_text(entries={"eager": {"broadcast": {"int8": [[8, "one_shot", None]]}}}), "t", registered()
        )
        row = table.lookup("broadcast", "int8", 8, "graph")
        assert row is not None
        assert row.mode == "eager"

    @pytest.mark.parametrize(
        ("op", "dtype", "nbytes"),
        [("all_reduce", "float32", 4097), ("all_reduce", "float16", 1), ("broadcast", "bfloat16", 1)],
    )
    def test_no_row_for_other_calls(self, op: str, dtype: str, nbytes: int) -> None:
        assert parse(table_text(), "t", registered()).lookup(op, dtype, nbytes) is None

    @given(
        st.lists(st.integers(0, 1 << 34), unique=True, min_size=1, max_size=20).map(sorted),
        st.booleans(),
        st.integers(0, 1 << 34),
        st.data(),
    )
    def test_first_row_that_is_large_enough_serves(
        self, bounds: list[int], endless: bool, nbytes: int, data: st.DataObject
    ) -> None:
        limits: list[int | None] = [*bounds, None] if endless else list(bounds)
        rows = [[limit, data.draw(st.sampled_from(ALGORITHMS)), None] for limit in limits]
        row = parse(table_text(entries={"eager": {"all_reduce": {"int8": rows}}}), "t", registered()).lookup(
            "all_reduce", "int8", nbytes
        )
        wanted = next((r for r in rows if r[0] is None or nbytes <= r[0]), None)
        if wanted is None:
            assert row is None
        else:
            assert row is not None
            assert (row.nbytes, row.algorithm) == (float("inf") if wanted[0] is None else wanted[0], wanted[1])


def entries(*rows: Any, op: str = "all_reduce", dtype: str = "bfloat16") -> dict[str, Any]:
    return {"entries": {"eager": {op: {dtype: list(rows)}}}}


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"format": 1}, r"has format 1; this version reads format 3: run `shotcast tune` again"),
            ({"format": 4}, "has format 4; this version reads format 3"),
            ({"format": "absent"}, "has format None"),
            ({"format": True}, "has format True"),
            ({"kernels": 5}, "table my.json, kernels: an object is meant, not 5"),
            ({"kernels": {"graph/all_reduce/int8": 5}}, "kernels of graph/all_reduce/int8: an object is meant, not 5"),
            ({"kernels": {"all_reduce": {}}}, "kernels: mode/operation/dtype has a fingerprint by algorithm"),
            ({"kernels": {"graph/all_reduce/int8": {"ring": 5}}}, "kernels: mode/operation/dtype has a fingerprint"),
            ({"earlier_kernels": True}, "earlier_kernels: words are meant, not True"),
            ({"part_name": "x"}, "unknown keys: part_name"),
            ({"part": "absent", "world_size": "absent"}, "lacks part, world_size"),
            ({"part": 3}, "part is the name of a GPU or processor, not 3"),
            ({"part": ""}, "part is the name"),
            ({"world_size": "four"}, "world_size is a whole number from 1 up, not 'four'"),
            ({"world_size": 0}, "world_size is a whole number from 1 up, not 0"),
            ({"world_size": True}, "world_size is a whole number from 1 up, not True"),
            ({"entries": "absent"}, "lacks entries"),
            ({"provenance": [1]}, r"provenance: an object is meant, not \[1\]"),
            ({"measurements": {}}, "measurements: a list is meant, not {}"),
            ({"entries": []}, r"entries: an object is meant, not \[\]"),
            ({"entries": {"all_reduce": {}}}, "entries for 'all_reduce'; calls are graph or eager"),
            ({"entries": {"graph": 3}}, "graph: an object is meant, not 3"),
            ({"entries": {"graph": {"all_reduce": None}}}, "graph/all_reduce: an object is meant, not None"),
            ({"entries": {"graph": {"all_reduce": {"int8": {}}}}}, "graph/all_reduce/int8: a list of rows is meant"),
            ({"part": "cpu"}, "entries for graph, and CPU ranks have eager calls only"),
            (entries(3), "eager/all_reduce/bfloat16: a row is"),
            (entries([1024, "tree", None]), "eager/all_reduce/bfloat16: unknown algorithm 'tree'"),
            (entries([1024, ["ring"], None]), "unknown algorithm"),
            (entries([1024, "ring"]), r"a row is \[bytes or null, algorithm, launch or null\], not \[1024, 'ring'\]"),
            (entries([1024, "ring", {"blocks": 3}]), "a launch has programs, block_words, num_warps, chunk_bytes"),
            (entries([1024, "ring", 3]), "a launch has programs"),
            (entries([1024, "ring", {"programs": -1}]), "programs is a whole number from 0 up, not -1"),
            (entries([1024, "ring", {"num_warps": 1.5}]), "num_warps is a whole number from 0 up, not 1.5"),
            (entries([1024, "ring", {"num_warps": True}]), "num_warps is a whole number from 0 up, not True"),
            (entries(["1K", "ring", None]), "up to a whole number of bytes, or null for any, not '1K'"),
            (entries([-1, "ring", None]), "up to a whole number of bytes, or null for any, not -1"),
            (
                {"entries": {"eager": {"all_reduce_rms_norm": {"bfloat16": [[64, "one_shot", {"programs": 4}]]}}}},
                "all_reduce_rms_norm/bfloat16: the launch of fused calls follows from their rows; null is meant",
            ),
            (entries([2048, "ring", None], [1024, "one_shot", None]), "all_reduce/bfloat16: sizes must ascend"),
            (entries([1024, "ring", None], [1024, "one_shot", None]), "sizes must ascend"),
            (entries([None, "ring", None], [1024, "one_shot", None]), "sizes must ascend"),
            (entries([1024, "ring", None], op="allreduce"), "allreduce/bfloat16, which is no operation and dtype"),
            (entries([1024, "ring", None], dtype="bf16"), "all_reduce/bf16, which is no operation and dtype"),
        ],
    )
    def test_says_what_is_wrong_and_where(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            parse(table_text(**changes), "my.json", registered())
        assert "my.json" in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "is not JSON"),
            ("[]", "is a JSON list"),
            ("3", "is a JSON int"),
            ("9" * 5000, "is not JSON"),
            ("[" * 100_000, "is not JSON"),
            ("", "is not JSON"),
        ],
    )
    def test_text_that_is_no_table(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            parse(text, "my.json", registered())

    LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(ALGORITHMS)
    JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner))
    ROW = st.tuples(st.integers(0, 1 << 40) | LEAVES, st.sampled_from(ALGORITHMS) | JSON, st.none() | JSON).map(list)

    @pytest.mark.full
    @given(
        st.dictionaries(st.sampled_from(["format", "kernels", "part", "world_size", "provenance", "entries"]), JSON)
        | JSON.map(lambda value: {"entries": value})
        | JSON.map(lambda value: {"entries": {"eager": {"all_reduce": value}}})
        | st.lists(ROW | JSON, max_size=4).map(lambda rows: entries(*rows))
    )
    def test_any_text_is_read_or_refused_with_a_message(self, changes: dict[str, Any]) -> None:
        table, message = None, ""
        try:
            table = parse(table_text(**changes), "my.json", registered())
        except ConfigError as error:
            message = str(error)
        if table is None:
            assert "my.json" in message
            return
        for (mode, op, dtype), rows in table.rows.items():
            for nbytes in (0, 1024, 1 << 40):
                row = table.lookup(op, dtype, nbytes, mode)
                assert row is None or (row in rows and row.nbytes >= nbytes)


class TestRender:
    ROWS = st.lists(st.integers(0, 1 << 40), unique=True, max_size=4).map(sorted)
    SHAPES = st.none() | st.builds(
        LaunchShape, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 1 << 20)
    )
    KEYS = st.tuples(
        st.sampled_from(MODES), st.sampled_from([op.label for op in Op]), st.sampled_from(list(wire.DTYPES))
    )

    @pytest.mark.full
    @given(st.data(), st.lists(KEYS, unique=True, max_size=4), st.text(min_size=1), NODES)
    def test_is_read_back(self, data: st.DataObject, keys: list[Any], name: str, shape: NodeShape) -> None:
        part = f"part {name}"
        rows = {}
        for key in keys:
            limits: list[float] = [*data.draw(self.ROWS)]
            if data.draw(st.booleans()):
                limits.append(float("inf"))
            shapes = st.none() if Op[key[1].upper()] in FUSED else self.SHAPES
            rows[key] = tuple(
                TableRow(limit, data.draw(st.sampled_from(ALGORITHMS)), data.draw(shapes), key[0]) for limit in limits
            )
        text = render(part, shape, rows, {"today": {"a": [1, {"b": 2}], "c": {}}}, [{"x": 1}, {"y": [2]}])
        table = parse(text, "t", registered())
        assert (table.part, table.shape) == (part, shape)
        assert table.rows == rows
        document = json.loads(text)
        assert document["provenance"] == {"today": {"a": [1, {"b": 2}], "c": {}}}
        assert document["measurements"] == [{"x": 1}, {"y": [2]}]

    def test_each_row_is_one_line(self) -> None:
        text = render(
            "p", NodeShape(1, 2), {("graph", "barrier", "int8"): [TableRow(8, "ring", LaunchShape(), "graph")]}, {}, []
        )
        shape = json.dumps(dataclasses.asdict(LaunchShape()))
        assert f'     [8, "ring", {shape}]\n' in text


class TestFiles:
    def test_loaded(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_text(table_text())
        table = load(str(path), "NVIDIA H200", NodeShape(1, 4), registered())
        assert isinstance(table, Table)
        assert (table.name, table.part, table.shape, table.text) == (
            str(path),
            "NVIDIA H200",
            NodeShape(1, 4),
            table_text(),
        )

    @pytest.mark.parametrize(("part", "world_size"), [("NVIDIA H200", 8), ("NVIDIA H100", 4), ("cpu", 4)])
    def test_for_other_hardware(self, tmp_path: Path, part: str, world_size: int) -> None:
        path = tmp_path / "t.json"
        path.write_text(table_text())
        reason = f"{path} is for 4 x NVIDIA H200, and this is {world_size} x {part}"
        assert load(str(path), part, NodeShape(1, world_size), registered()) == reason

    def test_for_other_nodes(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_text(table_text(nodes=2))
        two = NodeShape(2, 2)
        assert isinstance(load(str(path), "NVIDIA H200", two, registered()), Table)
        for shape, here in ((NodeShape(1, 4), ""), (NodeShape(4, 1), " on 4 nodes")):
            reason = f"{path} is for 4 x NVIDIA H200 on 2 nodes, and this is 4 x NVIDIA H200{here}"
            assert load(str(path), "NVIDIA H200", shape, registered()) == reason
        assert file_name("NVIDIA H200", two) == "nvidia_h200_2x2.json"

    @pytest.mark.parametrize("nodes", [0, 3, "2", True])
    def test_nodes_that_do_not_divide_the_ranks(self, nodes: Any) -> None:
        with pytest.raises(ConfigError, match="nodes is a whole number that divides 4 ranks, not"):
            parse(table_text(nodes=nodes), "t", registered())

    def test_for_other_hardware_and_malformed(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_text(table_text(entries={"graph": {"all_reduce": {"bfloat16": [[1, "fast", None]]}}}))
        with pytest.raises(ConfigError, match="unknown algorithm 'fast'"):
            load(str(path), "NVIDIA H200", NodeShape(1, 8), registered())

    def test_unreadable(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="SHOTCAST_TABLE: cannot read"):
            load(str(tmp_path), "cpu", NodeShape(1, 2), registered())

    def test_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="SHOTCAST_TABLE: cannot read"):
            load(str(path), "cpu", NodeShape(1, 2), registered())

    @pytest.mark.parametrize(
        ("part", "passed"), [("EPYC", ""), ("cpu", ""), ("Xeon", "is for 4 x Xeon, and this is 4 x EPYC")]
    )
    def test_tables_of_processors(self, tmp_path: Path, part: str, passed: str) -> None:
        path = tmp_path / "t.json"
        path.write_text(table_text(part=part, entries={"eager": {}}))
        found = load(str(path), "EPYC", NodeShape(1, 4), registered(), "cpu")
        if passed:
            assert found == f"{path} {passed}"
        else:
            assert isinstance(found, Table)
            assert found.part == part

    def test_table_for_any_processor_serves_no_gpu(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_text(table_text(part="cpu", entries={"eager": {}}))
        assert isinstance(load(str(path), "NVIDIA H200", NodeShape(1, 4), registered()), str)

    def test_graph_rows_of_a_processor_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_text(table_text(part="EPYC"))
        with pytest.raises(ConfigError, match="has entries for graph, and CPU ranks have eager calls only"):
            load(str(path), "EPYC", NodeShape(1, 4), registered(), "cpu")

    @pytest.mark.parametrize(
        ("kernels", "launch", "message"),
        [
            ("triton", {"programs": 0}, "programs are 1 to 2147483646, not 0"),
            ("triton", {"block_words": 100}, "block_words is a power of two from 16 to 4096, not 100"),
            ("interpreter", {"block_words": 8}, "block_words is a power of two from 16 to 8192, not 8"),
            ("interpreter", {"block_words": 16, "num_warps": 4}, ""),
            ("triton", {"block_words": 32, "num_warps": 1}, ""),
            (
                "triton",
                {"block_words": 16, "num_warps": 1},
                "block_words is at least the threads of a program, 32 in 1 warps, not 16",
            ),
            (
                "triton",
                {"block_words": 128, "num_warps": 8},
                "block_words is at least the threads of a program, 256 in 8 warps, not 128",
            ),
            ("triton", {"num_warps": 3}, "num_warps is a power of two from 1 to 16, not 3"),
            ("triton", {"num_warps": 0}, "num_warps is a power of two from 1 to 16, not 0"),
            ("triton", {"programs": (1 << 31) - 2, "block_words": 4096, "num_warps": 16}, ""),
            ("compiled", {"programs": 0, "block_words": 0, "num_warps": 0, "chunk_bytes": 640}, ""),
        ],
    )
    def test_launches_that_kernels_cannot_take(self, kernels: str, launch: dict[str, int], message: str) -> None:
        table = parse(
            table_text(entries={"eager": {"all_reduce": {"int8": [[8, "ring", launch]]}}}), "my.json", registered()
        )
        if message:
            with pytest.raises(ConfigError, match=f"table my.json, eager/all_reduce/int8, ring: {message}"):
                fit_for(table, named(kernels), registered())
        else:
            assert fit_for(table, named(kernels), registered()) is table


def unsaid(table: Table) -> str:
    """Return what a packaged table does not say of the kernels that made it; empty if it tells the truth."""
    notes = [fingerprints.of_table(table, key, registered(), GPUS) for key in table.rows]
    if table.earlier_kernels:
        return "" if any(notes) else f"{table.name} speaks of earlier kernels, and no kernel has changed"
    return next((f"{table.name}: {note}" for note in notes if note), "")


PACKAGED = sorted((Path(tables.__file__).parent / "tables").glob("*.json"))


class TestPackaged:
    @pytest.mark.parametrize("file", PACKAGED, ids=lambda file: file.name)
    def test_is_found_by_the_hardware_it_names_and_fits_it(self, file: Path) -> None:
        table = parse(file.read_text(), file.name, registered())
        assert file.name == file_name(table.part, table.shape)
        found = packaged(table.part, table.shape, registered())
        assert found == table
        assert fit_for(table, GPUS, registered()) is table

    @pytest.mark.parametrize("file", PACKAGED, ids=lambda file: file.name)
    def test_each_row_is_legal_and_keeps_the_bits(self, file: Path) -> None:
        table = parse(file.read_text(), file.name, registered())
        layout = NodeLayout.one_node(table.shape.world_size)
        topology = Topology(layout, "cuda", table.part, GPUS, "", True, 512 << 20, registered())
        assert table.rows
        for (mode, op, dtype), rows in table.rows.items():
            least = 0
            for row in rows:
                for nbytes in {least, int(min(row.nbytes, 256 << 20))}:
                    # fused calls consist of whole rows
                    norm = Norm(8) if Op[op.upper()] in FUSED else None
                    problem = CollectiveProblem(
                        Op[op.upper()], nbytes // 32 * 32 if norm else nbytes, dtype, topology, norm=norm
                    )
                    assert unsupported_reason(problem, row.algorithm) == "", (mode, op, dtype, row)
                    assert row.algorithm == "vendor" or keeps_bits(problem, row.algorithm), (mode, op, dtype, row)
                    if row.launch is not None:
                        assert launch_unsupported_reason(GPUS, registered()[row.algorithm], row.launch) == ""
                least = int(min(row.nbytes, 1 << 30)) + 1

    @pytest.mark.parametrize("file", PACKAGED, ids=lambda file: file.name)
    def test_provenance_names_versions(self, file: Path) -> None:
        for run in json.loads(file.read_text())["provenance"].values():
            assert {"versions", "driver"} <= run.keys()

    @pytest.mark.parametrize("file", PACKAGED, ids=lambda file: file.name)
    def test_made_by_other_kernels_says_so(self, file: Path) -> None:
        """After an edit of a kernel, either measure the table again or say in earlier_kernels why it still serves."""
        assert unsaid(parse(file.read_text(), file.name, registered())) == ""

    def test_what_is_not_said_is_found(self) -> None:
        table = parse(PACKAGED[0].read_text(), PACKAGED[0].name, registered())
        now = {key: fingerprints.of_operation(registered(), Op[key[1].upper()], GPUS) for key in table.rows}
        current = dataclasses.replace(table, kernels=now, earlier_kernels="")
        key = next(iter(table.rows))
        assert unsaid(current) == ""
        other = dataclasses.replace(current, kernels=now | {key: {"one_shot": "0123"}})
        assert "made by earlier kernels (one_shot)" in unsaid(other)
        absent = dataclasses.replace(current, kernels={})
        assert "were not recorded" in unsaid(absent)
        assert unsaid(dataclasses.replace(other, earlier_kernels="older")) == ""
        assert "no kernel has changed" in unsaid(dataclasses.replace(current, earlier_kernels="older"))

    def test_all_are_found_without_their_names(self) -> None:
        assert [table.name for table in all_packaged(registered())] == [file.name for file in PACKAGED]

    def test_no_table_for_an_unknown_part(self) -> None:
        assert packaged("no such part", NodeShape(1, 3), registered()) is None

    @pytest.mark.parametrize(
        ("part", "name"),
        [
            ("NVIDIA H200", "nvidia_h200_x4.json"),
            ("AMD EPYC 7B13, 64 cores", "amd_epyc_7b13_64_cores_x4.json"),
            ("Intel(R) Xeon(R)", "intel_r_xeon_r_x4.json"),
        ],
    )
    def test_file_names(self, part: str, name: str) -> None:
        assert file_name(part, NodeShape(1, 4)) == name
