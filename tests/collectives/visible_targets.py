"""Ranks that see other GPUs than each other. Nothing here may ask for GPUs before a rank has hidden some."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from workers import matrix

import shotcast
from shotcast.process_group import counts
from shotcast.process_group.registration import register


def see(visible: list[str]) -> None:
    """Show this rank the GPUs at these places among those that the job sees."""
    all_of_job = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    places = [int(place) for place in visible[int(os.environ["RANK"])].split(",")]
    shown = [all_of_job[place] if all_of_job != [""] else str(place) for place in places]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
    assert torch.cuda.device_count() == len(places)


def sums(visible: list[str], device: str | None) -> tuple[str, str, bool, int]:
    """Return the device, the kernels, whether the library served a sum, and how many calls had right results."""
    see(visible)
    with shotcast.Communicator(device=device) as comm:
        x = torch.ones(1000, device=comm.device)
        assert comm.all_reduce(x).tolist() == [comm.world_size] * 1000
        comm.check()
        facts = str(comm.device), comm.topology.transport.name, comm.explain(x).by_library
    return *facts, matrix(facts[0], ["float32", "bfloat16"], [1, 4099, 1 << 20], 0, 32 << 20)


def by_process_group(visible: list[str]) -> tuple[list[float], dict[str, dict[str, int]]]:
    """Return a sum by torch.distributed, and how many calls each way has served."""
    see(visible)
    register()
    dist.init_process_group("shotcast")
    x = torch.full([1000], dist.get_rank() + 1.0, device="cuda")
    dist.all_reduce(x)
    found = x.tolist(), counts()
    dist.destroy_process_group()
    return found


def refused(visible: list[str]) -> str:
    """Return the error of a communicator whose ranks see the same GPU."""
    see(visible)
    try:
        shotcast.Communicator(device="cuda")
    except shotcast.ConfigError as error:
        return str(error)
    return ""
