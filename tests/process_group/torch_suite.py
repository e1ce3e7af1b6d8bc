"""Run PyTorch's own distributed suite, as it ships in the wheel, on ranks of any backend.

``python tests/process_group/torch_suite.py --backend shotcast --world-size 3 --out FILE.json [NAME ...]``

The suite decides by the name of the backend, when it is imported, which tests exist, and knows the names of PyTorch's
own backends alone. So it is imported under the name of Gloo, and then, for what the first left out, under that of MPI:
both serve CPU tensors as this package's backend does. With ``--device cuda`` it is imported under the name of NCCL. The
ranks then run the bodies of the tests, unchanged, with the backend that was asked for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from shotcast import process_group
from shotcast.hardware.detect import detect
from shotcast.process_group import BACKEND, registration

SELECTIONS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl",)}
"""The names under which the suite is imported, in turn, by the device of most tensors."""
EXPLAINED = {
    r"Need at least \d CUDA devices|CUDA is not available": "needs GPUs",
    r"N(ccl|CCL) .*(supports|Only|only)|Only N(ccl|CCL)|Nccl & Gloo|to be one of \{'nccl'\}": "needs NCCL, and GPUs",
    r"no torchvision": "needs GPUs and torchvision",
    r"github.com/pytorch/pytorch|flakiness|NVIDIA internal CI": "PyTorch leaves it out for every backend",
    r"small world size|Only MPI supports": "makes a group of ranks 1 and 2: runs with three ranks",
    r"odd world size": "pairs ranks: runs with an even number of them",
    r"world size of 4": "runs with four ranks",
}
"""Why tests are left out, by what the suite says of them."""
Outcome = dict[str, Any]


def explanation(reason: str) -> str:
    """Return why the suite left a test out; empty for a reason that nobody has explained."""
    return next((text for pattern, text in EXPLAINED.items() if re.search(pattern, reason)), "")


class Record(unittest.TestResult):
    """The outcome of every test, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, Outcome] = {}
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._began = time.monotonic()

    def _note(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        seconds = round(time.monotonic() - self._began, 2)
        name = test.id().rsplit(".", 1)[-1]
        self.outcomes[name] = {"outcome": outcome, "reason": reason}
        print(f"{outcome:8}{seconds:7.2f} s  {name}  {reason}", file=sys.stderr, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._note(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure  # noqa: N815


def suite_class(selection: str, backend: str, world_size: int, folder: str) -> type[unittest.TestCase]:
    """Import the suite under the name ``selection`` and return its tests with ranks of ``backend``."""
    os.environ.update(BACKEND=selection, WORLD_SIZE=str(world_size), INIT_METHOD=f"file://{folder}/init")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA that was asked serves no forked rank
    if importlib.util.find_spec("expecttest") is None:
        # PyTorch's helpers import it, and the suite needs no more of it than a base class.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    if torch.cuda.device_count() == 0:  # known before ranks start
        common_distributed.skip_if_no_gpu = unittest.skip("CUDA is not available")
        common_distributed.skip_if_lt_x_gpu = lambda x, **_: unittest.skip(f"Need at least {x} CUDA devices")
    if world_size >= 3:
        # These tests make a group of ranks 1 and 2, and need no more ranks. PyTorch leaves them out below eight, as
        # they were not meant for the GPUs of its own machines.
        common_distributed.skip_if_small_worldsize = lambda function: function
    from torch.testing._internal.distributed import distributed_test

    # Setting up a test imports it, and it asks for Triton and Numba, which would use the GPU before ranks are forked.
    known = sys.modules.pop("numba.cuda", None)
    sys.modules["numba.cuda"] = None  # type: ignore[assignment]
    with mock.patch("torch.utils._triton.has_triton", return_value=False):
        importlib.import_module("torch.testing._internal.common_device_type")
    del sys.modules["numba.cuda"]
    if known is not None:
        sys.modules["numba.cuda"] = known

    distributed_test.BACKEND = backend
    os.environ["BACKEND"] = backend
    if backend == BACKEND:
        registration.register()
        dist.monitored_barrier = process_group.monitored_barrier

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        """The suite with forked ranks, which need not import PyTorch again."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _test_accumulate_gradients_no_sync(self, *args: Any, **kwargs: Any) -> None:
            # The body has a branch for each backend that it knows; that of CPU models is taken.
            distributed_test.BACKEND = selection
            super()._test_accumulate_gradients_no_sync(*args, **kwargs)

    return Suite


def run_here(selection: str, backend: str, world_size: int, names: list[str]) -> dict[str, Outcome]:
    """Run the tests called ``names``, or all, of one selection in this process."""
    with tempfile.TemporaryDirectory() as folder:
        case = suite_class(selection, backend, world_size, folder)
        available = set(unittest.TestLoader().getTestCaseNames(case))
        if unknown := set(names) - available:
            raise SystemExit(f"the suite has no tests {sorted(unknown)}")
        record = Record()
        unittest.TestSuite(case(name) for name in names or sorted(available)).run(record)
    return record.outcomes


def run(
    backend: str, world_size: int, names: list[str] | None = None, log: Any = None, device: str = "cpu"
) -> dict[str, Outcome]:
    """Run the tests called ``names``, or all, of every selection.

    Each selection has a process of its own, as a process imports the suite once.

    Args:
        backend: of the ranks.
        world_size: the number of ranks.
        names: of the tests; None for all.
        log: a file for what tests and ranks print; None for this process's streams.
        device: of most tensors.
    """
    outcomes: dict[str, Outcome] = {}
    wanted = names or []
    for selection in SELECTIONS[device]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "outcomes.json"
            command = [sys.executable, __file__, "--backend", backend, "--world-size", str(world_size)]
            command += ["--selection", selection, "--out", str(path), *wanted]
            subprocess.run(command, check=True, stdout=log or sys.stderr, stderr=log)
            found = json.loads(path.read_text())
        for name, outcome in found.items():
            if name not in outcomes or outcome["outcome"] != "skipped":
                outcomes[name] = outcome
        wanted = [name for name, outcome in outcomes.items() if "Only MPI" in outcome["reason"]]
        if not wanted:
            break
    return outcomes


def summary(backend: str, world_size: int, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Return a run as it is kept: names of tests that passed, names by reason, messages by name."""
    by_outcome: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    reasons: dict[str, list[str]] = {}
    for name, outcome in sorted(outcomes.items()):
        by_outcome[outcome["outcome"]].append(name)
        if outcome["outcome"] == "skipped":
            reasons.setdefault(outcome["reason"], []).append(name)
    return {
        "backend": backend,
        "world_size": world_size,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "counts": {kind: len(found) for kind, found in by_outcome.items()},
        "passed": by_outcome["passed"],
        "failed": {name: _last_line(outcomes[name]["reason"]) for name in by_outcome["failed"]},
        "skipped": reasons,
    }


def keep(path: Path, kept: dict[str, Any]) -> None:
    """Put a run among those of a file, in the place of an earlier one of its backend and number of ranks."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [one for one in runs if (one["backend"], one["world_size"]) != (kept["backend"], kept["world_size"])]
    runs.append(kept)
    runs.sort(key=lambda one: (one["world_size"], one["backend"]))
    document = {
        "command": "tests/process_group/torch_suite.py --backend BACKEND --world-size N --out torch_suite.json",
        "environment": detect().as_json(),
        "runs": runs,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _last_line(reason: str) -> str:
    text = reason.split("To execute this test")[0].rstrip()
    return text.splitlines()[-1][:300] if text else ""


def options() -> argparse.ArgumentParser:
    """Return the parser of the command of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default=BACKEND)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--device", choices=sorted(SELECTIONS), default="cpu", help="of most tensors")
    selections = [name for names in SELECTIONS.values() for name in names]
    parser.add_argument("--selection", choices=selections, help="run one selection, in this process")
    parser.add_argument("--out", type=Path, help="a file of runs, of which the one of these ranks is replaced")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of tests; all by default")
    return parser


def main() -> None:
    """Run the command of this file."""
    asked = options().parse_args()
    if asked.selection is not None:
        outcomes = run_here(asked.selection, asked.backend, asked.world_size, asked.names)
        asked.out.write_text(json.dumps(outcomes))
        return
    outcomes = run(asked.backend, asked.world_size, asked.names, device=asked.device)
    kept = summary(asked.backend, asked.world_size, outcomes)
    if asked.out is not None:
        keep(asked.out, kept)
    why = Counter(explanation(outcome["reason"]) for outcome in outcomes.values() if outcome["outcome"] == "skipped")
    print(json.dumps({**kept["counts"], "why skipped": why, "failures": kept["failed"]}, indent=1))


if __name__ == "__main__":
    main()
