"""The fault matrix on two and four GPUs: every cell once, and random draws. Run with ``pytest -m gpu``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import fault_matrix as matrix
import fault_matrix_run as runs
import pytest
from fault_matrix import Case

from shotcast.collectives.rank_device import enough_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not enough_gpus(2), reason="needs two GPUs"),
]
WORLD_SIZES = [n for n in (2, 4) if enough_gpus(n)]
SEED = int(os.environ.get("FAULT_MATRIX_SEED", "20"))
DRAWS = 30
DEADLINE_S = 1.0
JOBS = 4
"""Sets of ranks that run at once: most of their time they start, compile, or wait for a deadline."""
RECORD = runs.Record("sh research/measure.sh FOLDER faults", "cuda")


def run_all(part: str, jobs: Sequence[Sequence[Case]], **facts: object) -> list[str]:
    """Run jobs, several at once, and record each. Return what went wrong."""
    wrong = []
    with ThreadPoolExecutor(JOBS) as pool:
        for outcomes in pool.map(lambda cases: runs.run(cases, "cuda", 40 + 10 * len(cases)), jobs):
            RECORD.add(part, outcomes, **facts)
            wrong += runs.complaints(outcomes)
    return wrong


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("mode", matrix.MODES)
@pytest.mark.parametrize("path", matrix.PATHS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_cell_once(world_size: int, path: str, mode: str) -> None:
    jobs = [
        cases
        for cases in matrix.jobs("cuda", world_size, DEADLINE_S)
        if (cases[0].cell.path, cases[0].cell.mode) == (path, mode)
    ]
    assert len(jobs) >= len(matrix.OPERATIONS) - 1
    assert run_all("every", jobs) == []


@pytest.mark.parametrize("path", ["own", "vendor", "inside"])
def test_an_uncaught_error_ends_the_process(path: str) -> None:
    code, took, written = runs.run_uncaught("cuda", path, 120)
    assert "shotcast.errors.CollectiveTimeout: rank 0: all_reduce" in written
    assert code == 1
    assert 0.9 < took < 10, "the deadline, the error, and the end of the interpreter and of CUDA"


def test_random_draws() -> None:
    drawn = matrix.draws(DRAWS, SEED, "cuda", (2,), (DEADLINE_S, DEADLINE_S))
    assert run_all("draws", [[case] for case in drawn], seed=SEED) == []
