"""The tables in the documentation show what the raw results say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import fill
import plot_results
import pytest
import ring_speedup_plot
import summary_plot

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
SCRIPTS = {"plot_results": plot_results, "ring_speedup_plot": ring_speedup_plot, "summary_plot": summary_plot}
PICTURE = re.compile(rf"python research/(?:{'|'.join(SCRIPTS)})\.py \S+\.png (?:[^\n`\\]|\\\n)+")

TEXT = (
    "before\n<!-- research/result_tables.py --json a.json\n     --kind 'x y' -->\nold\n<!-- end of table -->\nafter\n"
)


@pytest.mark.full
def test_tables_in_documents_are_what_the_tool_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    fill.main(["--check", *map(str, DOCUMENTS)])


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md", "benchmarks/results.md"])
def test_measured_figures_are_in_such_tables(name: str) -> None:
    """Every table of message sizes is a generated one; nothing would compare others with the results."""
    outside = re.sub(
        r"<!-- research/result_tables.py .*?<!-- end of table -->", "", (ROOT / name).read_text(), flags=re.S
    )
    assert re.findall(r"^\| \d+ [KMG]?B \|.*", outside, flags=re.M) == []
    assert "research/result_tables.py" in (ROOT / name).read_text()


def pictures() -> list[list[str]]:
    commands = [match for path in DOCUMENTS for match in PICTURE.findall(path.read_text())]
    return [shlex.split(command.replace("\\\n", " ")) for command in commands]


def _place(command: list[str]) -> int:
    """Return the place of the picture among the words of a command."""
    return next(at for at, word in enumerate(command) if word.endswith(".png"))


@pytest.mark.full
def test_pictures_are_drawn_by_the_commands_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert pictures(), "no command for a picture was found"
    for command in pictures():
        at = _place(command)
        assert Path(command[at]).is_file(), command
        drawn = tmp_path / Path(command[at]).name
        SCRIPTS[Path(command[1]).stem].main([str(drawn), *command[at + 1 :]])
        assert drawn.read_bytes().startswith(b"\x89PNG")


def test_every_picture_says_whether_earlier_kernels_made_it() -> None:
    """Wherever a document shows a picture of results, a generated note on the same results is below it."""
    made_of = {command[_place(command)]: {arg for arg in command if arg.endswith(".json")} for command in pictures()}
    for path in DOCUMENTS:
        text = path.read_text()
        for match in re.finditer(r"^!\[[^\]]*\]\(([^)]*\.png)\)", text, flags=re.M):
            name = str((path.parent / match[1]).resolve().relative_to(ROOT))
            following = text[match.end() :].partition("<!-- end of kernels -->")[0]
            note = following.partition("<!-- research/made_by.py")[2].partition("-->")[0]
            assert set(note.replace("--json", "").split()) == made_of[name], (path, name)


def test_fill_makes_tables_and_nothing_else_anew() -> None:
    seen = []

    def make(command: str, arguments: list[str]) -> str:
        seen.append((command, arguments))
        return "\nnew\n" if command == "table" else ""

    note = "![picture](a.png)\n<!-- research/made_by.py --json a.json -->\nold note\n<!-- end of kernels -->\n"
    new = fill.fill(TEXT + note, make)
    assert seen == [("table", ["--json", "a.json", "--kind", "x y"]), ("kernels", ["--json", "a.json"])]
    assert new == TEXT.replace("old\n", "\nnew\n\n") + note.replace("old note\n", "")
    assert fill.fill(new, make) == new, "a second time changes nothing"


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("<!-- end of table -->", ""),
        TEXT + "<!-- end of table -->",
        TEXT.replace("<!-- end of table -->", "<!-- end of kernels -->"),
    ],
)
def test_a_table_without_an_end_is_an_error(text: str) -> None:
    with pytest.raises(SystemExit, match="no such end"):
        fill.fill(text, lambda command, arguments: "")


class TestCommand:
    @pytest.fixture
    def document(self, tmp_path: Path) -> Path:
        raw = ROOT / "benchmarks" / "data" / "h200" / "all_reduce_bf16_x4.json"
        document = tmp_path / "document.md"
        document.write_text(TEXT.replace("--json a.json\n     --kind 'x y'", f"--json {raw} --sizes 8K --columns nccl"))
        return document

    def test_check_finds_a_table_that_differs_and_writes_nothing(self, document: Path) -> None:
        with pytest.raises(SystemExit, match="out of date"):
            fill.main(["--check", str(document)])
        assert "old" in document.read_text()

    def test_writes_the_table(self, document: Path) -> None:
        fill.main([str(document)])
        assert "| 8 KB | 8.5 | 4.21x |" in document.read_text()
        fill.main(["--check", str(document)])
