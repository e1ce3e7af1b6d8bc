"""Train a small model by DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/frameworks/ddp.py --backend shotcast

The parameters have the same bits on all ranks and, with shotcast, on every run.
"""

import torch
import torch.distributed as dist
from common import NextLetter, arguments, digest, join, say, train
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = arguments(__doc__, steps=50).parse_args()
    device = join(options)
    model = DistributedDataParallel(NextLetter().to(device), bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, step_ms = train(model, optimizer, options.steps, seed=dist.get_rank())
    say(losses=losses, parameters=digest(model.parameters()), step_ms=step_ms)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
