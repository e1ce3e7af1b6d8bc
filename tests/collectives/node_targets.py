"""Functions that ranks on several nodes run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

import shotcast
from shotcast.collectives import fingerprints, nodes
from shotcast.collectives.choice import agreement


def as_host(name: str) -> Any:
    """Return a patch by which this rank takes itself for one on the host ``name``."""
    made = nodes._location
    return mock.patch.object(nodes, "_location", lambda *given: made(*given)._replace(host=name, launcher=name))


def error_of_construction(declared: Mapping[int, str] | None = None) -> str:
    """Return the error of a communicator; ``declared`` is SHOTCAST_RANKS_PER_NODE by rank."""
    if declared is not None:
        os.environ["SHOTCAST_RANKS_PER_NODE"] = declared.get(int(os.environ["RANK"]), "")
    try:
        shotcast.Communicator(device="cpu", timeout_s=100)
    except shotcast.ConfigError as error:
        return str(error)
    return ""


def errors_of_hosts(values: Mapping[str, str]) -> list[str]:
    """Return the errors of two hosts, of which the second differs from the first in one thing at a time."""
    second, errors = os.environ["RANK"] == "2", []
    with as_host("two" if second else "one"):
        for name, value in values.items():
            arguments = {"max_bytes": int(value)} if second and name == "max_bytes" else {}
            patches: list[Any] = []
            if second:
                patches = {
                    "__version__": [mock.patch.object(agreement, "__version__", value)],
                    "torch": [mock.patch.object(torch, "__version__", f"{value}.0")],
                    "sources": [mock.patch.object(fingerprints, "of_package", lambda value=value: value)],
                }.get(name, [])
            with contextlib.ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(patch)
                try:
                    shotcast.Communicator(device="cpu", timeout_s=100, **arguments)  # type: ignore[arg-type]
                except shotcast.ConfigError as error:
                    errors.append(str(error))
    return errors


def uneven() -> tuple[list[float], str, str]:
    """Return a sum over two nodes of two ranks and one, its explanation, and who a late rank is said to be."""
    with (
        as_host("two" if os.environ["RANK"] == "2" else "one"),
        shotcast.Communicator(device="cpu", timeout_s=60) as comm,
    ):
        x = torch.full([3], float(comm.rank + 1))
        total, explanation = comm.all_reduce(x).tolist(), str(comm.explain(x))
        late = ""
        if comm.rank == 2:
            comm._host.barrier()  # the others have given up
        else:
            comm.set_timeout(1)
        try:
            comm.all_reduce(x)
        except shotcast.CollectiveTimeout as error:
            late = f"{error.reason}: {error.where}"
        if comm.rank != 2:
            comm._host.barrier()
        return total, explanation, late
