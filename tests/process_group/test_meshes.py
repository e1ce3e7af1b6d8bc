"""Training on a mesh of two by two ranks: HSDP, FSDP2 with prefetch, tensor and data parallel, and a pipeline."""

from __future__ import annotations

import mesh_targets
import pytest
import torch
from mesh_targets import Trained

from shotcast.launcher.spawn import spawn

WAYS = ("hsdp", "fsdp2 with prefetch", "tensor and data parallel", "pipeline")


def check(how: str, found: list[Trained]) -> None:
    losses, parameters = mesh_targets.alone()
    seen = set()
    for rank_losses, own in found:
        assert rank_losses == pytest.approx(losses, rel=1e-4)
        assert own
        for name, values in own.items():
            assert values == pytest.approx(parameters[name], rel=1e-3, abs=1e-5), (how, name)
        seen |= set(own)
    assert seen == set(parameters)
    assert losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.parametrize("how", WAYS)
def test_training_is_that_of_one_process(how: str) -> None:
    found = spawn(mesh_targets.divided, 4, how, timeout_s=250)
    check(how, found)
    assert found == spawn(mesh_targets.divided, 4, how, timeout_s=250), "the same bits on every run"


@pytest.mark.full
@pytest.mark.parametrize("how", WAYS)
def test_the_comparison_holds_for_gloo(how: str) -> None:
    check(how, spawn(mesh_targets.divided, 4, how, "gloo", timeout_s=250))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
@pytest.mark.parametrize("how", WAYS)
def test_training_on_gpus(how: str) -> None:
    """Ranks share GPUs where there are fewer than four, and messages go by Gloo then."""
    env = {"SHOTCAST_SHARE_GPUS": "1"} if torch.cuda.device_count() < 4 else {}
    check(how, spawn(mesh_targets.divided, 4, how, "shotcast", "cuda", env=env, timeout_s=280))
