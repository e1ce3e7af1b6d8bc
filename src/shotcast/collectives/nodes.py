"""Find the nodes of a communicator's ranks: which ranks share memory, and what the environment declares."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shotcast import env
from shotcast.hardware.nodes import NodeLayout
from shotcast.launcher.process_watch import boot_id
from shotcast.memory.driver import visible_gpus
from shotcast.memory.host_group import StoreGroup


class RankLocation(NamedTuple):
    """A rank's location, as sent to all others."""

    host: str  # the name of its host
    boot: str  # the id of the running kernel, which differs between hosts of one name but not between their containers
    # the number of the file system in which a CPU rank creates shared memory, as containers of one host may have one
    # each; -1 for GPUs, and where there is none
    shm: int
    launcher: str  # the number of the launcher that started it, if the launcher says so
    local_rank: int  # its number among the ranks of its launcher
    ranks_per_node: int  # what SHOTCAST_RANKS_PER_NODE declares; 0 for nothing
    # the UUID of the one GPU that a rank sees which would run on the CPU unless it has that for itself; empty for ranks
    # whose device is settled
    gpu: str = ""


class Nodes(NamedTuple):
    """The nodes of a communicator's ranks, identical on all of them."""

    layout: NodeLayout  # the nodes
    one_host: bool  # all ranks could map each other's memory, though they may be on several logical nodes
    ranks_per_node: int = 0  # what SHOTCAST_RANKS_PER_NODE declares on this rank
    trouble: str = ""  # what is wrong with that on this rank; empty if nothing is
    own_gpus: bool = False  # every rank sees one GPU, which is its own, and takes it


def find_nodes(host: StoreGroup, device: torch.device, undecided: bool = False) -> Nodes:
    """Find the nodes of all ranks, and whether ranks with an undecided device have GPUs of their own. Collective.

    An ``undecided`` device is the CPU unless each rank has its own GPU.
    """
    declared, ranks_here = env.ranks_per_node(), env.local_world_size()
    trouble = ""
    if declared and ranks_here % declared:
        trouble = f"SHOTCAST_RANKS_PER_NODE={declared} does not divide the {ranks_here} ranks of this host"
    own = _location(device, declared, host.rank)
    if undecided:
        own = own._replace(gpu=next(iter(visible_gpus())))
    locations = host.all_gather(own, what="construction")
    gpus = {location.gpu for location in locations}
    own_gpus = "" not in gpus and len(gpus) == len(locations)
    if own_gpus:
        locations = [location._replace(shm=-1) for location in locations]
    layout = layout_of(locations)
    return Nodes(layout, len(set(_hosts(locations))) == 1, declared, trouble, own_gpus)


def _location(device: torch.device, declared: int, rank: int) -> RankLocation:
    job, shm = env.whole_job(), -1
    if device.type == "cpu":
        with contextlib.suppress(OSError):  # creating shared memory says what is wrong
            shm = os.stat(env.shm_dir()).st_dev
    local_rank = job.local_rank if job is not None else rank
    launcher = os.environ.get("GROUP_RANK", "")
    return RankLocation(os.uname().nodename, boot_id(), shm, launcher, local_rank, declared)


def _hosts(locations: Sequence[RankLocation]) -> list[tuple[str, str, int]]:
    """Return the identity of each rank's host: ranks of one host can map each other's memory."""
    without = {(location.host, location.boot) for location in locations if location.shm < 0}
    return [(one.host, one.boot, -1 if (one.host, one.boot) in without else one.shm) for one in locations]


def layout_of(locations: Sequence[RankLocation]) -> NodeLayout:
    """Return the nodes of ranks at these locations: hosts, or the logical nodes declared by the environment.

    A node is named after its host, with a number appended if several share that name.
    """
    hosts = _hosts(locations)
    keys = [
        (host, one.launcher, one.local_rank // one.ranks_per_node) if one.ranks_per_node else (host, "", 0)
        for host, one in zip(hosts, locations, strict=True)
    ]
    nodes = list(dict.fromkeys(keys))
    names = [key[0][0] for key in nodes]
    numbers = [names[:position].count(name) for position, name in enumerate(names)]
    unique = tuple(
        f"{name}/{number}" if names.count(name) > 1 else name for name, number in zip(names, numbers, strict=True)
    )
    members = tuple(tuple(rank for rank, key in enumerate(keys) if key == node) for node in nodes)
    return NodeLayout(members, unique)
