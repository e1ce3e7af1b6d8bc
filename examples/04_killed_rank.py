"""A rank is killed in the middle of a job. The others learn who is missing, regroup, and go on.

python examples/04_killed_rank.py
"""

import os
import signal

import torch
import torch.distributed as dist

import shotcast

VICTIM = 2


def work() -> str:
    comm = shotcast.Communicator(device="cpu", timeout_s=2.0)
    ones = torch.ones(8)
    assert comm.all_reduce(ones)[0] == comm.world_size
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does to a process when memory runs out
    try:
        comm.all_reduce(ones)
    except shotcast.CollectiveTimeout as timeout:
        missing = timeout.missing
    comm.close()

    # The dead do not come back, so the survivors need memory and a group that only they share.
    survivors = [rank for rank in range(comm.world_size) if rank not in missing]
    group = dist.new_group(survivors, backend="gloo", use_local_synchronization=True)
    with shotcast.Communicator(group=group, device="cpu") as smaller:
        total = smaller.all_reduce(ones)[0].item()
        return f"missed {missing}; now rank {smaller.rank} of {smaller.world_size}, and the sum is {total:g}"


if __name__ == "__main__":
    for rank, result in enumerate(shotcast.spawn(work, 4, timeout_s=60, return_exceptions=True)):
        print(f"rank {rank}: {str(result).splitlines()[-1]}")
