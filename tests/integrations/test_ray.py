"""Actors of Ray exchange tensors through ``ray.util.collective`` with our backend."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from ray.experimental import internal_kv
from ray.util import collective
from ray_targets import Rank

import shotcast
from shotcast.integrations import ray_meeting
from shotcast.integrations.ray import register
from shotcast.integrations.ray_group import ShotcastGroup
from shotcast.integrations.ray_meeting import ActorMeeting

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start Ray on this machine; its actors know the backend by the setup hook alone."""
    register(TIMEOUT_S)
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={
            "worker_process_setup_hook": "ray_setup.known",
            "env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)},
        },
    )
    yield
    ray.shutdown()


def joined(size: int, group: str, num_gpus: int = 0) -> list[Any]:
    ranks = [Rank.options(num_gpus=num_gpus).remote() for _ in range(size)]
    ray.get([actor.join.remote(size, rank, group) for rank, actor in enumerate(ranks)], timeout=200)
    return ranks


def of_all(ranks: list[Any], method: str, *args: Any) -> list[Any]:
    return ray.get([getattr(actor, method).remote(*args) for actor in ranks], timeout=200)


def end(ranks: list[Any]) -> None:
    for actor in ranks:
        ray.kill(actor)


@pytest.mark.full
def test_two_actors_and_one_that_is_killed(cluster: None) -> None:
    ranks = joined(2, "two")
    assert of_all(ranks, "served_by") == [("compiled", False)] * 2
    for rank, done in enumerate(of_all(ranks, "every_call")):
        check(done, rank, 2)
    waiting = ranks[0].reduce_until_error.remote()
    time.sleep(0.2)
    began = time.monotonic()
    ranks[1].die.remote()
    with pytest.raises(shotcast.CollectiveTimeout, match="dead ranks: 1"):
        ray.get(waiting, timeout=200)
    assert time.monotonic() - began < TIMEOUT_S / 2, "a process that has ended is not waited for"
    assert ray.get(ranks[0].leave.remote(), timeout=200) is False
    end(ranks)


@pytest.mark.full
def test_three_actors(cluster: None) -> None:
    ranks = joined(3, "three")
    for rank, done in enumerate(of_all(ranks, "every_call")):
        check(done, rank, 3)
    for done in of_all(ranks, "odd_tensors"):
        assert done["array"].tolist() == [3, 3, 3]
        assert done["table"].tolist() == [[0.0, 3.0, 0.0, 0.0]] * 3
        assert done["trained"].tolist() == [3.0, 3.0]
        assert [part.tolist() for part in done["received"]] == [[rank] * 2 for rank in range(3)]
    assert of_all(ranks, "many_sums", 300) == [300] * 3
    end(ranks)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_actors_with_a_gpu_each(cluster: None) -> None:
    """Ray shows each actor its own GPU as number 0."""
    ranks = joined(2, "gpus", num_gpus=1)
    for rank, (kernels, device, total, received, host) in enumerate(of_all(ranks, "on_gpu")):
        assert (kernels, device) == ("triton", "cuda:0")
        assert total == [3.0] * 1000
        assert received == [1.0] * 10, rank
        assert host == [3.0] * 10, "tensors of the CPU go on beside those of the GPU"
    end(ranks)


@pytest.mark.full
def test_what_this_backend_refuses(cluster: None) -> None:
    ranks = joined(2, "refusing")
    for texts in of_all(ranks, "refused"):
        two_tensors, deadline, gpu, shapes = texts
        assert "UnsupportedError: one rank of this backend has one tensor a call, not 2" in two_tensors
        assert "UnsupportedError: the deadline is that of the group" in deadline
        assert "no communicator for cuda: ranks 0, 1 have no GPU" in gpu
        assert "ConfigError: reducescatter: tensors of a list have the shape of the result" in shapes
    end(ranks)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_others_name_a_killed_actor_and_form_a_new_group(cluster: None, victim: int) -> None:
    """Rank 0 has the store in which the group met."""
    ranks = joined(3, "again")
    assert of_all(ranks, "reduce_once") == [[6.0, 6.0]] * 3
    waiting = [actor.reduce_until_error.remote() for rank, actor in enumerate(ranks) if rank != victim]
    time.sleep(0.2)
    ray.kill(ranks[victim])
    for call in waiting:
        with pytest.raises(shotcast.CollectiveTimeout, match=f"dead ranks: {victim}"):
            ray.get(call, timeout=200)
    others = [actor for rank, actor in enumerate(ranks) if rank != victim]
    assert of_all(others, "leave") == [False, False]
    others.append(Rank.remote())
    ray.get([actor.join.remote(3, rank, "again") for rank, actor in enumerate(others)], timeout=200)
    assert of_all(others, "reduce_once") == [[6.0, 6.0]] * 3
    assert of_all(others, "leave") == [False] * 3
    end(others)


@pytest.mark.full
def test_groups_by_declaration(cluster: None) -> None:
    """The driver declares a group, which each actor joins at its first call."""
    ranks = [Rank.remote() for _ in range(2)]
    collective.create_collective_group(ranks, 2, [1, 0], backend="shotcast", group_name="declared")
    assert of_all(ranks, "sum_in", "declared") == [3.0, 3.0]
    end(ranks)


def test_rank_0_is_awaited_until_the_deadline(cluster: None) -> None:
    began = time.monotonic()
    with pytest.raises(shotcast.CollectiveTimeout, match="missing ranks: 0"):
        ActorMeeting("nobody", 1, 2, timeout_s=0.3)
    assert time.monotonic() - began < 60  # of 600


@pytest.mark.full
def test_an_address_that_is_out_of_date_is_passed_over(cluster: None) -> None:
    """Nothing listens there, or a store that had this rank before, or one of somebody else."""
    first = ActorMeeting("old", 0, 2, timeout_s=1)
    kept = ActorMeeting("old", 1, 2, timeout_s=1)
    with pytest.raises(shotcast.CollectiveTimeout):
        ActorMeeting("old", 1, 2, timeout_s=0.3)
    somebody = ActorMeeting("somebody", 0, 2, timeout_s=1)
    other = somebody._address.replace(somebody._address.split()[0], "00")
    gone = first._address.replace(f" {first.store.port} ", " 1 ")
    for address in (other, gone):
        internal_kv._internal_kv_put(first._key, address)
        with pytest.raises(shotcast.CollectiveTimeout):
            ActorMeeting("old", 1, 2, timeout_s=0.3)
    second = ActorMeeting("old", 0, 2, timeout_s=1)
    found = ActorMeeting("old", 1, 2, timeout_s=1)
    second.store.set("key", "new")
    assert (found.store.get("key"), kept.store.check(["key"])) == (b"new", False)
    somebody.close()
    first.close()
    assert internal_kv._internal_kv_get(second._key) == second._address.encode(), "it deletes its own address alone"
    address = second._address
    second.close()
    assert address
    assert internal_kv._internal_kv_get(second._key) is None


def test_a_connection_that_fails_is_tried_again(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the store has taken the rank. Nothing is left of the deadline for a connection."""
    first, failures = ActorMeeting("retried", 0, 2, timeout_s=100), []
    assert first.store.timeout.total_seconds() >= 100
    joined = ray_meeting._joined

    def fails(*args: Any) -> Any:
        if len(failures) < 2:
            failures.append(joined(*args) if failures else None)
            raise dist.DistNetworkError("the answer was lost")
        return joined(*args)

    monkeypatch.setattr(ray_meeting, "_joined", fails)
    found = ActorMeeting("retried", 1, 2, timeout_s=100)
    assert len(failures) == 2
    assert found.store.timeout.total_seconds() == 100
    with pytest.raises(shotcast.CollectiveTimeout):
        ActorMeeting("retried", 1, 2, timeout_s=0.1)  # another actor as the same rank
    first.close()


def test_the_store_listens_on_the_address_of_the_node_alone(cluster: None) -> None:
    """It does not authenticate, and what it holds is unpickled."""
    first = ActorMeeting("bound", 0, 2, timeout_s=1)
    _, port, host = first._address.split()
    socket.create_connection((host, int(port)), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.77", int(port)), 5)
    first.close()
    with ray_meeting._listener("198.51.100.7") as everywhere:  # of no interface: a translated address
        assert everywhere.getsockname()[0] == "0.0.0.0"


def test_registering_twice_changes_the_deadline() -> None:
    before = ShotcastGroup.timeout_s
    try:
        register(3.0)
        register(5)
        assert ShotcastGroup.timeout_s == 5.0
        assert collective.is_backend_available("shotcast")
        with pytest.raises(shotcast.ConfigError, match="above 0, not 0"):
            register(0)
    finally:
        ShotcastGroup.timeout_s = before


def test_an_older_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.40.0")
    with pytest.raises(shotcast.UnsupportedError, match=r"Ray 2\.40\.0 is not served; from 2\.60 to below 3 is"):
        register()


def check(done: dict[str, Any], rank: int, size: int) -> None:
    """Compare with the same in float64 by numpy."""

    def values(*shape: int) -> np.ndarray:
        return np.stack([np.arange(float(np.prod(shape))).reshape(shape) + 100 * r for r in range(size)])

    expected = {
        "SUM": (values(3) + 1).sum(0),
        "PRODUCT": (values(3) + 1).prod(0),
        "MIN": (values(3) + 1).min(0),
        "MAX": (values(3) + 1).max(0),
        "reduce": values(4).sum(0) if rank == 1 else values(4)[rank],
        "broadcast": values(2, 2)[-1],
        "reducescatter": values(2, 3).sum(0) + rank * size,
        "recv": values(5)[rank - rank % 2],
    }
    gathered = done.pop("allgather")
    assert np.array_equal(torch.stack(gathered).numpy(), values(2, 3))
    for name, wanted in expected.items():
        assert np.array_equal(done[name].numpy(), wanted), name
