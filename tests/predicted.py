"""Times by the cost model, for calls given by their names."""

from __future__ import annotations

from shotcast.collectives.registry import registered
from shotcast.cost.collective import LinkCost, Work, time_us
from shotcast.wire import NodeShape, Op


def work_of(op: str, algorithm: str, nbytes: int, world_size: int, itemsize: int = 2) -> Work:
    """Return the work of a call, from the description of its algorithm."""
    return registered()[algorithm].forms[Op[op.upper()]].work(nbytes, NodeShape(1, world_size), itemsize)


def predicted_us(op: str, algorithm: str, nbytes: int, world_size: int, link: LinkCost, itemsize: int = 2) -> float:
    """Return the predicted time of a call in microseconds."""
    return time_us(work_of(op, algorithm, nbytes, world_size, itemsize), link)
