"""Who runs own kernels on GPUs, decided where there are none: the parts that touch a GPU are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shotcast.collectives import placement
from shotcast.kernels.layout import Layout

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
    monkeypatch.setattr("shotcast.kernels.executor.TritonExecutor", executor)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda mine, other: True)
    return calls


def test_gpus_with_peer_access(built: dict[str, tuple[Any, ...]]) -> None:
    host = TwoRanks()
    placed = placement.executor_for("group", host, GPU, 1 << 20, 3.0)
    assert placed == ("executor", "triton", "", True)
    assert built["buffer"] == ("group", Layout.of(1 << 20).nbytes, GPU, (0, 1))
    assert built["executor"][1:] == (host, 1 << 20, 3.0, GPU)


def test_multicast_is_for_all_ranks_or_none(built: dict[str, tuple[Any, ...]]) -> None:
    """A choice depends on it, and the ranks must choose alike."""
    assert not placement.executor_for("group", TwoRanks(others_multicast=False), GPU, 1 << 20, 3.0).multicast


def test_an_obstacle_of_another_rank_counts_for_all(built: dict[str, tuple[Any, ...]]) -> None:
    placed = placement.executor_for("group", TwoRanks("Triton is not installed"), GPU, 1 << 20, 3.0)
    assert placed == (None, "", "rank 0: Triton is not installed", False)
    assert not built
