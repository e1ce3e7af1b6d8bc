"""Measure what communicators of NCCL leave behind, on two idle GPUs: python research/nccl_memory.py [KIND ...].

Each kind makes two dozen communicators of two ranks, one after the other, calls each once and closes it. A line says
what the second dozen added to the files, threads and memory of a rank, and to the memory in use on its GPU.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shotcast
from shotcast.collectives.vendor.nccl_library import DTYPES, REDUCTIONS, UniqueId, library

sys.path.append(str(Path(__file__).parents[1] / "tests" / "collectives"))
from resource_targets import Resources, resources

COUNT = 24
KINDS = {
    "own": "a split with its own kernels",
    "vendor": "a split that NCCL serves, too",
    "nccl": "NCCL alone",
    "connected apart": "NCCL alone, connected on a new thread",
    "destroyed apart": "NCCL alone, destroyed on a new thread",
}


def _on_a_thread(run: Callable[[], None], apart: bool) -> None:
    if not apart:
        run()
        return
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _use_nccl(comm: shotcast.Communicator, x: torch.Tensor, number: int, kind: str) -> None:
    nccl, store, name = library(), comm._host.store(kind), UniqueId()
    if comm.rank == 0:
        assert nccl.ncclGetUniqueId(ctypes.byref(name)) == 0
        store.set(str(number), base64.b64encode(bytes(name)).decode())
    else:
        name = UniqueId.from_buffer_copy(base64.b64decode(store.get(str(number))))
    made = ctypes.c_void_p()

    def connect() -> None:
        with torch.cuda.device(comm.device):
            assert nccl.ncclCommInitRank(ctypes.byref(made), comm.world_size, name, comm.rank) == 0

    def destroy() -> None:
        with torch.cuda.device(comm.device):
            assert nccl.ncclCommDestroy(made) == 0

    _on_a_thread(connect, kind == "connected apart")
    stream = torch.cuda.current_stream().cuda_stream
    at, form = x.data_ptr(), (DTYPES["float32"], REDUCTIONS["max"])
    assert nccl.ncclAllReduce(at, at, x.numel(), *form, made, stream) == 0
    torch.cuda.synchronize()
    _on_a_thread(destroy, kind == "destroyed apart")


def rank_of(kind: str) -> tuple[Resources, Resources]:
    """Make and close communicators of a kind. Return what is held after half of them, and after all."""
    held = []
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        x = torch.ones(1000, device=comm.device)
        comm.all_reduce(x, algorithm="vendor")
        for number in range(1, COUNT + 1):
            if kind in ("own", "vendor"):
                with comm.split(0, max_bytes=1 << 20) as part:
                    part.all_reduce(x)
                    if kind == "vendor":
                        part.all_reduce(x, algorithm="vendor")
            else:
                _use_nccl(comm, x, number, kind)
            if number in (COUNT // 2, COUNT):
                comm._host.barrier()
                time.sleep(0.3)
                held.append(resources("cuda"))
                comm._host.barrier()
    early, late = held
    return early, late


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"all by default: {', '.join(KINDS)}")
    return parser


def main() -> None:
    """Run the kinds that are named, or all."""
    parser = options()
    kinds = parser.parse_args().kinds or list(KINDS)
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"there is no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    for kind in kinds:
        print(f"{KINDS[kind]}:")
        for rank, (early, late) in enumerate(shotcast.spawn(rank_of, 2, kind, timeout_s=200)):
            print(
                f"  rank {rank}: {COUNT // 2} more left {late.files - early.files} files, "
                f"{late.threads - early.threads} threads, {(late.memory_kib - early.memory_kib) / 1024:.1f} MiB of the "
                f"host, {late.gpu_mib - early.gpu_mib} MiB of the GPU",
                flush=True,
            )


if __name__ == "__main__":
    main()
