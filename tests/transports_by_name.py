"""The transports as tests name them."""

from __future__ import annotations

from shotcast.transport.registry import TRANSPORTS
from shotcast.transport.transport import NO_TRANSPORT, Transport


def named(name: str, nodes: int = 1) -> Transport:
    """Return the transport of ranks on so many nodes whose name is ``name``; that of the vendor library for none."""
    fitting = [one for one in (*TRANSPORTS, NO_TRANSPORT) if one.least_nodes <= nodes]
    return next(one for one in fitting if one.name == (name or NO_TRANSPORT.name))
