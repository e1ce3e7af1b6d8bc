"""A rank goes on while a kernel of it waits for others, on real GPUs. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import waits_targets as targets

import shotcast
from shotcast.collectives.rank_device import enough_gpus
from shotcast.memory.holdings import HeldMemory
from shotcast.transport.triton.layout import WorkspaceLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not enough_gpus(2), reason="two GPUs"),
]
GROWN = WorkspaceLayout.for_messages(32 * targets.MIB, mailboxes=False).nbytes


def test_growth_waits_for_no_other_stream() -> None:
    """Memory that it gives back is released later, and then it is."""
    for grown in shotcast.spawn(targets.growth_beside_a_receive, 2, 20.0, timeout_s=100):
        assert grown.took_s < 10, "the receive waits until the deadline if the growth waits for it"
        assert grown.grown.blocks - grown.grown.leased >= GROWN
        assert grown.reset.blocks <= grown.grown.blocks - GROWN
        assert grown.reset.leased == grown.grown.leased
        assert grown.closed == HeldMemory(0, 0)


def test_nothing_is_released_in_a_capture() -> None:
    for captured, reset in shotcast.spawn(targets.dropped_in_a_capture, 2, timeout_s=100):
        assert captured.blocks - captured.leased > 64 * targets.MIB
        assert reset.blocks < captured.blocks - 64 * targets.MIB


def test_a_dead_rank_is_named_though_all_streams_share_a_queue() -> None:
    results = shotcast.spawn(
        targets.dead_rank_of_one_queue,
        2,
        *(1, 40.0),
        timeout_s=100,
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        return_exceptions=True,
    )
    assert isinstance(results[0], tuple), results[0]
    missing, reason, took_s = results[0]
    assert (missing, reason) == ((1,), "dead")
    assert took_s < 3


def test_hosts_hear_whom_their_kernels_wait_for() -> None:
    (heard, quiet), (heard_late, _) = shotcast.spawn(targets.told_of_a_wait, 2, 1, 7.0, timeout_s=100)
    assert heard == [("all_reduce", (1,))]
    assert quiet
    assert not heard_late
