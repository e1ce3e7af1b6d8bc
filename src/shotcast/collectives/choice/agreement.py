"""Find the tables of a communicator, and ensure that all its ranks make the same choices."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shotcast import __version__, env
from shotcast.collectives import fingerprints
from shotcast.collectives.algorithm import Algorithms
from shotcast.collectives.choice.resolver import Tables
from shotcast.collectives.choice.table import fit_for, load, packaged
from shotcast.collectives.nodes import Nodes
from shotcast.errors import ConfigError
from shotcast.hardware.detect import cpu_model
from shotcast.memory.host_group import StoreGroup
from shotcast.transport.registry import find
from shotcast.wire import NodeShape, Op

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """The tables that a rank has found."""

    tables: Tables  # in the order in which they are looked up
    trouble: str  # what is wrong with the user's tables; empty if nothing is, or there are none
    # why other tables are not used: the user's for other ranks, and a packaged one that is out of date
    passed: tuple[str, ...]

    @property
    def digest(self) -> str:
        texts = "\0".join(table.text for _, table in self.tables)
        return hashlib.sha256(texts.encode()).hexdigest()[:12]


def find_tables(part: str, shape: NodeShape, device: str, algorithms: Algorithms) -> Found:
    """Return the user's tables (SHOTCAST_TABLE) and the packaged one that match this part and these ranks.

    ``part`` is the name of the GPU, or ``cpu`` for CPU ranks; ``device`` is ``cuda`` or ``cpu``.
    """
    tables, troubles, passed = [], [], []
    transport = find(device, shape.nodes)
    for path in env.table_paths():
        try:
            table = load(path, cpu_model() if device == "cpu" else part, shape, algorithms, device)
            if isinstance(table, str):
                passed.append(table)
            else:
                tables.append(("user table", fit_for(table, transport, algorithms)))
        except ConfigError as error:
            troubles.append(str(error))
    try:
        if found := packaged(part, shape, algorithms):
            tables.append(("packaged table", fit_for(found, transport, algorithms)))
    except ConfigError as error:
        # nobody asked for it by name, and without it calls are right and may be slower
        passed.append(str(error))
        logger.warning("%s", error)
    return Found(tuple(tables), "; ".join(troubles), tuple(passed))


def outside_contract(algorithms: Algorithms, environment: str, allow_fp8: bool, shape: NodeShape) -> str:
    """Return the setting that asks for sums that batch-invariant mode does not make; empty if none does."""
    if allow_fp8:
        return "batch_invariant and allow_fp8 exclude each other: sums by FP8 depend on the message around an element"
    if environment == "auto" or algorithms[environment].keeps_bits(Op.ALL_REDUCE, shape):
        return ""
    accepted = [name for name, one in algorithms.items() if one.keeps_bits(Op.ALL_REDUCE, shape)]
    return (
        f"SHOTCAST_ALGORITHM={environment}, whose sums have other bits than the numerics contract, and the mode is "
        f"batch-invariant; it takes auto, {', '.join(accepted)}"
    )


def agree(host: StoreGroup, settings: Mapping[str, Any], trouble: str) -> None:
    """Return if all ranks have the same settings and no rank reports trouble. Collective.

    Otherwise raises ConfigError on every rank, with the setting and its value on each rank or node.
    """
    reports = host.all_gather((trouble, settings), what="construction")
    if message := "; ".join(f"rank {host.members.known(r)}: {text}" for r, (text, _) in enumerate(reports) if text):
        raise ConfigError(message)
    for name, value in settings.items():
        values = [other.get(name) for _, other in reports]
        if any(other != value for other in values):
            raise ConfigError(f"the ranks do not agree on {name}: {_by_rank(host, values)}")


def _by_rank(host: StoreGroup, values: Sequence[Any]) -> str:
    """List the value of each rank in words; on several nodes, the ranks of each value."""
    if host.layout.nodes == 1:
        return ", ".join(f"rank {host.members.known(rank)}: {value}" for rank, value in enumerate(values))
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return "; ".join(f"{value} on ranks {host.where(those)}" for value, those in ranks.items())


def versions(nodes: Nodes) -> dict[str, str]:
    """Return what must match on all ranks: the versions and, for several hosts, the sources.

    One host has one installation, so its sources need no check.
    """
    torch_version = ".".join(torch.__version__.split(".")[:2])
    found = {"the version of shotcast": __version__, "the version of PyTorch": torch_version}
    return found if nodes.one_host else found | {"the sources of shotcast": fingerprints.of_package()}
