"""Stored results of ``shotcast bench engine``: they are read, and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import engine_results
import plot_results
import pytest

from shotcast.errors import ConfigError

DATA = Path(__file__).parents[2] / "benchmarks" / "data"


@pytest.mark.parametrize("path", sorted(DATA.rglob("engine_*.json")), ids=lambda path: path.stem)
def test_kept_results_are_read(path: Path) -> None:
    assert engine_results.read(path)
    document = json.loads(path.read_text())
    assert document["command"].startswith("shotcast bench engine ")
    assert document["environment"]["versions"]["torch"]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{"op": "all_reduce"}]}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError, match=r"other.json is not a result of shotcast bench engine"):
        engine_results.read(tmp_path / "other.json")


def draw(picture: Path, *kept: str, more: tuple[str, ...] = ()) -> None:
    files = [argument for name in kept for argument in ("--json", str(DATA / "h200" / name))]
    plot_results.main([str(picture), "--kind", "engine", *files, *more])


def test_kept_results_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
    picture = tmp_path / "engine.svg"
    draw(picture, "engine_8b_x2.json")
    text = picture.read_text()
    for label in ("TP2 x PP1, auto", "TP2 x PP1, nccl", "TP1 x PP2<", "random:llama-3.1-8b", "prompt 512, output 128"):
        assert label in text


@pytest.mark.parametrize(
    ("name", "kept", "more", "error"),
    [
        ("a.png", ("engine_8b_x2.json", "engine_70b_x2.json"), (), ConfigError),
        ("a.png", ("engine_8b_x2.json",), ("--world-size", "2"), SystemExit),
        ("a.txt2", ("engine_8b_x2.json",), (), ConfigError),
    ],
)
def test_pictures_that_cannot_be_drawn(
    name: str, kept: tuple[str, ...], more: tuple[str, ...], error: type[BaseException], tmp_path: Path
) -> None:
    with pytest.raises(error):
        draw(tmp_path / name, *kept, more=more)
    assert not (tmp_path / name).exists()


EARLIER = [f"--json={DATA}/h200/earlier/all_reduce_bf16_x{number}.json" for number in (4, 2)]


def test_latencies_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caption says where they were measured."""
    plot_results.main([str(tmp_path / "picture.png"), *EARLIER])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    captions = []
    monkeypatch.setattr(plot_results, "plot", lambda rows, path, caption: captions.append(caption))
    plot_results.main([str(tmp_path / "a.png"), *EARLIER])
    assert captions == ["NVIDIA H200, PyTorch 2.11.0, Triton 3.6.0, NCCL 2.28.9, 2026-11-21"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["a.png", "--json", "none.json"], "none.json is not a benchmark result"),
        (["a.docx", EARLIER[0]], "accepted: .png, .svg, .pdf"),
        (["a.png", EARLIER[0], "--world-size", "8"], "nothing to plot"),
    ],
)
def test_latencies_that_cannot_be_drawn(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plot_results.main(words)
