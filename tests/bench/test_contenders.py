"""Who is measured."""

from __future__ import annotations

import pytest

from shotcast import wire
from shotcast.bench import contenders


@pytest.mark.parametrize("op", contenders.OPS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_name_belongs_to_one_family(op: str, device: str) -> None:
    for name in contenders.known(op, device):
        families = (contenders.is_own(name), contenders.is_nccl(name), contenders.is_torch(name), name == "gloo")
        assert sum(families) == 1, name


def test_every_own_algorithm_can_be_measured() -> None:
    assert set(wire.ALGORITHMS) | {"auto"} <= set(contenders.known("all_reduce", "cuda"))


def test_the_protocols_of_nccl_are_among_the_baselines() -> None:
    protocols = {setting.get("NCCL_PROTO") for setting in contenders.NCCL_SETTINGS.values()}
    assert {"LL", "LL128", "Simple"} <= protocols
    for op in contenders.PLAIN_OPS:
        assert {"nccl_ll", "nccl_ll128", "nccl_simple"} <= set(contenders.default(op, "cuda"))


def test_registered_memory_is_measured_on_request_alone() -> None:
    assert contenders.NCCL_SYMMETRIC in contenders.known("all_reduce", "cuda")
    assert contenders.NCCL_SYMMETRIC not in contenders.default("all_reduce", "cuda")
    assert contenders.NCCL_SYMMETRIC not in contenders.known("all_gather", "cuda")


@pytest.mark.parametrize(
    ("name", "world_size", "has"),
    [
        ("one_shot", 8, True), ("two_shot", 8, True), ("ring", 2, True), ("ring", 3, False), ("auto", 2, False),
        ("two_shot_fp8", 2, False), ("nccl", 2, False),
    ],
)  # fmt: skip
def test_own_bits(name: str, world_size: int, has: bool) -> None:
    assert contenders.has_own_bits(name, world_size) is has
