"""research/sanitize.py: every collective kernel, each rank under a tool."""

from __future__ import annotations

from pathlib import Path

import pytest
import sanitize
from stress_calls import FUSED_FORMS

from shotcast.collectives.algorithm import FUSED
from shotcast.collectives.registry import BUILT_IN
from shotcast.wire import Op

KIND = {Op.ALL_GATHER: "all_gather", Op.SEND: "send_recv", Op.RECV: "send_recv"}


def test_every_kernel_is_called() -> None:
    called = {(case.kind, case.algorithm) for case in sanitize.cases("cuda")}
    for algorithm in BUILT_IN:
        for op in algorithm.forms:
            if not (algorithm.library or algorithm.multicast or op in FUSED):
                kind = KIND.get(op, op.label)
                assert {(kind, algorithm.name), (kind, "auto")} & called, (op, algorithm.name)
    assert {case.form for case in sanitize.cases("cuda")} == {"", *FUSED_FORMS}


@pytest.mark.full
def test_ranks_compare_results(capfd: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["--device", "cpu", "--tool", "none"]) == 0
    out = capfd.readouterr().out
    calls = sum(1 for _ in sanitize.cases("cpu"))
    assert all(f"rank {rank}: {calls} calls, 0 wrong" in out for rank in (0, 1))


def test_what_the_tool_says_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A tool that stands for compute-sanitizer: it writes a report, and does not run the rank."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(
        "#!/bin/sh\n"
        '[ "$NCCL_NVLS_ENABLE$TORCH_SYMM_MEM_DISABLE_MULTICAST$NVSHMEM_DISABLE_NVLS" = 011 ] || exit 3\n'
        'while [ "$1" != --log-file ]; do shift; done\n'
        'echo "========= ERROR SUMMARY: $RANK errors" >"$2"\n'
        "exit $((RANK * 9))\n"
    )
    fake.chmod(0o755)
    monkeypatch.setitem(sanitize.TOOLS, "memcheck", [str(fake)])
    assert sanitize.main(["--tool", "memcheck"]) == sanitize.FOUND
    out = capfd.readouterr().out
    assert "--- rank 0, memcheck: status 0\n========= ERROR SUMMARY: 0 errors\n" in out
    assert "--- rank 1, memcheck: status 9\n========= ERROR SUMMARY: 1 errors\n" in out


def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setitem(sanitize.TOOLS, "racecheck", [str(fake)])
    assert sanitize.main(["--tool", "racecheck", "--limit", "0.5"]) == 9
