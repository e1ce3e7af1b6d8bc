"""Documents say when the kernels that made a result have changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import made_by
import pytest
import result_tables
from call_modes.rows import read

from shotcast.bench import kernels, report
from shotcast.errors import ConfigError

ROW = report.Row.from_ranks(
    op="all_reduce",
    device="cuda",
    world_size=4,
    dtype="float32",
    algorithm="one_shot",
    nbytes=64,
    medians_us=[1.0],
    p99s_us=[1.0],
    errors=0,
)
TWO_SHOT = dataclasses.replace(ROW, algorithm="two_shot")


def noted(tmp_path: Path, *recorded: dict[str, str] | None) -> str:
    paths = []
    for number, fingerprints in enumerate(recorded):
        paths.append(tmp_path / f"{number}.json")
        report.write(paths[-1], report.Result({}, "", "", (ROW,), fingerprints))
    return made_by.note(paths)


def test_results_of_the_kernels_of_today_need_none(tmp_path: Path) -> None:
    assert noted(tmp_path, kernels.of_rows([ROW, TWO_SHOT])) == ""


def test_libraries_alone_need_none(tmp_path: Path) -> None:
    assert noted(tmp_path, {}) == ""


def test_names_few_kernels_that_changed(tmp_path: Path) -> None:
    now = kernels.of_rows([ROW, TWO_SHOT])
    assert noted(tmp_path, now | {"all_reduce/two_shot": "0"}) == "*Made by earlier kernels (all_reduce/two_shot).*"


def test_all_that_changed_need_no_names(tmp_path: Path) -> None:
    assert noted(tmp_path, {"all_reduce/one_shot": "0"}) == "*Made by earlier kernels.*"


def test_names_the_commit_where_the_result_does(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    report.write(path, report.Result({}, "", "", (ROW,), {"all_reduce/one_shot": "0"}))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"recorded_in": "1604f71"}))
    assert made_by.note([path]) == "*Made by the kernels of commit 1604f71.*"
    assert len(read(path).rows) == 1, "readers do not mind"


def test_a_kernel_that_does_not_exist_any_more_is_an_earlier_one(tmp_path: Path) -> None:
    recorded = kernels.of_rows([ROW]) | {"all_reduce/gone": "0", "other/one_shot": "0", "kernels.triton.gone": "0"}
    said = "*Made by earlier kernels (all_reduce/gone, other/one_shot, gone).*"
    assert noted(tmp_path, recorded) == said


def test_results_without_fingerprints_say_so(tmp_path: Path) -> None:
    assert noted(tmp_path, None) == "*Made by kernels whose fingerprints were not recorded.*"


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    said = noted(tmp_path, None, kernels.of_rows([ROW]), {"all_reduce/one_shot": "0"})
    assert said == (
        "*`0.json`: made by kernels whose fingerprints were not recorded. `2.json`: made by earlier kernels.*"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3, "kernels": {}}', '{"rows": [], "kernels": 3}'])
def test_another_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json is not a benchmark result"):
        made_by.note([path])


def test_a_table_has_the_note_below_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    report.write(path, report.Result({}, "", "", (ROW,), {"all_reduce/one_shot": "0"}))
    for main in (result_tables.main, made_by.main):
        main(["--json", str(path)])
        assert capsys.readouterr().out.rstrip().endswith("*Made by earlier kernels.*")
    report.write(path, report.Result({}, "", "", (ROW,), kernels.of_rows([ROW])))
    result_tables.main(["--json", str(path)])
    assert "kernels" not in capsys.readouterr().out
