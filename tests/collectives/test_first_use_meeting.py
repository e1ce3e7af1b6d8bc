"""The meeting of ranks that compile, with a rank that leaves at a chosen time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shotcast.collectives.first_use import CompileBarrier, CompiledVariant
from shotcast.errors import CollectiveTimeout

READY = "ready/send/0"


class Host:
    """Rank 1 of two ranks, of which rank 0 leaves once rank 1 has seen that it is not ready."""

    rank, world_size, members = 1, 2, None

    def __init__(self, becomes_ready: bool):
        self.kept, self._becomes_ready = dist.HashStore(), becomes_ready

    def store(self, name: str) -> dist.Store:
        return self.kept

    @property
    def gone(self) -> set[int]:
        if self._becomes_ready:
            self.kept.set(READY, "")
        return {0}

    def timeout(self, ranks: list[int], what: str, *_: Any) -> CollectiveTimeout:
        return CollectiveTimeout(self.rank, ranks, what, 1, 5.0, "dead")


def receive(host: Host) -> None:
    executor = SimpleNamespace(stopped=False, epoch=0)
    barrier = CompileBarrier(host, executor)  # type: ignore[arg-type]
    barrier(CompiledVariant("recv", 0, "send"), lambda: None, "recv", 5.0)


def test_a_rank_that_has_become_ready_before_it_left_is_not_blamed() -> None:
    receive(Host(becomes_ready=True))


def test_a_rank_that_left_before_it_was_ready_is_named() -> None:
    with pytest.raises(CollectiveTimeout) as caught:
        receive(Host(becomes_ready=False))
    assert list(caught.value.missing) == [0]
