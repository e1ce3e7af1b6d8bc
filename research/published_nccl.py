"""Published all-reduces of NCCL between nodes, beside what the model of ``nccl_model.py`` gives for them.

The rows are an external set (``benchmarks/data/external/nccl_between_nodes.json``, with a source for each system): no
constant is fitted to them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import nccl_model

from shotcast.cost.collective import INFINIBAND, NetworkCost
from shotcast.units import format_size
from shotcast.wire import NodeShape

DATA = Path(__file__).parents[1] / "benchmarks" / "data" / "external" / "nccl_between_nodes.json"


class Published(NamedTuple):
    """A published time in microseconds, and what NCCL's model gives."""

    system: dict[str, Any]
    nbytes: int
    time_us: float
    model: nccl_model.NcclChoice


def published() -> list[Published]:
    """Return all rows."""
    found = []
    for system in json.loads(DATA.read_text())["systems"]:
        shape = NodeShape(system["nodes"], system["gpus_per_node"])
        network = NetworkCost(INFINIBAND.step_us, system["gbps_of_a_gpu"])
        host = nccl_model.Host(tuple(system["compute_capability"]), system["cpu_vendor"])
        for nbytes, time_us in system["times_us"].items():
            model = nccl_model.between_nodes(int(nbytes), shape, network, host)
            found.append(Published(system, int(nbytes), time_us, model))
    return found


def table() -> str:
    """Return the rows as a Markdown table."""
    lines = ["| system | nodes x GPUs | message | published, us | NCCL's model, us | |", "|---|---|---|---|---|---|"]
    for row in published():
        system = row.system
        cells = [
            f"[{system['name']}]({system['source']})",
            f"{system['nodes']} x {system['gpus_per_node']}",
            format_size(row.nbytes) if row.nbytes % 1024 == 0 else f"{row.nbytes} B",
            f"{row.time_us:.1f}",
            f"{row.model.time_us:.1f}, {row.model.algorithm} {row.model.protocol}",
            f"{row.model.time_us / row.time_us - 1:+.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
