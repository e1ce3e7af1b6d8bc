"""A communicator that is dropped without close() gives back what it holds."""

from __future__ import annotations

import dropped_targets as targets
import pytest

import shotcast
from shotcast.collectives.rank_device import enough_gpus

INTERPRETED = {"SHOTCAST_CPU_KERNELS": "interpreter", "TRITON_INTERPRET": "1"}


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("how", "env"), [("own", {}), ("vendor", {}), ("started", {}), ("own", INTERPRETED)], ids=lambda value: str(value)
)
def test_files_threads_and_memory_are_given_back(how: str, env: dict[str, str]) -> None:
    for before, after in shotcast.spawn(targets.dropped, 2, "cpu", how, env=env, timeout_s=300):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


@pytest.mark.full
def test_nodes_that_talk_over_a_network() -> None:
    env = {"SHOTCAST_RANKS_PER_NODE": "1"}
    for before, after in shotcast.spawn(targets.dropped, 2, "cpu", "own", env=env, timeout_s=300):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


@pytest.mark.gpu
@pytest.mark.skipif(not enough_gpus(2), reason="needs two GPUs")
class TestGpus:
    @pytest.mark.parametrize("how", ["own", "vendor", "started", "running"])
    def test_memory_is_given_back(self, how: str) -> None:
        for before, after in shotcast.spawn(targets.dropped, 2, "cuda", how, timeout_s=200):
            assert after.leased == before.leased
            assert after.gpu_mib <= before.gpu_mib + 64

    def test_graphs_can_be_replayed(self) -> None:
        assert shotcast.spawn(targets.replayed_after_a_drop, 2, timeout_s=200) == [2.0, 2.0]
