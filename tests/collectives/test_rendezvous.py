"""The end of process groups that communicators made."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from shotcast.collectives import rendezvous
from shotcast.collectives.rendezvous import end_process_group


class Group:
    """A process group, with or without a backend for GPUs."""

    group_name = "split"

    def __init__(self, gpu: bool = True):
        self.gpu, self.aborted = gpu, False

    def _get_backend(self, device: Any) -> Any:
        if not self.gpu:
            raise RuntimeError("no backend")
        return self

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace PyTorch's function, which may wait for others, or fail; return what was destroyed."""
    destroyed: list[Any] = []

    def destroy(group: Any) -> None:
        destroyed.append(group)
        if isinstance(group.others, Exception):
            raise group.others
        group.others.wait(20)

    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous, "_END_S", 0.2)
    return destroyed


def ended(group: Any, broken: bool, others: Any = None) -> float:
    """End the group; return the seconds that it took. ``others`` is set when they have closed theirs."""
    group.others = others or threading.Event()
    if others is None:
        group.others.set()
    started = time.monotonic()
    end_process_group(group, broken)
    return time.monotonic() - started


@pytest.mark.parametrize("gpu", [True, False])
def test_a_group_ends_in_order(ends: list[Any], gpu: bool) -> None:
    group = Group(gpu)
    ended(group, False)
    assert ends == [group]
    assert not group.aborted


def test_a_group_whose_ranks_may_never_come_is_aborted(ends: list[Any]) -> None:
    group = Group()
    ended(group, True)
    assert (ends, group.aborted) == ([group], True)
    ended(Group(gpu=False), True)


def test_nobody_is_waited_for_longer_than_a_moment(ends: list[Any]) -> None:
    others = threading.Event()
    took = ended(Group(), False, others)
    waiting = [thread for thread in threading.enumerate() if thread.name == "end of split"]
    others.set()
    assert 0.2 <= took < 5
    assert len(waiting) == 1
    waiting[0].join(10)
    assert not waiting[0].is_alive()


def test_a_group_that_was_destroyed_with_all_others_is_no_error(
    ends: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended(Group(), False, ValueError("Invalid process group specified"))
    assert not caplog.records
    ended(Group(), False, RuntimeError("NCCL error"))
    assert [record.getMessage() for record in caplog.records] == [
        "the process group split has not ended in order: NCCL error"
    ]
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    ends.clear()
    ended(Group(), False)
    assert not ends
