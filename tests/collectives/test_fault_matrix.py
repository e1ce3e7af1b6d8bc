"""The fault matrix on CPU ranks: in each cell the named error arrives in time, and nothing is left behind."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fault_matrix as matrix
import fault_matrix_run as runs
import pytest
from fault_matrix import Case, Cell, usual

pytestmark = [pytest.mark.timing, pytest.mark.timeout(120)]
SEED = int(os.environ.get("FAULT_MATRIX_SEED", "20"))
DRAWS = 100
RECORD = runs.Record("sh research/measure.sh FOLDER faults_cpu", "cpu")
EVERY = matrix.jobs("cpu", 3, 0.5)
DRAWN = matrix.draws(DRAWS, SEED, "cpu", (2, 3, 4), (0.3, 1.0))

QUICK = {
    "own": [
        ("late", "all_reduce_rms_norm"),
        ("absent", "all_gather"),
        ("mismatched", "broadcast"),
        ("stopped", "recv"),
        ("mismatched", "all_to_all"),
        ("late", "reduce"),
        ("absent", "all_to_all_uneven"),
        ("mismatched", "gather"),
        ("stopped", "scatter"),
        ("killed", "all_reduce"),
    ],
    "vendor": [
        ("late", "barrier"),
        ("absent", "all_reduce_int"),
        ("mismatched", "all_reduce_max"),
        ("mismatched", "send"),
        ("stopped", "all_reduce_rms_norm"),
        ("killed", "reduce_scatter"),
    ],
}
INSIDE = ("stopped", "vendor")
_BESIDE_OTHERS_S = 3.0
"""The grace where two jobs and other tests share the cores."""


def quick(path: str) -> list[Case]:
    """Return the cases of a path; the vendor library's stopped rank stops inside the library."""
    cells = [Cell(fault, path, operation, "eager", (fault, path) == INSIDE) for fault, operation in QUICK[path]]
    return [usual(cell, 2, 0.3, "reset") for cell in cells]


@pytest.mark.full
def test_a_few_cells() -> None:
    with ThreadPoolExecutor() as pool:  # these ranks mostly wait
        for outcomes in pool.map(lambda path: runs.run(quick(path), "cpu", 40, grace_s=_BESIDE_OTHERS_S), matrix.PATHS):
            assert runs.complaints(outcomes) == []


@pytest.mark.full
@pytest.mark.parametrize("path", ["own", "vendor", "inside"])
def test_an_uncaught_error_ends_the_process(path: str) -> None:
    code, took, written = runs.run_uncaught("cpu", path, 60)
    assert "shotcast.errors.CollectiveTimeout: rank 0: all_reduce" in written
    assert "missing ranks: 1." in written
    assert code == 1
    assert 0.9 < took < 10, "the deadline, the error, and the end of the interpreter"


def test_every_value_is_among_the_few() -> None:
    few = [(*pair, path) for path, pairs in QUICK.items() for pair in pairs]
    assert {fault for fault, _, _ in few} == set(matrix.FAULTS)
    assert {operation for _, operation, _ in few} == set(matrix.OPERATIONS)
    assert {(fault, path) for fault, _, path in few} == set(itertools.product(matrix.FAULTS, matrix.PATHS))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cells_exist_or_say_why_not(device: str) -> None:
    product = len(matrix.FAULTS) * len(matrix.PATHS) * len(matrix.OPERATIONS) * len(matrix.MODES)
    existing, missing = matrix.cells(device), matrix.missing(device)
    assert len(existing) + sum(missing.values()) == 2 * product, "each with and without a fault inside the library"
    assert len(set(existing)) == len(existing)
    known = {cell for cell in existing if not cell.inside}
    assert len(known) == (product if device == "cuda" else product // 2)
    jobs = matrix.jobs(device, 2, 1.0)
    assert [case.cell for cases in jobs for case in cases] == existing
    for cases in jobs:
        assert len({(case.cell.path, case.cell.operation, case.cell.mode) for case in cases}) == 1
        assert not any(case.cell.fault == "killed" for case in cases[:-1])


def test_draws_reach_every_value() -> None:
    for device in ("cpu", "cuda"):
        drawn = matrix.draws(6000, 1, device, (2, 3), (0.3, 1.0))
        assert {case.cell for case in drawn} == set(matrix.cells(device))
        for values in (matrix.DIFFERENCES, matrix.DTYPES):
            reached = {(case.cell.operation, case.difference) for case in drawn}
            reached |= {(case.cell.operation, case.dtype) for case in drawn}
            assert {(name, value) for name, listed in values.items() for value in listed} <= reached
        assert matrix.draws(50, 7, device, (2, 3), (1, 1)) == matrix.draws(50, 7, device, (2, 3), (1, 1))


def test_what_did_not_happen_is_said() -> None:
    """Reports that differ from what a case promises are complained about."""
    case = usual(Cell("late", "own", "all_reduce", "eager"), 2, 0.5, "reset")
    error = {"class": "CollectiveTimeout", "missing": (1,), "reason": "late", "op": "all_reduce", "text": ""}
    good = {"error": error, "waited_s": 0.51, "again": "CollectiveTimeout", "usable": True}
    victim = runs.Report(1, **(good | {"waited_s": 0.0}))
    changes = [
        ({}, ""),
        ({"error": None}, "no error"),
        ({"error": error | {"missing": (0,)}}, "names (0,), not 1"),
        ({"error": error | {"reason": "dead"}}, "says dead, not late"),
        ({"error": error | {"op": "barrier"}}, "names the operation barrier"),
        ({"error": {"class": "RuntimeError", "text": "x"}}, "RuntimeError instead of CollectiveTimeout: x"),
        ({"waited_s": 0.1}, "no error came after more than 0.10 s, before the deadline"),
        ({"waited_s": 1.7}, "the error came 1.20 s past the deadline"),
        ({"freed_s": 3.0}, "the error came 3.01 s past the deadline"),
        ({"again": ""}, "the next call raised nothing after 0.00 s"),
        ({"usable": False}, "the call gives something else after a reset"),
        ({"left": {"threads": 2}}, "left after close: {'threads': 2}"),
    ]
    for change, complaint in changes:
        outcome = runs.Outcome(case)
        runs.judge(outcome, {0: runs.Report(0, **(good | change)), 1: victim})
        assert [text.removeprefix("rank 0: ") for text in outcome.wrong] == ([complaint] if complaint else [])
    case = usual(Cell("late", "own", "all_reduce", "eager"), 3, 0.5, "reset")
    late = error | {"missing": (case.victim,)}
    for first_s, complaints in ((0.4, []), (0.3, ["an error came after 0.30 s, long before the deadline"])):
        three = runs.Outcome(case)
        waited_s = {case.victim: 0.0, (case.victim + 1) % 3: first_s, (case.victim + 2) % 3: 0.51}
        reports = {rank: runs.Report(rank, **(good | {"error": late, "waited_s": s})) for rank, s in waited_s.items()}
        runs.judge(three, reports)
        assert three.wrong == complaints, "the deadline of the first rank ends the calls of all"


def test_a_record_is_written_after_each_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "faults.json"
    monkeypatch.setenv("FAULT_MATRIX_JSON", str(file))
    record = runs.Record("a command", "cpu")
    for number in (1, 2):
        record.add("every", [runs.Outcome(EVERY[0][0], ["late"] * (number - 1), 0.25, 1.5)], seed=4)
        written = runs.json.loads(file.read_text())
        assert (written["command"], written["seed"]) == ("a command", 4)
        assert written["missing_cells"] == matrix.missing("cpu")
        assert written["kernels"]
        assert (written["cases"], written["failed"], written["worst_past_s"]) == ({"every": number}, number - 1, 0.25)
        assert [row["fault"] for row in written["every"]] == ["late"] * number
        assert written["environment"]["cores"]


@pytest.mark.full
@pytest.mark.parametrize("cases", EVERY, ids=lambda cases: f"{cases[0].cell.path}-{cases[0].cell.operation}")
def test_every_cell_once(cases: list[Case]) -> None:
    outcomes = runs.run(cases, "cpu", 40 + 5 * len(cases))
    RECORD.add("every", outcomes)
    assert runs.complaints(outcomes) == []


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("operation", [name for name, algorithms in matrix.OPERATIONS.items() if algorithms])
def test_kernels_of_gpus_interpreted(operation: str) -> None:
    """Own cells of an operation, by the kernels of GPUs. These take longer, and so does the deadline."""
    cells = [cell for cell in matrix.cells("cpu") if (cell.path, cell.operation) == ("own", operation)]
    outcomes = runs.run([usual(cell, 2, 3.0, "reset") for cell in cells], "cpu", 300, interpreted=True)
    assert runs.complaints(outcomes) == []


@pytest.mark.full
@pytest.mark.parametrize("case", DRAWN, ids=range(DRAWS))
def test_random_draws(case: Case) -> None:
    outcomes = runs.run([case], "cpu", 40)
    RECORD.add("draws", outcomes, seed=SEED)
    assert runs.complaints(outcomes) == []
