"""Construction of the executor of GPU ranks, on a machine without GPUs: the tests replace all that touches a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shotcast.collectives.executor_factory import build_executor
from shotcast.collectives.registry import registered
from shotcast.transport.triton.layout import Layout

GPU = torch.device("cuda", 1)


class TwoRanks:
    """A host group of two ranks. The other rank reports what this one does, except for its GPU and its multicast."""

    world_size, order, name = 2, (0, 1), "two"

    def __init__(self, others_obstacle: str = "", others_multicast: bool = True, rank: int = 1):
        self.rank = rank
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
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return calls


def test_gpus_with_peer_access(built: dict[str, tuple[Any, ...]]) -> None:
    host = TwoRanks()
    built_executor = build_executor("group", host, GPU, 1 << 20, 3.0, registered())
    assert built_executor == ("executor", "triton", "", True)
    assert built["buffer"] == ("group", Layout.for_messages(1 << 20).nbytes, GPU, (0, 1), False)
    assert built["executor"][1:] == (host, 1 << 20, 3.0, GPU, registered())


def test_gpus_older_than_the_instructions(built: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    built_executor = build_executor("group", TwoRanks(), GPU, 1 << 20, 3.0, registered())
    assert built_executor.obstacle == "rank 1: kernels need compute capability 8.0, as Triton does, and GPU 1 has 7.5"
    assert not built


def test_ranks_that_share_a_gpu(built: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    both = torch.device("cuda", 0)
    built_executor = build_executor("group", TwoRanks(), both, 1 << 20, 3.0, registered())
    assert (
        "several ranks use one GPU (indices [0, 0]), which SHOTCAST_SHARE_GPUS=1 would allow" in built_executor.obstacle
    )
    assert not built
    monkeypatch.setenv("SHOTCAST_SHARE_GPUS", "1")
    assert build_executor("group", TwoRanks(), both, 1 << 20, 3.0, registered()).kernels == "triton"
    assert built["buffer"][-1] is True
    build_executor("group", TwoRanks(), GPU, 1 << 20, 3.0, registered())
    assert built["buffer"][-1] is False, "these have one each"


def test_multicast_is_for_all_ranks_or_none(built: dict[str, tuple[Any, ...]]) -> None:
    """The choice of algorithm depends on multicast, and all ranks must choose alike."""
    assert not build_executor("group", TwoRanks(others_multicast=False), GPU, 1 << 20, 3.0, registered()).multicast


def test_an_obstacle_of_another_rank_counts_for_all(built: dict[str, tuple[Any, ...]]) -> None:
    built_executor = build_executor("group", TwoRanks("Triton is not installed"), GPU, 1 << 20, 3.0, registered())
    assert built_executor == (None, "", "rank 0: Triton is not installed", False)
    assert not built


def test_an_obstacle_is_said_once_by_rank_0(
    built: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shotcast.collectives.executor_factory._said", set())
    for rank in (1, 0, 0):
        for obstacle in ("no peer access", "too old"):
            build_executor("group", TwoRanks(obstacle, rank=rank), GPU, 1 << 20, 3.0, registered())
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"the vendor library serves all calls of communicator two: rank 0: {obstacle}")
        for obstacle in ("no peer access", "too old")
    ]
