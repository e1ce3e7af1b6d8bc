"""The device that a rank uses and the process group that it joins, on a machine without GPUs."""

from __future__ import annotations

import pytest
import torch

from shotcast.collectives import rendezvous
from shotcast.collectives.rank_device import device_of, enough_gpus, may_have_own_gpu, ranks_of_a_gpu
from shotcast.errors import ConfigError

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("gpus", "ranks", "shared", "enough"),
    [(0, 1, "1", False), (1, 4, "0", False), (1, 4, "1", True), (4, 4, "0", True)],
)
def test_enough_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, shared: str, enough: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", shared)
    assert enough_gpus(ranks) == enough


def test_ranks_take_gpus_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="cuda:3 was asked for; there are 2"):
        device_of("cuda")
    assert device_of(None) == torch.device("cpu")
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", "1")
    assert device_of("cuda") == device_of(None) == torch.device("cuda", 1)


def test_a_rank_takes_the_one_gpu_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers leave one GPU visible to each rank, whose number is 0 in all of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "3")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert device_of("cuda") == torch.device("cuda", 0)
    assert ranks_of_a_gpu() == 1, "it has all of its memory"
    assert device_of(None) == torch.device("cpu"), "until ranks have found out that it is not the one of all"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert may_have_own_gpu(None)
    assert not may_have_own_gpu("cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert not may_have_own_gpu(None), "the host has no other"
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", "1")
    assert ranks_of_a_gpu() == 4


def test_nccl_is_not_asked_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(rendezvous.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(rendezvous.dist, "init_process_group", lambda backend, **_: backends.append(backend))
    monkeypatch.setattr(rendezvous.dist, "get_rank", lambda group: -1)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    for world_size, shared in ((2, "0"), (2, "1"), (4, "1")):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("SHOTCAST_SHARE_GPUS", shared)
        with pytest.raises(ConfigError, match="not a member"):
            rendezvous.process_group_of(None, GPU)
    assert backends == ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "gloo"]
