"""research/ring_speedup_plot.py: the picture of the speed-up of MultiShot over a ring."""

from __future__ import annotations

from pathlib import Path

import pytest
import ring_speedup_plot
from call_modes.rows import CallRow

from shotcast.bench import report
from shotcast.errors import ConfigError

KB = 1 << 10


def row(algorithm: str = "ring", nbytes: int = 1 << 20, time_us: float = 100.0, **change: object) -> CallRow:
    facts = {"op": "all_reduce", "device": "cpu", "world_size": 4, "dtype": "bfloat16", "errors": 0, **change}
    return CallRow.from_ranks(
        [time_us - 3, time_us], [time_us * 3, time_us * 2], algorithm=algorithm, nbytes=nbytes, **facts
    )


def rows(**change: object) -> list:
    facts = {"device": "cuda", **change}
    return [
        row(name, nbytes, time_us, **facts)
        for nbytes in (4 * KB, 64 * KB, 1024 * KB)
        for name, time_us in (("ring", 30.0), ("nccl_ring", 40.0), ("one_shot", 20.0), ("two_shot", 10.0))
    ]


def test_the_fastest_of_one_and_two_steps_and_auto_counts() -> None:
    points = [
        row("ring", 4 * KB, 30.0), row("one_shot", 4 * KB, 10.0), row("two_shot", 4 * KB, 20.0),
        row("ring", 8 * KB, 30.0), row("one_shot", 8 * KB, 20.0), row("auto", 8 * KB, 12.0),
        row("ring", 16 * KB, 30.0), row("gloo", 16 * KB, 1.0),
    ]  # fmt: skip
    assert ring_speedup_plot.ratios(points, "ring") == [(4 * KB, 3.0), (8 * KB, 2.5)]
    assert ring_speedup_plot.ratios(points, "nccl_ring") == []


@pytest.mark.parametrize(("nbytes", "shown"), [(2 * KB, 0), (4 * KB, 1), (1024 * KB, 1), (2048 * KB, 0)])
def test_sizes_of_decoding(nbytes: int, shown: int) -> None:
    assert len(ring_speedup_plot.ratios([row("ring", nbytes), row("one_shot", nbytes)], "ring")) == shown


def lines(figure) -> list[dict[str, list[float]]]:
    """Return the lines of each panel, by colour."""
    return [
        {line.get_color(): list(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) > 2}
        for axes in figure.axes
    ]


def test_one_panel_a_world_size_and_a_line_a_ring() -> None:
    figure = ring_speedup_plot.figure(
        [*rows(world_size=4), *(r for r in rows(world_size=2) if r.algorithm != "nccl_ring")]
    )
    ours, nccl = ring_speedup_plot.RINGS["ring"][1], ring_speedup_plot.RINGS["nccl_ring"][1]
    assert lines(figure) == [{ours: [3.0] * 3}, {ours: [3.0] * 3, nccl: [4.0] * 3}]
    assert [axes.get_title() for axes in figure.axes] == ["2 GPUs: 2 ring steps", "4 GPUs: 6 ring steps"]


def test_rows_of_another_measure_are_left_out() -> None:
    host = [row(name, 4 * KB, 1.0, device="cuda", measure="host") for name in ("ring", "one_shot")]
    assert len(lines(ring_speedup_plot.figure([*rows(), *host]))[0][ring_speedup_plot.RINGS["ring"][1]]) == 3
    with pytest.raises(ConfigError, match="needs an all_reduce of 4 KB to 1 MB"):
        ring_speedup_plot.figure(host)


def test_everything_a_reader_needs_is_on_it() -> None:
    figure = ring_speedup_plot.figure(rows(), "NVIDIA H200, NCCL 2.28.9")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    texts = [text.get_text() for text in (*axes.texts, *axes.get_xticklabels(), *figure.texts)]
    texts += [axes.get_xlabel(), axes.get_ylabel()]
    for words in ("4 KB", "64 KB", "1 MB", "our ring / MultiShot", "NCCL's ring / MultiShot", "3.0x", "4.0x", "3x",
                  "time of the ring / time of MultiShot", "message size", "as fast as the ring",
                  "NVIDIA H200, NCCL 2.28.9"):  # fmt: skip
        assert words in texts, words
    assert axes.get_xscale() == "log"


def test_writes_a_picture(tmp_path: Path) -> None:
    report.write(tmp_path / "a.json", report.Result.now(rows(), environment={}, command="", kernels={}))
    ring_speedup_plot.main([str(tmp_path / "picture.png"), "--json", str(tmp_path / "a.json")])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_lines_are_inside_the_axes() -> None:
    fast = [row("ring", 4 * KB, 90.0), row("one_shot", 4 * KB, 10.0)]
    for axes in ring_speedup_plot.figure([*fast, *rows(world_size=2, device="cpu")]).axes:
        low, high = axes.get_ylim()
        assert low <= 0
        assert high > 9


@pytest.mark.parametrize(
    ("drawn", "match"),
    [
        ([row("ring", 4 * KB)], "timed by nccl_ring or ring, and by one of one_shot"),
        ([row("ring", 64), row("one_shot", 64)], "4 KB to 1 MB"),
        ([row(name, 4 * KB, op="all_gather") for name in ("ring", "one_shot")], "all_reduce"),
        ([*rows(), *rows(dtype="float32")], "one dtype"),
    ],
)
def test_rows_that_make_no_such_picture(drawn: list, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ring_speedup_plot.figure(drawn)
