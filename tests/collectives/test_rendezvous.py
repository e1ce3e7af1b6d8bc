"""Communicators outside a job, and the interface that Gloo takes where one initializes torch.distributed."""

from __future__ import annotations

import os

import pytest
import rendezvous_targets as targets
import torch
import torch.distributed as dist

import shotcast
from shotcast.collectives.rendezvous import process_group_of


@pytest.mark.parametrize(
    ("own", "gloo", "taken"), [("ib0", "", "ib0"), ("ib0", "eth1", "eth1"), ("", "eth1", "eth1"), ("", "", None)]
)
def test_gloo_takes_the_interface_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch, own: str, gloo: str, taken: str | None
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    variables |= {"SHOTCAST_SOCKET_IFNAME": own, "GLOO_SOCKET_IFNAME": gloo}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)  # so that it is restored, whoever sets it meanwhile
        if not value:
            monkeypatch.delenv(name)
    found: list[str | None] = []

    def initialise(backend: str, **options: object) -> None:
        found.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        raise InterruptedError

    monkeypatch.setattr(dist, "init_process_group", initialise)
    with pytest.raises(InterruptedError):
        process_group_of(None, torch.device("cpu"))
    assert found == [taken]


@pytest.mark.full
@pytest.mark.parametrize("tasks", [None, "1"])
def test_outside_a_job_a_communicator_has_one_rank(tasks: str | None) -> None:
    """Also in the step of one task in which Slurm runs an interactive shell."""
    shotcast.spawn(targets.outside_a_job, 1, env={"SLURM_STEP_NUM_TASKS": tasks} if tasks else None, timeout_s=300)


def test_a_device_in_place_of_a_group() -> None:
    with pytest.raises(shotcast.ConfigError, match=r"group is a .*ProcessGroup, not .cpu.; a device: "):
        shotcast.Communicator("cpu")  # type: ignore[arg-type]
