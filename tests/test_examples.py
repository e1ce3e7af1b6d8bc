"""Every example runs as its docstring says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

EXPECTED = {
    "01_all_reduce.py": r"(rank \d has \[0\.0, 1111\.0, 2222\.0, 3333\.0\]\n){4}",
    "02_explain.py": r"( +(1 KiB|64 KiB|4 MiB) of float32: .+\n){3} +2 KiB of int64: .+\n",
    "03_choose_an_algorithm.py": r"(?s)(?=.*ring: +[\d.]+ us)(?=.*one_shot: +[\d.]+ us, the same bits).*",
    "04_killed_rank.py": (
        r"rank 0: missed \(2,\); now rank 0 of 3, and the sum is 3\n"
        r"rank 1: missed \(2,\); now rank 1 of 3, and the sum is 3\n"
        r"rank 2: the process was killed by SIGKILL.*\n"
        r"rank 3: missed \(2,\); now rank 2 of 3, and the sum is 3\n"
    ),
    "05_compile.py": r"(rank \d: the same results: True, the same gradients: True\n){2}",
}


def test_all_examples_are_known() -> None:
    assert [file.name for file in EXAMPLES] == sorted(EXPECTED)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_runs(file: Path) -> None:
    assert f"python examples/{file.name}" in file.read_text()
    command = [sys.executable, file.relative_to(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(EXPECTED[file.name], result.stdout), result.stdout + result.stderr
