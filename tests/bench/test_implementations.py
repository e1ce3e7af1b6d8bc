"""The names of the implementations that are measured."""

from __future__ import annotations

import pytest

from shotcast.bench import implementations
from shotcast.bench.operations import OPERATIONS
from shotcast.collectives.registry import registered


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_name_belongs_to_one_family(op: str, device: str) -> None:
    for name in implementations.known(op, device):
        library = name == "gloo" or name.startswith("nccl")
        assert implementations.is_own(name) + implementations.is_torch(name) + library == 1, name


def test_every_own_algorithm_can_be_measured() -> None:
    measured = {name for name, algorithm in registered().items() if not algorithm.keeps_to_sms}
    assert measured | {"auto"} <= set(implementations.known("all_reduce", "cuda"))


def test_the_protocols_of_nccl_are_among_the_baselines() -> None:
    protocols = {setting.get("NCCL_PROTO") for setting in implementations.NCCL_SETTINGS.values()}
    assert {"LL", "LL128", "Simple"} <= protocols
    for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"):
        assert {"nccl_ll", "nccl_ll128", "nccl_simple"} <= set(implementations.default(op, "cuda"))


def test_operations_that_nccl_makes_of_messages_have_no_algorithm_to_force() -> None:
    for op in ("all_to_all", "gather", "scatter"):
        assert [name for name in implementations.known(op, "cuda") if name.startswith("nccl")] == ["nccl"]


def test_hosts_are_measured_with_sums_between_nodes_and_one_host_without() -> None:
    between = {name for name, algorithm in registered().items() if algorithm.between_nodes}
    assert "nvrar" in between
    assert between <= set(implementations.default("all_reduce", "cpu", nodes=2))
    assert not {"one_shot", "ring"} & set(implementations.default("all_reduce", "cpu", nodes=2))
    assert not between & set(implementations.default("all_reduce", "cpu"))
    assert implementations.default("all_gather", "cpu", nodes=2) == ("auto", "gloo")
