"""The first use of a kernel on GPUs, with nothing in Triton's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from first_use_targets import cold_start

import shotcast
from shotcast import RankFailed
from shotcast.collectives.rank_device import enough_gpus

pytestmark = pytest.mark.gpu
WORLD_SIZES = [n for n in (2, 4) if enough_gpus(n)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_a_second_apart_that_compile(world_size: int, tmp_path: Path) -> None:
    env = {"TRITON_CACHE_DIR": str(tmp_path)}
    results = shotcast.spawn(cold_start, world_size, "cuda", 1.0, 2.0, 1.5, False, env=env, timeout_s=200)
    assert [total for total, _, _ in results] == [world_size * (world_size + 1) / 2] * world_size
    assert min(compiled for _, _, compiled in results) > 0.1, "nothing was in the cache"


def test_a_rank_killed_while_it_compiles(tmp_path: Path) -> None:
    env = {"TRITON_CACHE_DIR": str(tmp_path)}
    killed = shotcast.spawn(cold_start, 2, "cuda", 0.0, 0.0, 60.0, True, env=env, timeout_s=200, return_exceptions=True)
    assert isinstance(killed[1], RankFailed)
    error, delay, compiled = killed[0]
    assert (error.missing, error.reason) == ((1,), "dead")
    assert delay < 1.5 + compiled, "a rank that compiles looks when it has done so"
