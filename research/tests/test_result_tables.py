"""The Markdown tables of the documentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import engine_results
import pytest
import result_tables
from call_modes.rows import CallRow

from shotcast.errors import ConfigError

DATA = Path(__file__).parents[2] / "benchmarks" / "data"


def cells(text: str) -> list[list[str]]:
    """Return the lines of cells, without the rule below the head."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert len({len(line) for line in lines}) == 1, "every line has as many cells"
    assert set(lines[1]) == {"---"}
    return [lines[0], *lines[2:]]


def row(algorithm: str = "ring", nbytes: int = 1 << 20, time_us: float = 100.0, **change: object) -> CallRow:
    facts = {"op": "all_reduce", "device": "cpu", "world_size": 4, "dtype": "bfloat16", "errors": 0, **change}
    return CallRow.from_ranks([time_us], [time_us], algorithm=algorithm, nbytes=nbytes, **facts)


def gpu(algorithm: str, nbytes: int, time_us: float, **change: object) -> CallRow:
    return row(algorithm, nbytes, time_us, **{"device": "cuda", "world_size": 4, **change})


TIMES = [
    gpu("two_shot", 1 << 20, 1234.5), gpu("one_shot", 1 << 20, 2000.0), gpu("ring", 1 << 20, 100.0),
    gpu("nccl", 1 << 20, 5000.0), gpu("nccl_ll", 1 << 20, 2469.0), gpu("torch_one_shot", 1 << 20, 1.0),
    gpu("two_shot", 512, 3.0), gpu("nccl", 512, 9.04),
]  # fmt: skip


def test_times_in_order_with_the_best_nccl_over_the_best_with_own_bits() -> None:
    assert cells(result_tables.markdown_table(TIMES)) == [
        ["", "one-shot", "two-shot", "ring", "NCCL (default)", "NCCL LL", "torch one-shot", "best NCCL / own bits"],
        ["512 B", "", "3.0", "", "9.0", "", "", "3.01x"],
        ["1 MB", "2000", "1234", "100.0", "5000", "2469", "1.0", "2.00x"],
    ]


def test_columns_leave_the_ratio_alone() -> None:
    text = result_tables.markdown_table(TIMES, columns=["nccl", "two_shot"], sizes=[1 << 20])
    assert cells(text) == [
        ["", "NCCL (default)", "two-shot", "best NCCL / own bits"],
        ["1 MB", "5000", "1234", "2.00x"],
    ]


def test_two_ranks_count_the_ring_as_own_bits() -> None:
    rows = [
        row("ring", 64, 10.0, world_size=2),
        row("one_shot", 64, 20.0, world_size=2),
        row("gloo", 64, 90.0, world_size=2),
    ]
    assert cells(result_tables.markdown_table(rows))[1][-1] == "9.00x"
    four = [row("ring", 64, 10.0), row("one_shot", 64, 20.0), row("gloo", 64, 90.0)]
    assert cells(result_tables.markdown_table(four))[1][-1] == "4.50x"


def test_without_a_library_there_is_no_ratio() -> None:
    assert cells(result_tables.markdown_table([row("ring"), row("one_shot")]))[0] == ["", "one-shot", "ring"]


def test_a_wrong_result_is_an_empty_cell() -> None:
    wrong = CallRow.from_ranks(
        op="all_reduce", device="cpu", world_size=4, dtype="bfloat16", algorithm="one_shot", nbytes=64,
        medians_us=[], p99s_us=[], errors=3,
    )  # fmt: skip
    assert cells(result_tables.markdown_table([wrong, row("ring", 64, 5.0)]))[1] == ["64 B", "", "5.0"]


def test_summary_puts_world_sizes_side_by_side_and_marks_the_fastest() -> None:
    rows = [*TIMES, gpu("one_shot", 512, 2.0, world_size=2), gpu("nccl_tree", 512, 1.5, world_size=2)]
    assert cells(result_tables.markdown_table(rows, "summary")) == [
        ["", "4 GPUs: shotcast", "NCCL", "PyTorch", "our ring", "2 GPUs: shotcast", "NCCL", "PyTorch", "our ring"],
        ["512 B", "**3.0**", "9.0", "", "", "2.0", "**1.5**", "", ""],
        ["1 MB", "1234", "2469", "**1.0**", "100.0", "", "", "", ""],
    ]


def test_ratios() -> None:
    rows = [row("ring", 64, 30.0), row("two_shot", 64, 20.0), row("one_shot", 64, 10.0), row("gloo", 64, 125.0)]
    rows.append(row("gloo", 64, 10.0, world_size=2))
    assert cells(result_tables.markdown_table(rows, "ratios")) == [
        ["", "4 ranks: Gloo / shotcast", "ring / two-shot", "2 ranks: Gloo / shotcast", "ring / two-shot"],
        ["64 B", "12x", "1.50x", "", ""],
    ]


def fused(algorithm: str, time_us: float, tokens: int = 2, **change: object) -> CallRow:
    facts = {"op": "all_reduce_rms_norm", "hidden": 64, "dtype": "bfloat16", **change}
    return gpu(algorithm, tokens * 128, time_us, **facts)


FUSED = [
    fused("one_shot", 8.0), fused("auto", 7.5), fused("unfused", 9.0), fused("plain", 6.5),
    fused("plain_one_shot", 6.0), fused("fp8_dynamic", 5.75), fused("nccl", 20.0),
]  # fmt: skip


def test_fused_says_what_is_above_the_fastest_plain_all_reduce() -> None:
    assert cells(result_tables.markdown_table(FUSED)) == [
        ["tokens", "size", "one-shot", "auto", "unfused", "plain", "plain one-shot", "FP8 dynamic", "NCCL (default)",
         "above plain: fused", "above plain: FP8 dynamic", "above plain: unfused"],
        ["2", "256 B", "8.0", "7.5", "9.0", "6.5", "6.0", "5.8", "20.0", "+1.5", "-0.2", "+3.0"],
    ]  # fmt: skip


def test_without_plain_nothing_is_above_it() -> None:
    rows = [fused("one_shot", 8.0), fused("unfused", 9.0)]
    assert cells(result_tables.markdown_table(rows))[0] == ["tokens", "size", "one-shot", "unfused"]


def between(algorithm: str, back_us: float, between_us: float, nbytes: int = 256) -> list[CallRow]:
    work = {"measure": "between", "work": "gemm 64x64", "works_us": [7.0, 7.25], "hidden": 64}
    return [gpu(algorithm, nbytes, back_us, hidden=64), gpu(algorithm, nbytes, between_us, **work)]


def test_between_compares_what_is_saved() -> None:
    rows = [*between("one_shot", 2.0, 3.0), *between("nccl", 12.0, 11.0), *between("nccl_ll", 10.0, 12.0)]
    assert cells(result_tables.markdown_table(rows)) == [
        ["", "tokens", "gemm 64x64 alone", "back to back: shotcast", "NCCL", "saved",
         "with work between: shotcast", "NCCL", "saved", "kept"],
        ["256 B", "2", "7.2", "2.0", "10.0", "8.0", "3.0", "11.0", "8.0", "100%"],
    ]  # fmt: skip


def test_between_without_a_saving_keeps_no_share_of_it() -> None:
    rows = [*between("one_shot", 12.0, 3.0), *between("nccl", 10.0, 11.0)]
    assert cells(result_tables.markdown_table(rows))[1][-5:] == ["-2.0", "3.0", "11.0", "8.0", ""]


def test_host_rows_are_shown_where_there_are_no_others_or_on_request() -> None:
    host = gpu("one_shot", 64, 20.0, measure="host")
    assert cells(result_tables.markdown_table([host]))[1] == ["64 B", "20.0"]
    both = [host, gpu("one_shot", 64, 2.0)]
    assert cells(result_tables.markdown_table(both))[1] == ["64 B", "2.0"]
    assert cells(result_tables.markdown_table(both, measure="host"))[1] == ["64 B", "20.0"]


@pytest.mark.parametrize(
    ("rows", "arguments", "match"),
    [
        ([], {}, "no rows"),
        ([row(), row(dtype="float32")], {}, "one dtype; these rows have bfloat16, float32"),
        ([row(), row(world_size=2)], {}, "one world_size; these rows have 2, 4"),
        ([row()], {"kind": "pie"}, "no table 'pie'; choose from times, summary"),
        ([row()], {"columns": ["nccl"]}, "not measured: nccl"),
        ([row()], {"sizes": [3 << 10]}, "not measured: 3 KB"),
        ([row()], {"kind": "between"}, "no rows with work"),
        ([row()], {"measure": "host"}, "no rows of 'host'; there are call"),
    ],
)
def test_what_does_not_fit_is_an_error(rows: list[CallRow], arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        result_tables.markdown_table(rows, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("nbytes", "text"), [(8, "8 B"), (1536, "1.5 KB"), (1 << 20, "1 MB"), (3 << 30, "3 GB")])
def test_size_names(nbytes: int, text: str) -> None:
    assert result_tables.size_name(nbytes) == text


def hosts(algorithm: str, time_us: float, **change: object) -> CallRow:
    predicted_us = None if algorithm == "gloo" else 0.9 * time_us
    facts = {"nodes": 2, "delay_us": 1000.0, "predicted_us": predicted_us, **change}
    return replace(row(algorithm, 4096, time_us), **facts)  # type: ignore[arg-type]


NETWORKS = [
    hosts("one_shot", 1500.0, nodes=4), hosts("auto", 2000.0, nodes=4), hosts("gloo", 9000.0, nodes=4),
    hosts("auto", 3000.0, delay_us=500.0), hosts("gloo", 60_000.0, delay_us=500.0),
]  # fmt: skip


def test_hosts_by_network() -> None:
    """Flat sums of four nodes have other bits than the contract, so their algorithm is none of the fastest."""
    first, second = "4 hosts, 1 ms: ", "2 hosts x 2 ranks, 0.5 ms: "
    assert cells(result_tables.markdown_table(NETWORKS)) == [
        ["", first + "Gloo", "auto", "Gloo / auto", "fastest", second + "Gloo", "auto", "Gloo / auto", "fastest"],
        ["4 KB", "9.0", "2.0", "4.50x", "", "60.0", "3.0", "20x", ""],
    ]


def test_the_model_over_the_measured_time() -> None:
    assert cells(result_tables.markdown_table(NETWORKS, "model")) == [
        ["", "4 hosts, 1 ms: one-shot", "4 hosts, 1 ms: auto", "2 hosts x 2 ranks, 0.5 ms: auto"],
        ["4 KB", "0.90", "0.90", "0.90"],
    ]


@pytest.mark.parametrize("kind", ["hosts", "model"])
def test_one_host_has_no_network(kind: str) -> None:
    with pytest.raises(ConfigError, match="rows are of one host"):
        result_tables.markdown_table([row()], kind)


def test_operations_have_the_best_library_over_auto() -> None:
    rows = [gpu(name, 512, us, op="broadcast") for name, us in (("auto", 2.0), ("nccl", 9.0), ("nccl_ll", 8.0))]
    rows += [gpu("auto", 1024, 10.0, op="broadcast"), gpu("nccl", 1024, 5.0, op="broadcast")]
    for name, us in (("auto", 1.0), ("one_shot", 0.5), ("nccl", 30.0)):
        rows.append(gpu(name, 512, us, op="reduce", reduction="max", dtype="int32", world_size=2))
    assert cells(result_tables.markdown_table(rows, "operations")) == [
        ["", "operation", "reduction", "dtype", "512 B", "1 KB"],
        ["4 GPUs", "broadcast", "", "bfloat16", "4.00x", "0.50x"],
        ["2 GPUs", "reduce", "max", "int32", "30x", ""],
    ]
    with pytest.raises(ConfigError, match="only one op"):
        result_tables.markdown_table(rows, "times")
    with pytest.raises(ConfigError, match="only one reduction"):
        result_tables.markdown_table([gpu("nccl", 512, 1.0), gpu("nccl", 512, 1.0, reduction="max")])


KEPT = [
    f"--json={Path(__file__).parents[2]}/benchmarks/data/h200/earlier/all_reduce_bf16_x{number}.json"
    for number in (4, 2)
]


def test_stored_results(capsys: pytest.CaptureFixture[str]) -> None:
    result_tables.main([KEPT[0], "--sizes", "8K,1M", "--columns", "two_shot,nccl"])
    assert capsys.readouterr().out.splitlines() == [
        "| | two-shot | NCCL (default) | best NCCL / own bits |",
        "|---|---|---|---|",
        "| 8 KB | 4.1 | 8.4 | 3.63x |",
        "| 1 MB | 6.9 | 16.5 | 2.40x |",
        "",
        "*Made by the kernels of commit 443446a.*",
    ]


def test_world_sizes_of_several_files(capsys: pytest.CaptureFixture[str]) -> None:
    result_tables.main([*KEPT, "--kind", "summary", "--sizes", "8K"])
    assert capsys.readouterr().out.count("GPUs: shotcast") == 2
    result_tables.main([*KEPT, "--kind", "summary", "--sizes", "8K", "--world-size=2"])
    assert capsys.readouterr().out.splitlines()[0] == "| | 2 GPUs: shotcast | NCCL | PyTorch | our ring |"


def test_rows_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages of a pipeline are served by own connections or by Gloo; on one host they have one way."""
    file = DATA / "cpu" / "engine_smollm2_f32.json"
    rows = engine_results.read(file)
    result_tables.main(["--kind", "engine", "--json", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + len(rows)
    row = rows[-1]
    assert (row.layout, row.hosts) == ("1x2", 1)
    assert f"| {row.tpot_ms:.2f} |" in lines[1 + len(rows)]
    assert result_tables.engine_table([row]).splitlines()[2].startswith("| 1x2 | - |")
    moved = replace(row, hosts=2, delay_us=50.0, algorithm="gloo")
    assert result_tables.engine_table([moved]).splitlines()[0].startswith("| hosts | one way us | layout |")
    assert result_tables.engine_table([moved]).splitlines()[2].startswith("| 2 | 50 | 1x2 | gloo |")


@pytest.mark.parametrize(
    ("name", "world_size", "has"),
    [
        ("one_shot", 8, True), ("two_shot", 8, True), ("ring", 2, True), ("ring", 3, False), ("auto", 2, False),
        ("two_shot_fp8", 2, False), ("nccl", 2, False),
    ],
)  # fmt: skip
def test_own_bits(name: str, world_size: int, has: bool) -> None:
    assert result_tables.own_bits(row(name, world_size=world_size)) is has
