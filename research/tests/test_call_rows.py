"""Stored results of collectives: their rows, and the files that they are read from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from call_modes import rows
from call_modes.rows import CallRow, kernels_of

from shotcast.bench import kernels, report
from shotcast.errors import ConfigError

DATA = Path(__file__).parents[2] / "benchmarks" / "data"


def call_row(algorithm: str = "ring", nbytes: int = 1 << 20, time_us: float = 100.0, **change: object) -> CallRow:
    facts = {"op": "all_reduce", "device": "cpu", "world_size": 4, "dtype": "bfloat16", "errors": 0, **change}
    return CallRow.from_ranks(
        [time_us - 3, time_us], [time_us * 3, time_us * 2], algorithm=algorithm, nbytes=nbytes, **facts
    )


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    report.write(path, report.Result.now([call_row(hidden=64)], environment={}, command="", kernels={}))
    document = json.loads(path.read_text())
    for name in ("measure", "hidden", "work", "work_us", "allocations"):
        del document["rows"][0][name]
    del document["kernels"]
    path.write_text(json.dumps(document))
    assert rows.read(path).rows == (call_row(),)
    assert rows.read(path).kernels is None


def test_only_calls_back_to_back_have_bandwidths() -> None:
    for measure in ("between", "host"):
        point = call_row(measure=measure)
        assert (point.time_us, point.algbw_gbps, point.busbw_gbps) == (100.0, None, None)


def test_the_work_alone_is_the_slowest_ranks() -> None:
    assert call_row(measure="between", works_us=[7.0, 9.0, 8.0]).work_us == 9.0


def test_tokens() -> None:
    assert call_row(nbytes=3 * 64 * 2, hidden=64).tokens == 3
    assert call_row().tokens == 0


def fused(algorithm: str, time_us: float, **change: object) -> CallRow:
    return call_row(algorithm, 256, time_us, **{"op": "all_reduce_rms_norm", "hidden": 64, **change})


def test_what_is_above_plain_compares_like_with_like() -> None:
    own = fused("auto", 8.0)
    assert rows.above_plain_us(own, [own]) is None
    for other in (
        fused("plain", 6.0, world_size=2),
        fused("plain", 6.0, measure="host"),
        fused("plain", 6.0, hidden=32),
    ):
        assert rows.above_plain_us(own, [other]) is None
    assert rows.above_plain_us(own, [fused("plain", 6.0), fused("unfused", 1.0)]) == 2.0


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows": [{"op": "all_reduce"}]}', '{"rows": [3]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        rows.read(path)


def test_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    report.write(path, report.Result.now([call_row()], environment={}, command="", kernels={}))
    path.write_text(path.read_text().replace('"skew_us"', '"skew_ms"'))
    with pytest.raises(ConfigError, match="skew_ms, skew_us"):
        rows.read(path)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    result = report.Result.now(
        [call_row(), call_row("gloo", errors=None, measure="host", allocations=0)],
        environment={},
        command="shotcast bench all-reduce",
        kernels={"a/b": "1"},
    )
    report.write(tmp_path / "result.json", result)
    assert rows.read(tmp_path / "result.json") == result


def test_kept_results_are_read() -> None:
    names = ("all_reduce_", "between_", "fused_bf16", "hosts_", "host_", "operations_")
    kept = [path for path in DATA.rglob("*.json") if path.name.startswith(names)]
    assert len(kept) > 20
    for path in kept:
        assert rows.read(path).rows, path


def test_kernels_behind_fused_rows() -> None:
    def behind(algorithm: str, device: str = "cuda", op: str = "all_reduce_rms_norm") -> list[str]:
        return list(kernels_of([call_row(algorithm, device=device, op=op)]))

    assert behind("plain_two_shot") == ["all_reduce/two_shot"]
    assert behind("nccl") == ["kernels.triton.norm"]
    assert behind("gloo", "cpu") == ["transport.cpu.norm_rows"]
    assert behind("fp8_static") == [f"all_reduce_rms_norm/{name}" for name in ("one_shot", "two_shot", "vendor")]
    assert behind("unfused")[-1] == "kernels.triton.norm"
    plain = [call_row("two_shot", device="cuda")]
    assert kernels_of(plain) == kernels.of_rows(plain)
