"""Find the tables of a communicator, and make sure that all its ranks choose alike."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from shotcast import env
from shotcast.collectives.algorithm import Algorithms
from shotcast.collectives.choice.resolver import Tables
from shotcast.collectives.choice.table import fit_for, load, packaged
from shotcast.errors import ConfigError
from shotcast.hardware.detect import cpu_model
from shotcast.memory.host_group import StoreGroup

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """The tables that a rank has found.

    Attributes:
        tables: in the order in which they are looked up.
        trouble: why the user's table cannot be used; empty if it can, or there is none.
        stale: why the packaged table is not used, if there is one.
    """

    tables: Tables
    trouble: str
    stale: str

    @property
    def digest(self) -> str:
        texts = "\0".join(table.text for _, table in self.tables)
        return hashlib.sha256(texts.encode()).hexdigest()[:12]


def find_tables(part: str, world_size: int, device: str, algorithms: Algorithms) -> Found:
    """Return the user's table (SHOTCAST_TABLE) and the packaged one for this part and world size.

    Args:
        part: the name of the GPU; ``cpu`` for CPU ranks.
        device: ``cuda`` or ``cpu``.
    """
    tables, trouble, stale = [], "", ""
    kernels = env.cpu_kernels() if device == "cpu" else "triton"
    if path := env.table_path():
        try:
            table = load(path, cpu_model() if device == "cpu" else part, world_size, algorithms, device)
            tables.append(("user table", fit_for(table, kernels, algorithms)))
        except ConfigError as error:
            trouble = str(error)
    try:
        if found := packaged(part, world_size, algorithms):
            tables.append(("packaged table", fit_for(found, kernels, algorithms)))
    except ConfigError as error:
        # nobody asked for it by name, and without it calls are right and may be slower
        stale = str(error)
        logger.warning("%s", error)
    return Found(tuple(tables), trouble, stale)


def agree(host: StoreGroup, settings: Mapping[str, Any], trouble: str) -> None:
    """Return if all ranks have the same settings and no rank reports trouble. Collective.

    Raises:
        ConfigError: on every rank; it names the setting and the value of each rank.
    """
    reports = host.all_gather((trouble, settings), what="construction")
    if message := "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text):
        raise ConfigError(message)
    for name, value in settings.items():
        values = [other.get(name) for _, other in reports]
        if any(other != value for other in values):
            message = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise ConfigError(f"the ranks do not agree on {name}: {message}")
