"""Running cases of the fault matrix in processes of their own, judging what the ranks saw, and recording it."""

from __future__ import annotations

import datetime
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fault_matrix_targets as targets
import torch.distributed as dist
from fault_matrix import FUSED, MESSAGES, Case, label, missing
from fault_matrix_targets import Report

from quick_interpreter import GPU_COLLECTIVES, quietly
from shotcast.bench import kernels
from shotcast.hardware.detect import detect
from shotcast.launcher.monitor import wait_for_reports
from shotcast.launcher.spawn import RankGroup

GRACE_S = 1.0
"""A named error comes within the deadline and this long; so does the name of a rank whose process has ended."""
_BEGIN_S = 0.1
"""The time between the first and the last rank's begin of a call, at the most."""
_EXIT_S = 10.0


@dataclass
class Outcome:
    """A case that was run.

    Attributes:
        wrong: what the matrix promises and did not happen.
        past_s: the longest time between the deadline, or the end of a killed rank, and the error.
        exit_s: the time that the slowest process took to end after the last of its cases; 0 if others followed.
    """

    case: Case
    wrong: list[str] = field(default_factory=list)
    past_s: float = 0.0
    exit_s: float = 0.0

    def row(self) -> dict[str, Any]:
        case = asdict(self.case)
        outcome = {"past_s": round(self.past_s, 3), "exit_s": round(self.exit_s, 2), "wrong": self.wrong}
        return case.pop("cell") | case | outcome


def run(
    cases: Sequence[Case], device: str, limit_s: float, interpreted: bool = False, grace_s: float = GRACE_S
) -> list[Outcome]:
    """Run cases of one path and number of ranks one after the other in one set of processes; judge each of them.

    The processes are killed after ``limit_s``. Only the last case may kill a rank. With ``interpreted``, CPU ranks run
    the kernels of GPUs. ``grace_s`` is GRACE_S on a machine that does nothing else.
    """
    (path,), (world_size,) = {case.cell.path for case in cases}, {case.world_size for case in cases}
    assert not any(case.cell.fault == "killed" for case in cases[:-1])
    outcomes = [Outcome(case) for case in cases]
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as shm,
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
    ):
        environment = {"SHOTCAST_SHM_DIR": shm, "SHOTCAST_ALGORITHM": "vendor" if path == "vendor" else "auto"}
        call: tuple[Any, ...] = (targets.run_cases, tuple(cases), device, folder, limit_s)
        if interpreted:
            environment |= {"TRITON_INTERPRET": "1", **GPU_COLLECTIVES}
            call = (quietly, *call)
        job = RankGroup.start(call[0], world_size, *call[1:], env=environment)
        try:
            ended = _end_of(job, cases[-1], limit_s, outcomes[-1])
        finally:
            job.end()
        if not ended:
            outcomes[-1].wrong.append(f"processes had not ended after {limit_s:g} s, or {_EXIT_S:g} s after their work")
        outcomes[-1].wrong += [f"left in shared memory: {name}" for name in os.listdir(shm)]
        pids = [int(file.read_text()) for file in Path(folder).glob("pid *")]
        outcomes[-1].wrong += [f"process {pid} is left" for pid in pids if Path(f"/proc/{pid}").exists()]
        for number, outcome in enumerate(outcomes):
            reports = {}
            for rank in range(world_size):
                file = Path(folder, f"{number} {rank}")
                if file.exists():
                    reports[rank] = pickle.loads(file.read_bytes())
            judge(outcome, reports, grace_s)
    return outcomes


def _end_of(job: RankGroup, last: Case, limit_s: float, outcome: Outcome) -> bool:
    """Wait for all processes. Return whether they ended in time by themselves; note how long that took."""
    if wait_for_reports(job.ranks, time.monotonic() + limit_s, stop_at_failure=False):
        return False
    started = time.monotonic()
    for rank in job.ranks:
        rank.process.join(max(0.0, started + _EXIT_S - time.monotonic()))
        if rank.process.exitcode is None:
            return False
        dies = last.cell.fault == "killed" and rank.rank == last.victim
        if rank.process.exitcode != (-9 if dies else 0):
            why = rank.failure.detail if rank.failure else "no error"
            outcome.wrong.append(f"rank {rank.rank} ended with code {rank.process.exitcode}: {why}")
    outcome.exit_s = time.monotonic() - started
    return True


def judge(outcome: Outcome, reports: Mapping[int, Report], grace_s: float = GRACE_S) -> None:
    """Compare the reports of the ranks with what the case promises."""
    case, wrong = outcome.case, outcome.wrong
    fault, victim = case.cell.fault, case.victim
    for rank in range(case.world_size):
        if rank == victim and fault == "killed":
            continue
        if rank not in reports:
            wrong.append(f"rank {rank} reported nothing")
            continue
        report = reports[rank]
        before = len(wrong)
        _judge_error(case, rank, report, wrong, grace_s)
        if report.usable is False:
            wrong.append("the call gives something else after a reset")
        if report.left:
            wrong.append(f"left after close: {report.left}")
        if report.trouble:
            wrong.append(report.trouble)
        wrong[before:] = [f"rank {rank}: {text}" for text in wrong[before:]]
        if report.error is not None:
            deadline_s = case.deadline_s if fault != "killed" else 0.0
            if rank == victim and fault in ("late", "stopped"):
                deadline_s = 0.0  # the others have found the fault before it calls
            outcome.past_s = max(outcome.past_s, report.waited_s + report.freed_s - deadline_s)
    # the deadline of the first rank, which may have begun a moment before the others, ends the calls of all
    waited = [report.waited_s for rank, report in reports.items() if rank != victim and report.error is not None]
    if fault in ("late", "absent", "stopped") and waited:
        if max(waited) < 0.9 * case.deadline_s:
            wrong.append(f"no error came after more than {max(waited):.2f} s, before the deadline")
        elif min(waited) < 0.9 * case.deadline_s - _BEGIN_S:
            wrong.append(f"an error came after {min(waited):.2f} s, long before the deadline")
    if outcome.past_s > grace_s:
        wrong.append(f"the error came {outcome.past_s:.2f} s past the deadline")


def _judge_error(case: Case, rank: int, report: Report, wrong: list[str], grace_s: float) -> None:
    fault, victim, operation = case.cell.fault, case.victim, case.cell.operation
    partner = (victim + 1) % case.world_size
    bystander = operation in MESSAGES and rank not in (victim, partner)
    if bystander or (fault == "absent" and rank == victim):
        if report.error is not None:
            wrong.append(f"it made no call, and got {report.error}")
        return
    error = report.error
    if error is None:
        wrong.append("no error")
        return
    name = "CollectiveMismatch" if fault == "mismatched" else "CollectiveTimeout"
    if error["class"] != name:
        wrong.append(f"{error['class']} instead of {name}: {error['text']}")
        return
    if fault == "mismatched":
        # the receiver of a message has both headers; its sender learns that they differ
        if case.difference not in error["fields"] and not (operation in MESSAGES and rank == _sender(case)):
            wrong.append(f"names {error['fields']} and not {case.difference}")
    else:
        reason = "dead" if fault == "killed" else "late"
        if error["reason"] != reason:
            wrong.append(f"says {error['reason']}, not {reason}")
        started = case.cell.inside and fault != "killed"  # all had begun the call
        if tuple(error["missing"]) != (victim,) and not (started and not error["missing"]):
            wrong.append(f"names {error['missing']}, not {victim}")
    if error["op"] not in _operations(operation) if fault != "mismatched" else False:
        wrong.append(f"names the operation {error['op']}")
    if report.again != name or report.again_s > grace_s:
        wrong.append(f"the next call raised {report.again or 'nothing'} after {report.again_s:.2f} s")


def _sender(case: Case) -> int:
    partner = (case.victim + 1) % case.world_size
    return partner if case.cell.operation == "send" else case.victim


def _operations(operation: str) -> tuple[str, ...]:
    """Return the names that an error may give to an operation, seen from either end and with its sum."""
    if operation in MESSAGES:
        return MESSAGES
    return (label(operation), "all_reduce") if operation in FUSED else (label(operation),)


# -- programs of users ------------------------------------------------------------------------------------------------


def run_uncaught(device: str, path: str, limit_s: float) -> tuple[int, float, str]:
    """Run ``uncaught_error.py`` on two ranks. Return rank 0's exit code, its seconds in the call, and what it wrote."""
    folder = Path(__file__).parent
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(folder / "uncaught_error.py"), device, path]
    processes = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            for rank in range(2):
                env = {
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
                output = None if rank else subprocess.PIPE
                processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=errors, text=True))
            first = processes[0]
            timer = threading.Timer(limit_s, first.kill)
            timer.start()
            assert first.stdout is not None
            first.stdout.readline()
            began = time.monotonic()
            code = first.wait()
            took = time.monotonic() - began
            timer.cancel()
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        errors.seek(0)
        return code, took, errors.read()


# -- records ----------------------------------------------------------------------------------------------------------


class Record:
    """The results of a run, written as JSON after each job to the file that FAULT_MATRIX_JSON names, if it does."""

    def __init__(self, command: str, device: str):
        file = os.environ.get("FAULT_MATRIX_JSON")
        self._file = Path(file) if file else None
        self._facts: dict[str, Any] = {
            "environment": detect().as_json() if file else {},
            "command": command,
            "kernels": kernels.of_collectives(device) if file else {},
            "missing_cells": missing(device),
        }
        self._parts: dict[str, list[Outcome]] = {}

    def add(self, part: str, outcomes: Sequence[Outcome], **facts: Any) -> None:
        self._parts.setdefault(part, []).extend(outcomes)
        self._facts |= facts
        if self._file is None:
            return
        every = [outcome for outcomes in self._parts.values() for outcome in outcomes]
        facts = self._facts | {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "cases": {name: len(outcomes) for name, outcomes in self._parts.items()},
            "failed": sum(bool(outcome.wrong) for outcome in every),
            "worst_past_s": round(max(outcome.past_s for outcome in every), 3),
            "worst_exit_s": round(max(outcome.exit_s for outcome in every), 3),
        }
        text = json.dumps(facts, indent=1).removesuffix("\n}")
        for name, outcomes in self._parts.items():
            rows = ",\n  ".join(json.dumps(outcome.row()) for outcome in outcomes)
            text += f',\n "{name}": [\n  {rows}\n ]'
        self._file.write_text(text + "\n}\n")


def complaints(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what went wrong, with the case in front."""
    return [f"{outcome.case}: {text}" for outcome in outcomes for text in outcome.wrong]
