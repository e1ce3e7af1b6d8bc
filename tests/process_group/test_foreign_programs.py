"""Programs written for Gloo and NCCL rely on more than documentation promises."""

from __future__ import annotations

import foreign_targets as targets
import pytest

import shotcast


@pytest.mark.parametrize(("asynchronous", "world_size"), [(False, 2), (True, 3)])
def test_integers_are_averaged_as_by_nccl(asynchronous: bool, world_size: int) -> None:
    """Lightning averages batch sizes so, with any backend but one called gloo."""
    for counts in shotcast.spawn(targets.averages, world_size, asynchronous, timeout_s=60):
        assert {way for ways in counts.values() for way in ways} == {"own"}, counts


def test_a_communicator_averages_integers() -> None:
    shotcast.spawn(targets.averages_of_a_communicator, 2, timeout_s=60)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_calls_leave_versions_as_they_are(asynchronous: bool) -> None:
    """Views, and what autograd has saved, outlive calls that write in place."""
    shotcast.spawn(targets.versions, 2, asynchronous, timeout_s=60)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_of_inference_mode_are_written_outside_of_it(asynchronous: bool) -> None:
    shotcast.spawn(targets.inference, 2, asynchronous, timeout_s=60)


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True])
def test_dispatch_modes_see_the_calls(asynchronous: bool) -> None:
    """CommDebugMode counts them, as it does those of Gloo."""
    shotcast.spawn(targets.modes, 2, asynchronous, timeout_s=60)
