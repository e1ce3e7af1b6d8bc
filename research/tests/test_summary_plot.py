"""The summary picture: one curve for the fastest of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
import summary_plot
from call_modes.rows import CallRow

from shotcast.bench import report
from shotcast.errors import ConfigError

KB = 1 << 10
TIMES_US = {
    "one_shot": 2.0, "two_shot": 3.0, "two_shot_fp8": 1.0, "nccl": 9.0, "nccl_ring": 8.0,
    "torch_one_shot": 7.0, "torch_two_shot": 6.0, "ring": 5.0,
}  # fmt: skip


def row(algorithm: str, nbytes: int, time_us: float, **facts: object) -> CallRow:
    times = [time_us] * 2
    return CallRow.from_ranks(algorithm=algorithm, nbytes=nbytes, medians_us=times, p99s_us=times, **facts)


def rows(**change: object) -> list[CallRow]:
    facts = {"op": "all_reduce", "dtype": "bfloat16", "device": "cuda", "world_size": 4, "errors": 0, **change}
    return [row(name, nbytes, time_us, **facts) for nbytes in (8 * KB, 1024 * KB) for name, time_us in TIMES_US.items()]


def test_a_curve_is_the_fastest_of_a_family_with_the_bits_of_the_contract() -> None:
    both = [8 * KB, 1024 * KB]
    expected = {"shotcast": 2.0, "NCCL": 8.0, "PyTorch": 6.0, "our ring": 5.0}
    assert summary_plot.curves(rows()) == {name: [(size, time) for size in both] for name, time in expected.items()}


def test_four_curves_on_logarithmic_axes_and_the_times_that_matter() -> None:
    (axes,) = summary_plot.figure(rows(), "NVIDIA H200").axes
    assert [line.get_label() for line in axes.lines] == ["shotcast", "NCCL", "PyTorch", "our ring"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert sorted(text.get_text() for text in axes.texts) == ["2.0", "2.0", "8.0", "8.0"]


def test_one_panel_a_world_size() -> None:
    figure = summary_plot.figure([*rows(world_size=2), *rows()])
    assert [axes.get_title() for axes in figure.axes] == ["2 GPUs", "4 GPUs"]


def test_rows_of_two_dtypes_make_no_picture() -> None:
    with pytest.raises(ConfigError, match="one dtype"):
        summary_plot.figure([*rows(), *rows(dtype="float32")])


def test_writes_a_picture(tmp_path: Path) -> None:
    result = report.Result.now(rows(), environment={}, command="", kernels={})
    report.write(tmp_path / "rows.json", result)
    summary_plot.main([str(tmp_path / "picture.png"), "--json", str(tmp_path / "rows.json")])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
