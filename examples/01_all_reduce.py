"""Four processes add up their tensors.

    python examples/01_all_reduce.py
    torchrun --nproc-per-node 4 examples/01_all_reduce.py

``work`` is all that a rank does. With a GPU for each rank it runs on the GPUs, otherwise on the CPU.
"""

import torch
import torch.distributed as dist

import shotcast


def work() -> str:
    with shotcast.Communicator() as comm:
        # any contiguous tensor; nothing is registered
        mine = torch.arange(4, dtype=torch.float32, device=comm.device) * 10**comm.rank
        total = comm.all_reduce(mine)
        comm.all_reduce(mine, out=mine)  # in place: allocates nothing
        assert torch.equal(mine, total)
        return f"rank {comm.rank} has {total.tolist()}"


if __name__ == "__main__":
    # torchrun starts a process for each rank; without it, this process starts them
    for line in [work()] if dist.is_torchelastic_launched() else shotcast.spawn(work, 4):
        print(line)
