"""See what a call will do, and why, before it does it.

python examples/02_explain.py
torchrun --nproc-per-node 2 examples/02_explain.py
"""

import torch
import torch.distributed as dist

import shotcast
from shotcast.units import format_size


def work() -> list[str]:
    with shotcast.Communicator() as comm:
        lines = []
        for count in (256, 16_384, 1_048_576):
            x = torch.ones(count, device=comm.device)
            lines.append(f"{format_size(x.nbytes):>8} of float32: {comm.explain(x)}")
        counters = torch.ones(256, dtype=torch.int64, device=comm.device)
        lines.append(f"{format_size(counters.nbytes):>8} of int64:   {comm.explain(counters)}")
        # Every rank chooses the same, as a choice uses only what all of them know. So rank 0 speaks for all.
        return lines if comm.rank == 0 else []


if __name__ == "__main__":
    # torchrun starts a process for each rank; without it, this process starts them
    for lines in [work()] if dist.is_torchelastic_launched() else shotcast.spawn(work, 2):
        for line in lines:
            print(line)
