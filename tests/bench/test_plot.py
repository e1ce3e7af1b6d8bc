from __future__ import annotations

from pathlib import Path

import pytest
from test_report import row

from shotcast.bench import implementations, plot
from shotcast.bench.operations import OPERATIONS
from shotcast.errors import ConfigError


def rows():
    return [
        row(name, nbytes, time_us, world_size=world_size)
        for world_size in (2, 8)
        for name, time_us in (("ring", 40.0), ("two_shot", 10.0), ("gloo", 4000.0))
        for nbytes in (1024, 65536)
    ]


def test_speedups() -> None:
    result = plot.speedups([row("ring", 64, 40.0), row("two_shot", 64, 10.0), row("two_shot", 128, 10.0)], "ring")
    assert result == {"ring": [(64, 1.0)], "two_shot": [(64, 4.0)]}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_writes_a_picture(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "new" / f"picture.{suffix}"
    plot.plot(rows(), path)
    start = path.read_bytes()[:8]
    assert start == b"\x89PNG\r\n\x1a\n" if suffix == "png" else b"<?xml" in start


def test_names_everything_a_reader_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
    plot.plot(rows(), tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    for words in (
        "2 ranks",
        "8 ranks",
        "two_shot",
        "speed-up over ring",
        "time of a call",
        "64 KiB",
    ):
        assert f">{words}" in text, words


def test_no_speed_up_of_an_own_algorithm_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """World sizes share the axis, so its limits must hold for all of them, including those drawn last."""
    import matplotlib.figure

    made = []
    original = matplotlib.figure.Figure.subplots

    def subplots(self, *args, **kwargs):
        made.append(original(self, *args, **kwargs))
        return made[-1]

    monkeypatch.setattr(matplotlib.figure.Figure, "subplots", subplots)
    slow = [row("ring", 64, 10.0, world_size=2), row("one_shot", 64, 12.0, world_size=2)]
    plot.plot([*slow, row("ring", 64, 90.0, world_size=8), row("one_shot", 64, 10.0, world_size=8)], tmp_path / "a.png")
    for axes in made[0][1]:
        low, high = axes.get_ylim()
        assert low < 10 / 12
        assert high > 9


def test_without_a_ring_the_library_is_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    plot.plot([row("one_shot"), row("gloo")], tmp_path / "picture.svg")
    assert "speed-up over gloo" in (tmp_path / "picture.svg").read_text()


def test_colours_tell_all_implementations_apart() -> None:
    for op in OPERATIONS:
        for device in ("cpu", "cuda"):
            names = implementations.default(op, device)
            assert len({plot.color_of(name) for name in names}) == len(names)


@pytest.mark.parametrize("name", ["picture", "picture.docx"])
def test_unknown_format_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"accepted: \.png, \.svg, \.pdf"):
        plot.plot(rows(), tmp_path / name)


def test_nothing_to_plot_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to plot"):
        plot.plot([], tmp_path / "picture.png")
