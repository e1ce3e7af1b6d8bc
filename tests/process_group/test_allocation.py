"""Tensors that PyTorch asks the backend for, alone and by FSDP2."""

from __future__ import annotations

import allocation_targets as targets
import pytest

from shotcast.launcher.spawn import spawn


def test_tensors_that_the_backend_makes() -> None:
    spawn(targets.asked_for, 3, timeout_s=300)


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "prefetch"), [(2, True), pytest.param(3, False, marks=pytest.mark.full)])
def test_fsdp2_trains_in_memory_of_the_backend(world_size: int, prefetch: bool) -> None:
    """Its buffers are mapped, nothing goes by the library, and the bits are those with ordinary buffers."""
    by_backend = spawn(targets.fsdp2, world_size, True, "shotcast", prefetch, timeout_s=200)
    ordinary = spawn(targets.fsdp2, world_size, False, "shotcast", prefetch, timeout_s=200)
    for (bits, made, own), (expected, none, _) in zip(by_backend, ordinary, strict=True):
        assert bits == expected == by_backend[0][0]
        # a step gathers each of 4 parts twice, and makes the two buffers of each reduce-scatter
        assert made >= 4 * (targets.STEPS - 1) * 3
        assert none == 0
        assert own


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
def test_fsdp2_trains_in_memory_that_gpus_map(prefetch: bool) -> None:
    by_backend = spawn(targets.fsdp2, 2, True, "shotcast", prefetch, "cuda", timeout_s=200)
    ordinary = spawn(targets.fsdp2, 2, False, "shotcast", prefetch, "cuda", timeout_s=200)
    for (bits, made, own), (expected, none, _) in zip(by_backend, ordinary, strict=True):
        assert bits == expected
        assert made >= 4 * (targets.STEPS - 1) * 3
        assert none == 0
        assert own
