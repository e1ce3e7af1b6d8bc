"""Train a small model by DistributedDataParallel, with the state of the optimizer divided between ranks (ZeRO stage 1).

    torchrun --nproc-per-node 2 examples/frameworks/zero.py --backend shotcast

Each rank keeps the state of its share of the parameters, updates these, and broadcasts them.
"""

import torch
import torch.distributed as dist
from common import NextLetter, arguments, digest, join, say, train
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = arguments(__doc__, steps=50).parse_args()
    device = join(options)
    model = DistributedDataParallel(NextLetter().to(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=3e-3)
    losses, step_ms = train(model, optimizer, options.steps, seed=dist.get_rank())
    optimizer.consolidate_state_dict(to=0)  # which sends objects
    kept = len(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else 0
    say(losses=losses, parameters=digest(model.parameters()), states=kept, step_ms=step_ms)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
