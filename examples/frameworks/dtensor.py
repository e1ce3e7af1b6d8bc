"""Train a model whose blocks are divided between ranks by DTensor, and change the placement of a tensor every way.

    torchrun --nproc-per-node 2 examples/frameworks/dtensor.py --backend shotcast

The first product of a block is divided by columns and the second by rows, whose partial sums an all-reduce adds up.
"""

import torch
import torch.distributed as dist
from common import NextLetter, arguments, digest, join, say, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


def placed(mesh: DeviceMesh) -> str:
    """Return a hash of what a tensor is after each change of its placement."""
    whole = torch.arange(24.0 * mesh.size(), device=mesh.device_type).view(-1, 12) / 7
    found = []
    for before in PLACEMENTS:
        for after in PLACEMENTS:
            moved = distribute_tensor(whole, mesh, [before]).redistribute(placements=[after])
            found += [moved.to_local(), moved.full_tensor()]
    for after in PLACEMENTS[:2]:
        # a product over a divided dimension is Partial: each rank has a summand
        product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t(), mesh, [Shard(0)])
        found.append(product.redistribute(placements=[after]).full_tensor())
    return digest(found)


def main() -> None:
    options = arguments(__doc__, steps=50).parse_args()
    device = join(options)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = NextLetter().to(device)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses, step_ms = train(model, optimizer, options.steps, seed=0)  # all ranks have the same batches
    whole = [getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in model.parameters()]
    say(losses=losses, parameters=digest(whole), placements=placed(mesh), step_ms=step_ms)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
