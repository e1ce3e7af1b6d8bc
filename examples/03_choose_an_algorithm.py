"""Name the algorithm yourself: same bits, different time.

    python examples/03_choose_an_algorithm.py

One-shot and two-shot add in the same order, so their results are equal bit by bit; a ring has an order of its own.
"""

import statistics
import time

import torch

import shotcast


def work(count: int, calls: int) -> dict[str, tuple[float, bool]]:
    """By algorithm: microseconds of a call, and whether its bits are those of two_shot."""
    with shotcast.Communicator(device="cpu") as comm:
        x = torch.rand(count, generator=torch.Generator().manual_seed(comm.rank))
        reference = comm.all_reduce(x, algorithm="two_shot")
        measured = {}
        for name in comm.candidates(x):
            out = torch.empty_like(x)
            times_us = []
            for _ in range(calls):
                start = time.perf_counter()
                comm.all_reduce(x, out=out, algorithm=name)
                times_us.append((time.perf_counter() - start) * 1e6)
            measured[name] = (statistics.median(times_us), torch.equal(out, reference))
        return measured


if __name__ == "__main__":
    for name, (time_us, same_bits) in shotcast.spawn(work, 4, 16_384, 50)[0].items():
        print(f"{name:>9}: {time_us:8.1f} us, {'the same bits as' if same_bits else 'other roundings than'} two_shot")
