"""Every collective kernel, a few times, under compute-sanitizer::

    python research/sanitize.py --tool memcheck --world-size 2

Each rank is a process of its own under the tool, whose report follows in the output. Results are compared too, as
``stress.py`` does. ``--tool none`` runs the calls alone: it fills Triton's cache, so that kernels are not compiled
under the tool. Two ranks can share one GPU (``--share-gpu``).

Tensors are allocated one by one under memcheck, as an access beyond the end of a tensor would hit another one in the
memory that PyTorch keeps. Errors that the CUDA API returns are not reported: PyTorch asks for what is not there.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stress_calls import ALGORITHMS, FUSED_FORMS, LEAST, Case, Plan, Stress

import shotcast

TOOLS = {
    "none": [],
    "memcheck": ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no"],
    "racecheck": ["compute-sanitizer", "--tool", "racecheck"],
}
FOUND = 9
"""The exit status of a rank in which the tool found something."""
KINDS = (
    "all_reduce", "reduce_scatter", "reduce", "all_gather", "uneven_all_gather", "all_to_all", "all_to_all_uneven",
    "broadcast", "gather", "scatter", "send_recv",
)  # fmt: skip
MESSAGES = (("bfloat16", 3, 1), ("bfloat16", 50_000, 0), ("float32", 5_001, 0))
"""Dtype, elements, and the first element, which decides about the alignment."""
COPIED = (*MESSAGES, ("int8", 4_099, 1))
ROUNDS = 3
"""Times that each call is made: slots take turns."""
SEED = 1


def cases(device: str) -> Iterator[Case]:
    """Yield the calls: every kind by every algorithm that has a kernel for it."""
    drawn: list[tuple[str, str, int, int, str, str]] = [("barrier", "float32", 0, 0, "auto", "")]
    for kind in KINDS:
        messages = MESSAGES if kind in ("all_reduce", "reduce_scatter", "reduce") else COPIED
        lossy = ["two_shot_fp8"] if (kind, device) == ("all_reduce", "cuda") else []
        algorithms = [*ALGORITHMS.get(kind, ("auto",)), *lossy]
        drawn += [(kind, *message, name, "") for name in dict.fromkeys(algorithms) for message in messages]
    drawn += [("fused", "bfloat16", 50_000, 0, "auto", form) for form in FUSED_FORMS]
    for number, (kind, dtype, count, start, algorithm, form) in enumerate(drawn):
        for _ in range(ROUNDS):
            rng = random.Random(f"{SEED}/{number}")
            yield Case(number, kind, dtype, count, start, algorithm, "given", rng, form)


def run_rank(device: str, timeout_s: float) -> int:
    """Make the calls of this process's rank. Return how many results were wrong."""
    wrong = done = 0
    with shotcast.Communicator(device=device, timeout_s=timeout_s) as comm:
        stress = Stress(Plan(device, SEED, 0, 0, 0.0, LEAST, timeout_s, ""), comm)
        for case in cases(device):
            stress.run(case)
            done += 1
            if found := stress.wrong():
                print(f"rank {comm.rank}: wrong: {case[:7]}", flush=True)
            wrong += bool(found)
        stress.close()
        print(f"rank {comm.rank}: {done} calls, {wrong} wrong", flush=True)
    return wrong


def start(rank: int, asked: argparse.Namespace, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start a rank under the tool."""
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(asked.world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    }  # fmt: skip
    if asked.share_gpu:
        environment["SHOTCAST_SHARE_GPUS"] = "1"
    if asked.tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    tool = TOOLS[asked.tool]
    if tool:
        tool = [*tool, "--target-processes", "application-only", "--error-exitcode", str(FOUND), "--log-file", str(log)]
    again = ["--device", asked.device, "--world-size", str(asked.world_size), "--timeout", str(asked.timeout)]
    return subprocess.Popen([*tool, sys.executable, __file__, "--rank", *again], env=environment)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=list(TOOLS), default="none")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--share-gpu", action="store_true", help="let all ranks take turns on one GPU")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a call waits for late ranks")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds after which the ranks are ended")
    parser.add_argument("--rank", action="store_true", help="be one of the ranks")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    asked = options().parse_args(arguments)
    if asked.rank:
        return 1 if run_rank(asked.device, asked.timeout) else 0
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank_{rank}.txt" for rank in range(asked.world_size)]
        port, until = free_port(), time.monotonic() + asked.limit
        ranks = [start(rank, asked, port, log) for rank, log in enumerate(logs)]
        statuses = []
        for process in ranks:
            try:
                statuses.append(process.wait(max(0.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                statuses.append(process.wait())
        for rank, (log, status) in enumerate(zip(logs, statuses, strict=True)):
            print(f"--- rank {rank}, {asked.tool}: status {status}", flush=True)
            print(log.read_text() if log.exists() else "", end="", flush=True)
    return max(abs(status) for status in statuses)


if __name__ == "__main__":
    sys.exit(main())
