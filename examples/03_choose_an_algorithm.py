"""Name the algorithm yourself: same bits, different time.

    python examples/03_choose_an_algorithm.py
    torchrun --nproc-per-node 4 examples/03_choose_an_algorithm.py

One-shot and two-shot add in the same order, so their results are equal bit by bit; a ring has an order of its own.
"""

import statistics
import time

import torch
import torch.distributed as dist

import shotcast

COUNT, CALLS = 16_384, 50


def work() -> list[str]:
    with shotcast.Communicator() as comm:
        x = torch.rand(COUNT, generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
        reference = comm.all_reduce(x, algorithm="two_shot")
        lines = []
        for name in comm.candidates(x):
            out = comm.all_reduce(x, algorithm=name)  # the first call of a kind may compile its kernel
            times_us = []
            for _ in range(CALLS):
                start = time.perf_counter()
                comm.all_reduce(x, out=out, algorithm=name)
                if comm.device.type == "cuda":
                    torch.cuda.synchronize()
                times_us.append((time.perf_counter() - start) * 1e6)
            bits = "the same bits as" if torch.equal(out, reference) else "other roundings than"
            lines.append(f"{name:>12}: {statistics.median(times_us):8.1f} us, {bits} two_shot")
        return lines if comm.rank == 0 else []


if __name__ == "__main__":
    # torchrun starts a process for each rank; without it, this process starts them
    for lines in [work()] if dist.is_torchelastic_launched() else shotcast.spawn(work, 4):
        for line in lines:
            print(line)
