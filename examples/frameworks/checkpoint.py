"""Save the checkpoint of a model that FSDP2 divides by rows, and load it whole and divided by columns.

    torchrun --nproc-per-node 2 examples/frameworks/checkpoint.py --backend shotcast

It is written once at once and once in the background. Plans of who writes what travel as objects.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import NextLetter, arguments, digest, join, say, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


def parameters_of(model: torch.nn.Module) -> str:
    return digest(getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in model.parameters())


def by_columns(parameter: torch.nn.Parameter) -> Shard | None:
    """Divide columns where each rank gets as many; None divides rows."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0 else None


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def main() -> None:
    options = arguments(__doc__, steps=5).parse_args()
    device = join(options)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = fully_shard(NextLetter().to(device), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)  # the default on GPUs
    losses, _ = train(model, optimizer, options.steps, seed=dist.get_rank())
    dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder[0]}/now")
    background = dist.new_group(backend="gloo")  # which async_save asks for
    dcp.async_save(state_of(model, optimizer), checkpoint_id=f"{folder[0]}/later", process_group=background).result()

    found = [parameters_of(model)]
    for name, divided in (("now", False), ("later", True)):
        other = NextLetter().to(device)
        if divided:
            fully_shard(other, mesh=mesh, shard_placement_fn=by_columns)
        again = torch.optim.AdamW(other.parameters(), lr=3e-3, foreach=True)
        state = state_of(other, again)
        dcp.load(state, checkpoint_id=f"{folder[0]}/{name}")
        set_state_dict(other, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found.append(parameters_of(other))
    say(losses=losses, parameters=found[0], same=found == found[:1] * 3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
