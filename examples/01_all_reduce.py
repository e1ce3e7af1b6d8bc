"""Four processes add up their tensors.

    python examples/01_all_reduce.py

The same file runs on GPUs under torchrun, one process a GPU; `work` is all a rank does.
"""

import torch

import shotcast


def work() -> list[float]:
    with shotcast.Communicator(device="cpu") as comm:
        mine = torch.arange(4, dtype=torch.float32) * 10**comm.rank  # any contiguous tensor; nothing is registered
        total = comm.all_reduce(mine)
        comm.all_reduce(mine, out=mine)  # in place: allocates nothing
        assert torch.equal(mine, total)
        return total.tolist()


if __name__ == "__main__":
    for rank, total in enumerate(shotcast.spawn(work, 4)):
        print(f"rank {rank} has {total}")
