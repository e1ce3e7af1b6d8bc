"""Algorithms that tests register, and functions that ranks run with them.

Tests of command lines name this file in SHOTCAST_ALGORITHMS: importing it registers ``copycat``.
"""

from __future__ import annotations

import dataclasses
import os

import torch

import shotcast
from shotcast.collectives import registry
from shotcast.collectives.algorithm import Algorithm, Form, slice_of_message
from shotcast.cost.collective import Work
from shotcast.errors import ConfigError
from shotcast.wire import NodeShape, Op


def work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    return Work(1, 0.0, nbytes)


COPYCAT = Algorithm(
    name="copycat",
    label="copy cat",
    summary="two-shot's native kernels by another name",
    color="#123456",
    forms={
        Op.ALL_REDUCE: Form(
            work=work,
            triton="shotcast.transport.triton.two_shot:bind",
            cpu="shotcast.transport.cpu.two_shot:ALL_REDUCE",
            share=slice_of_message,
            divides=True,
        ),
        Op.ALL_GATHER: Form(work=work, cpu="shotcast.transport.cpu.copies:ALL_GATHER"),
    },
)
"""A correct algorithm that the cost model finds the fastest of all."""


def with_kernel(name: str, op: Op, cpu: str, **changes: object) -> Algorithm:
    form = dataclasses.replace(COPYCAT.forms[Op.ALL_REDUCE], triton="", cpu=cpu)
    return dataclasses.replace(COPYCAT, name=name, forms={op: form}, **changes)  # type: ignore[arg-type]


WRONG = {
    "gathers": with_kernel("gatherer", Op.ALL_TO_ALL, "shotcast.transport.cpu.copies:ALL_GATHER"),
    "rounds at each hop": with_kernel("ring_too", Op.ALL_REDUCE, "shotcast.transport.cpu.ring:ALL_REDUCE"),
}
"""Algorithms that do not do what their descriptions state."""


def registered_before() -> tuple[list[float], str, list[str], str, bool]:
    """Return what a registered algorithm computes, and where it appears."""
    shotcast.register_algorithm(COPYCAT)
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        x = torch.full([5], 10.0**comm.rank)
        total = comm.all_reduce(x, algorithm="copycat").tolist()
        chosen = comm.explain(x)
        same = torch.equal(comm.all_reduce(x, algorithm="two_shot"), comm.all_reduce(x))
        gathered = comm.all_gather(torch.ones(2, dtype=torch.int64), algorithm="copycat").tolist()
        assert gathered == [1] * 2 * comm.world_size
        return total, chosen.algorithm, comm.candidates(x), chosen.reason, same


def registered_later() -> str:
    """Check that a communicator does not know an algorithm that was registered later. Return the error."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        shotcast.register_algorithm(COPYCAT)
        x = torch.ones(3)
        assert "copycat" not in comm.candidates(x)
        try:
            comm.all_reduce(x, algorithm="copycat")
        except ConfigError as error:
            later = str(error)
        with shotcast.Communicator(device="cpu", timeout_s=100) as other:
            assert other.all_reduce(x, algorithm="copycat").tolist() == [other.world_size] * 3
        return later


def error_of_wrong_algorithm(what: str) -> str:
    """Return the error of a communicator whose registered algorithm is wrong. The ranks can go on without it."""
    shotcast.register_algorithm(WRONG[what])
    try:
        shotcast.Communicator(device="cpu", timeout_s=100)
    except ConfigError as error:
        message = str(error)
    registry._added.clear()
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        assert comm.all_reduce(torch.ones(3)).tolist() == [comm.world_size] * 3
    return message


def over_nodes(hosts: str) -> tuple[str, str]:
    """Return the choice with an algorithm whose form for hosts is ``hosts``, and the error of its first check."""
    form = Form(work=work, hosts=f"shotcast.transport.network.{hosts}", between_nodes=True)
    own = Algorithm(
        name="mine", label="mine", summary="over nodes", forms={Op.ALL_REDUCE: form}, in_contract=lambda shape: True
    )
    shotcast.register_algorithm(own)
    try:
        with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
            assert comm.all_reduce(torch.full([5], 10.0**comm.rank)).tolist() == [111.0] * 5
            return comm.explain(torch.ones(5)).algorithm, ""
    except ConfigError as error:
        return "", str(error)


def lossy() -> str:
    """Check that an algorithm that declares a loss of precision is accepted. Return the choice where it is allowed."""
    bound = "shotcast.collectives.reference:fp8_error_bound"
    shotcast.register_algorithm(dataclasses.replace(WRONG["rounds at each hop"], lossy=True, error_bound=bound))
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        assert comm.explain(torch.ones(8)).algorithm != "ring_too"
    with shotcast.Communicator(device="cpu", timeout_s=100, allow_fp8=True) as comm:
        return comm.explain(torch.ones(8)).algorithm


def error_of_differing_names(names: tuple[str, str]) -> str:
    """Return the error of ranks that have registered different algorithms."""
    name = names[int(os.environ["RANK"])]
    shotcast.register_algorithm(dataclasses.replace(COPYCAT, name=name))
    try:
        shotcast.Communicator(device="cpu", timeout_s=100)
    except ConfigError as error:
        return str(error)
    return ""


def error_of_differing_descriptions() -> str:
    """Return the error of ranks whose descriptions of one name differ."""
    divides = os.environ["RANK"] == "0"
    form = dataclasses.replace(COPYCAT.forms[Op.ALL_REDUCE], divides=divides)
    shotcast.register_algorithm(dataclasses.replace(COPYCAT, forms={Op.ALL_REDUCE: form}))
    try:
        shotcast.Communicator(device="cpu", timeout_s=100)
    except ConfigError as error:
        return str(error)
    return ""


if __name__.startswith("shotcast_algorithms_"):
    shotcast.register_algorithm(COPYCAT)
