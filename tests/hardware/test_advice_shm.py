"""The shared memory that doctor says CPU ranks need is what they take."""

from __future__ import annotations

import shm_targets

import shotcast
from shotcast.hardware.advice import SHM_PER_RANK_BYTES
from shotcast.wire import MAX_WORLD_SIZE


def test_ranks_take_no_more_than_doctor_expects() -> None:
    mapped = shotcast.spawn(shm_targets.shared_bytes_mapped, MAX_WORLD_SIZE, timeout_s=300)[0]
    assert 0.8 * SHM_PER_RANK_BYTES < mapped / MAX_WORLD_SIZE <= SHM_PER_RANK_BYTES
