"""Who runs own kernels on GPUs, decided where there are none: the parts that touch a GPU are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shotcast.collectives import placement
from shotcast.errors import ConfigError
from shotcast.transport.triton.layout import Layout

GPU = torch.device("cuda", 1)


class TwoRanks:
    """A host group of two ranks, of which the other says what this one says, but for its GPU and its multicast."""

    rank, world_size, order = 1, 2, (0, 1)

    def __init__(self, others_obstacle: str = "", others_multicast: bool = True):
        self.others_obstacle = others_obstacle
        self.others_multicast = others_multicast

    def all_gather(self, value: Any, timeout_s: float | None = None, what: str = "") -> list[Any]:
        if isinstance(value, tuple):
            return [(value[0], 0), value]
        if isinstance(value, bool):
            return [self.others_multicast, value]
        return [self.others_obstacle, value]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    calls: dict[str, tuple[Any, ...]] = {}

    def buffer(*args: Any) -> Any:
        calls["buffer"] = args
        return SimpleNamespace(multicast_address=64)

    def executor(*args: Any) -> Any:
        calls["executor"] = args
        return "executor"

    monkeypatch.setattr("shotcast.memory.cuda.CudaBuffer", buffer)
    monkeypatch.setattr("shotcast.transport.triton.executor.TritonExecutor", executor)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda mine, other: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return calls


def test_gpus_with_peer_access(built: dict[str, tuple[Any, ...]]) -> None:
    host = TwoRanks()
    placed = placement.executor_for("group", host, GPU, 1 << 20, 3.0)
    assert placed == ("executor", "triton", "", True)
    assert built["buffer"] == ("group", Layout.of(1 << 20).nbytes, GPU, (0, 1), False)
    assert built["executor"][1:] == (host, 1 << 20, 3.0, GPU)


def test_gpus_older_than_the_instructions(built: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    placed = placement.executor_for("group", TwoRanks(), GPU, 1 << 20, 3.0)
    assert placed.obstacle == "rank 1: kernels need compute capability 8.0, as Triton does, and GPU 1 has 7.5"
    assert not built


def test_ranks_that_share_a_gpu(built: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    both = torch.device("cuda", 0)
    placed = placement.executor_for("group", TwoRanks(), both, 1 << 20, 3.0)
    assert "several ranks use one GPU (indices [0, 0]), which SHOTCAST_SHARE_GPUS=1 would allow" in placed.obstacle
    assert not built
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", "1")
    assert placement.executor_for("group", TwoRanks(), both, 1 << 20, 3.0).kernels == "triton"
    assert built["buffer"][-1] is True
    placement.executor_for("group", TwoRanks(), GPU, 1 << 20, 3.0)
    assert built["buffer"][-1] is False, "these have one each"


@pytest.mark.parametrize(
    ("gpus", "ranks", "shared", "served"),
    [(0, 1, "1", False), (1, 4, "0", False), (1, 4, "1", True), (4, 4, "0", True)],
)
def test_how_many_ranks_gpus_serve(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, shared: str, served: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", shared)
    assert placement.gpus_serve(ranks) == served


def test_ranks_take_gpus_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="cuda:3 was asked for; there are 2"):
        placement.device_of("cuda")
    assert placement.device_of(None) == torch.device("cpu")
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", "1")
    assert placement.device_of("cuda") == placement.device_of(None) == torch.device("cuda", 1)


def test_nccl_is_not_asked_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(placement.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(placement.dist, "init_process_group", lambda backend, **_: asked.append(backend))
    monkeypatch.setattr(placement.dist, "get_rank", lambda group: -1)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    for world_size, shared in ((2, "0"), (2, "1"), (4, "1")):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("SHOTCAST_SHARE_GPUS", shared)
        with pytest.raises(ConfigError, match="not a member"):
            placement.process_group_of(None, GPU)
    assert asked == ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "gloo"]


def test_multicast_is_for_all_ranks_or_none(built: dict[str, tuple[Any, ...]]) -> None:
    """A choice depends on it, and the ranks must choose alike."""
    assert not placement.executor_for("group", TwoRanks(others_multicast=False), GPU, 1 << 20, 3.0).multicast


def test_an_obstacle_of_another_rank_counts_for_all(built: dict[str, tuple[Any, ...]]) -> None:
    placed = placement.executor_for("group", TwoRanks("Triton is not installed"), GPU, 1 << 20, 3.0)
    assert placed == (None, "", "rank 0: Triton is not installed", False)
    assert not built
