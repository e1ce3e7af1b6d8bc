"""Train a small model by FSDP2: each rank keeps a part of every parameter, gradient and state.

    torchrun --nproc-per-node 2 examples/frameworks/fsdp2.py --backend shotcast

Parameters are gathered before a block needs them, and gradients are scattered after it.
"""

import torch
import torch.distributed as dist
from common import NextLetter, arguments, digest, join, say, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    options = arguments(__doc__, steps=50).parse_args()
    device = join(options)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = NextLetter().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, step_ms = train(model, optimizer, options.steps, seed=dist.get_rank())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    whole = [parameter.full_tensor() for parameter in model.parameters()]
    say(losses=losses, parameters=digest(whole), norm=norm.item(), step_ms=step_ms)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
