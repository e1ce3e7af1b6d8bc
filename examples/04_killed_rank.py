"""A rank disappears in the middle of a job. The others learn who is missing, regroup, and go on.

    python examples/04_killed_rank.py
    torchrun --nproc-per-node 4 examples/04_killed_rank.py

By itself, the script kills the rank. torchrun ends the whole job when a rank is killed; there the rank leaves instead.
"""

import os
import signal

import torch
import torch.distributed as dist

import shotcast

VICTIM = 2


def work() -> str:
    comm = shotcast.Communicator(timeout_s=2.0)
    ones = torch.ones(8, device=comm.device)
    assert comm.all_reduce(ones)[0] == comm.world_size
    if comm.rank == VICTIM:
        if dist.is_torchelastic_launched():
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does to a process when memory runs out
    try:
        comm.all_reduce(ones)
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
        comm.check()
    except shotcast.CollectiveTimeout as timeout:
        missing = timeout.missing
    comm.close()

    # The dead do not come back, so the survivors need memory and a group that only they share.
    survivors = [rank for rank in range(comm.world_size) if rank not in missing]
    group = dist.new_group(survivors, backend="gloo", use_local_synchronization=True)
    with shotcast.Communicator(group=group, device=comm.device) as smaller:
        total = smaller.all_reduce(ones)[0].item()
        now = f"now rank {smaller.rank} of {smaller.world_size}, and the sum is {total:g}"
        return f"rank {comm.rank}: missed {missing}; {now}"


if __name__ == "__main__":
    if dist.is_torchelastic_launched():  # torchrun starts a process for each rank
        print(work())
    else:  # without it, this process starts them
        for rank, result in enumerate(shotcast.spawn(work, 4, timeout_s=60, return_exceptions=True)):
            print(f"rank {rank}: {str(result).splitlines()[-1]}" if isinstance(result, Exception) else result)
