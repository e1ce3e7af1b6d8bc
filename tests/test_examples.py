"""Every example runs as its docstring says: by itself, and under torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from example_targets import run_as_rank
from shotcast.launcher.spawn import spawn

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

SUM = r"rank \d has \[0\.0, 1111\.0, 2222\.0, 3333\.0\]"
EXPLANATION = r" (?:1 KiB of float32|64 KiB of float32|4 MiB of float32|2 KiB of int64): "
STAR = r"star: \[111\.0, 111\.0, 111\.0, 111\.0, 111\.0\]"
TRAINED = r"rank \d: loss [2-4]\.\d\d -> 0\.\d\d, the same parameters on all ranks: True"
SAME = r"rank \d: the same results: True, the same gradients: True"

EXPECTED = {
    "01_all_reduce.py": rf"({SUM}\n){{4}}",
    "02_explain.py": rf"( +{EXPLANATION}.+\n){{4}}",
    "03_choose_an_algorithm.py": r"(?s)(?=.*ring: +[\d.]+ us)(?=.*one_shot: +[\d.]+ us, the same bits).*",
    "04_killed_rank.py": (
        r"rank 0: missed \(2,\); now rank 0 of 3, and the sum is 3\n"
        r"rank 1: missed \(2,\); now rank 1 of 3, and the sum is 3\n"
        r"rank 2: the process was killed by SIGKILL.*\n"
        r"rank 3: missed \(2,\); now rank 2 of 3, and the sum is 3\n"
    ),
    "05_compile.py": rf"({SAME}\n){{2}}",
    "06_own_algorithm.py": rf"({STAR}\n){{3}}all_reduce of 20 bytes, float32: .*star [\d.]+.*legal: .*star.*\n",
    "07_train.py": rf"({TRAINED}\n){{2}}",
}

UNDER_TORCHRUN = {
    "01_all_reduce.py": (4, SUM, 4),
    "02_explain.py": (2, EXPLANATION, 4),
    "03_choose_an_algorithm.py": (4, r"\d us, the same bits as two_shot", 2),
    "04_killed_rank.py": (4, r"rank [013]: missed \(2,\); now rank [012] of 3, and the sum is 3", 3),
    "05_compile.py": (2, SAME, 2),
    "06_own_algorithm.py": (3, STAR, 3),
    "07_train.py": (2, TRAINED, 2),
}
"""Number of ranks, and what all of them together print, how often. Lines of processes may mix."""

LONG = ("02_explain.py", "03_choose_an_algorithm.py", "05_compile.py", "06_own_algorithm.py", "07_train.py")
"""Examples that only the full tests run by themselves; the default tests run ranks of three of them (IN_PLACE)."""
KILLED = "04_killed_rank.py"
"""The ranks that go on must come in time, or they are named too."""
IN_PLACE = ("02_explain.py", "03_choose_an_algorithm.py", "06_own_algorithm.py")
"""Examples that the default tests run in ranks forked by spawn, with torchrun's environment."""


def test_all_examples_are_known() -> None:
    assert [file.name for file in EXAMPLES] == sorted(EXPECTED) == sorted(UNDER_TORCHRUN)


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.timing] if name == KILLED else [pytest.mark.full] if name in LONG else []


@pytest.mark.full
@pytest.mark.parametrize("file", [pytest.param(file, marks=marks_of(file.name), id=file.stem) for file in EXAMPLES])
def test_runs(file: Path) -> None:
    assert f"python examples/{file.name}" in file.read_text()
    command = [sys.executable, file.relative_to(ROOT)]
    # else each rank that Inductor compiles for starts processes of its own
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(EXPECTED[file.name], result.stdout), result.stdout + result.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full, *marks_of(name)]) for name in UNDER_TORCHRUN]
)
def test_runs_under_torchrun(name: str) -> None:
    ranks, expected, times = UNDER_TORCHRUN[name]
    arguments = ["--nproc-per-node", str(ranks), f"examples/{name}"]
    assert f"torchrun {' '.join(arguments)}" in (ROOT / "examples" / name).read_text()
    # the module is what the command torchrun calls; standalone takes a free port
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        printed, errors = job.communicate(timeout=300)
        assert job.returncode == 0, errors
    finally:
        if job.poll() is None:
            for child in children(job.pid):
                os.kill(child, signal.SIGKILL)
            job.kill()
            job.wait()
    assert len(re.findall(expected, printed)) == times, printed + errors


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", IN_PLACE)
def test_runs_as_a_rank(name: str) -> None:
    """torchrun's processes know each other by their environment, and start no ranks of their own."""
    ranks, expected, times = UNDER_TORCHRUN[name]
    path = str(ROOT / "examples" / name)
    printed = "".join(spawn(run_as_rank, ranks, path, timeout_s=300, env={"TORCHELASTIC_RUN_ID": "none"}))
    assert len(re.findall(expected, printed)) == times, printed
