"""A program of two ranks, as users start them: rank 1 never ends its call, and rank 0 does not catch the error.

Arguments: ``cpu`` or ``cuda``, then ``own``, ``vendor`` or ``inside`` (rank 1 stays in the vendor library's call).
"""

from __future__ import annotations

import sys
import time

import torch
from fault_matrix_targets import before_library
from workers import settle

import shotcast


def main(device: str, path: str) -> None:
    comm = shotcast.Communicator(device=device, timeout_s=100)
    x = torch.ones(1000, device=comm.device)
    algorithm = "auto" if path == "own" else "vendor"
    for _ in range(2):
        comm.all_reduce(x, algorithm=algorithm)
        settle(comm)
    comm.barrier()
    settle(comm)
    comm.set_timeout(1.0)
    print("begun", flush=True)
    if comm.rank == 1 and path != "inside":
        time.sleep(600)
    if comm.rank == 1:
        before_library(comm, lambda: time.sleep(600))
    comm.all_reduce(x, algorithm=algorithm)
    settle(comm)


if __name__ == "__main__":
    main(*sys.argv[1:])
