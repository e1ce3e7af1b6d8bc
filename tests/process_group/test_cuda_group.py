"""The backend "shotcast" on real GPUs. Run with ``pytest -m gpu``; SHOTCAST_SHARE_GPUS=1 makes one GPU enough."""

from __future__ import annotations

import cuda_group_targets as targets
import pytest
import torch

import shotcast
from shotcast.collectives.rank_device import enough_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
WORLD_SIZES = [n for n in (2, 4) if enough_gpus(n)]
by_nccl = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL, which needs a GPU for each rank")
BY_LIBRARY = {"SHOTCAST_ALGORITHM": "vendor"}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "name",
    [
        *("collectives", "streams", "captured", "bound", "barrier_after_streams", "factors"),
        *(pytest.param(name, marks=by_nccl) for name in ("messages", "inner_calls")),
    ],
)
def test_calls(name: str, world_size: int) -> None:
    shotcast.spawn(getattr(targets, name), world_size, timeout_s=200)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", ["inference_mode", "default_device"])
def test_first_calls_by_the_library(name: str, world_size: int) -> None:
    shotcast.spawn(getattr(targets, name), world_size, env=BY_LIBRARY, timeout_s=200)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ddp_gives_the_same_bits_on_all_ranks_and_runs(world_size: int) -> None:
    runs = [shotcast.spawn(targets.ddp, world_size, timeout_s=200) for _ in range(2)]
    assert all(weights == runs[0][0] for run in runs for weights in run)


def test_late_ranks_and_calls_that_differ() -> None:
    (late, first), (_, second) = shotcast.spawn(targets.faults, 2, timeout_s=200)
    assert late == "CollectiveTimeout"
    assert (first, second) == ("CollectiveMismatch", "CollectiveMismatch")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("compared", ["1", "0"])
def test_a_call_of_the_library_has_its_own_deadline(asynchronous: bool, compared: str) -> None:
    """Kernels that compare headers end at it, and where nothing compares the watch of the library ends the call."""
    env = {**BY_LIBRARY, "SHOTCAST_CHECK_VENDOR": compared}
    (text, took), _ = shotcast.spawn(targets.timeout_of_one_call, 2, asynchronous, env=env, timeout_s=200)
    assert text.startswith("late")
    assert took < 8
    assert compared == "1" or text == "late after 3 s"


def test_an_eager_call_takes_at_most_twice_that_of_the_communicator() -> None:
    for through_group, alone in shotcast.spawn(targets.latency, 2, timeout_s=200)[0].values():
        assert through_group < 2 * alone
