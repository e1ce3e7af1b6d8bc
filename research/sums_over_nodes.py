"""All-reduces over nodes of 4 GPUs: NCCL's ring and tree by its own model, and our forms of NVRAR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import nccl_model
import published_nccl
from markdown_table import folded, table
from nccl_costs import NcclCosts
from rounds.messages import exact_end_times
from rounds.ranks import CollectiveCall, Fabric, exponential_jitter

from shotcast.collectives.registry import registered
from shotcast.cost.collective import NetworkCost
from shotcast.hardware import cluster
from shotcast.planner.calibration import Calibration
from shotcast.units import format_size
from shotcast.wire import NodeShape

CLUSTERS = ("h200-x4-ndr", "a100-x4-slingshot")
NODES = (2, 4, 8, 16, 32, 64, 128, 256)
SIZES = (128 << 10, 512 << 10, 2 << 20)
FORMS = ("nvrar", "nvrar_halving", "nvrar_pairs")
"""Our forms that keep the bits of the contract: float32 sums pass between nodes, rounded once."""
PUBLISHED_GAIN = (1.9, 3.6)
"""NVRAR over NCCL from 128 KB to 2 MB, on Slingshot and InfiniBand."""
OPTIMISTIC_SIZES = range(1 << 20, (4 << 20) + 1)


@dataclass(frozen=True, slots=True)
class NodeSumRow:
    """An all-reduce of 16-bit elements, microseconds.

    Attributes:
        nccl_us: NCCL's ring and tree, each by its fastest protocol.
        forms_us: our own, by name.
        narrow_us: the fastest of our own, if sums passed between nodes in 16 bits. The published NVRAR's do, beside as
            many bytes of flags, so it sends the bytes of our float32 sums.
    """

    cluster: str
    nodes: int
    nbytes: int
    nccl_us: dict[str, float]
    forms_us: dict[str, float]
    narrow_us: float

    @property
    def fastest(self) -> str:
        """The name of the fastest of our own."""
        return min(self.forms_us, key=self.forms_us.__getitem__)

    @property
    def gain(self) -> float:
        """NCCL's time over that of the fastest of our own."""
        return min(self.nccl_us.values()) / self.forms_us[self.fastest]

    @property
    def narrow_gain(self) -> float:
        """The same, if sums passed in 16 bits."""
        return min(self.nccl_us.values()) / self.narrow_us


def in_16_bits(costs: NcclCosts) -> NcclCosts:
    """Return the costs of sums that pass between nodes in half the bytes of float32: a what-if, at twice the rate."""
    return replace(costs, network=NetworkCost(costs.network.step_us, 2 * costs.network.bw_gbps))


def costs_on(name: str, calibration: Calibration) -> NcclCosts:
    """Return the costs of sums on a cluster, by the ratio of the data sheets."""
    spec = cluster.load(name)
    return NcclCosts.on(spec, calibration.scaled_to(spec.gpu).link)


def node_sum_rows(calibration: Calibration) -> list[NodeSumRow]:
    """Return every cluster, number of nodes and size."""
    rows = []
    for name in CLUSTERS:
        ours = costs_on(name, calibration)
        narrow = in_16_bits(ours)
        for nodes in NODES:
            shape = NodeShape(nodes, ours.gpus_per_node)
            for nbytes in SIZES:
                nccl_us = {each: _nccl_us(each, nbytes, shape, ours) for each in ("ring", "tree")}
                times, narrow_times = (
                    {form: costs.all_reduce(nbytes, shape.world_size, 2, form).time_us for form in FORMS}
                    for costs in (ours, narrow)
                )
                rows.append(NodeSumRow(name, nodes, nbytes, nccl_us, times, min(narrow_times.values())))
    return rows


def _nccl_us(algorithm: str, nbytes: int, shape: NodeShape, costs: NcclCosts) -> float:
    """Return the microseconds of NCCL's ring or tree by its fastest protocol."""
    choices = nccl_model.choices(nbytes, shape, costs.network_over(shape.nodes), costs.host)
    return min(choice.time_us for choice in choices if choice.algorithm == algorithm)


def node_sums_tables(rows: Sequence[NodeSumRow]) -> str:
    """Return gains by size, and all times."""
    body = [["published for NVRAR", *["{} to {}".format(*PUBLISHED_GAIN)] * len(SIZES)]]
    for name in CLUSTERS:
        found = [[row for row in rows if (row.cluster, row.nbytes) == (name, nbytes)] for nbytes in SIZES]
        body.append([f"{name}, predicted", *(range_text([row.gain for row in each]) for each in found)])
        title = f"{name}, with sums in 16 bits between nodes"
        body.append([title, *(range_text([row.narrow_gain for row in each]) for each in found)])
    text = table([f"NCCL over ours, {NODES[0]} to {NODES[-1]} nodes", *map(format_size, SIZES)], body)
    optimistic = [
        row.time_us / row.model.time_us
        for row in published_nccl.published()
        if row.system["nodes"] == 2 and row.nbytes in OPTIMISTIC_SIZES
    ]
    factor = range_text(optimistic)
    text += f"\nPublished sums of 1 to 4 MiB on two nodes take {factor} times as long as NCCL's model has.\n"
    header = ["cluster", "nodes", "message", "NCCL ring", "NCCL tree", *(registered()[form].label for form in FORMS)]
    cells = []
    for row in rows:
        times = *row.nccl_us.values(), *row.forms_us.values()
        cells.append([row.cluster, str(row.nodes), format_size(row.nbytes), *(f"{time_us:.1f}" for time_us in times)])
        cells[-1].append(f"{row.gain:.2f}")
    return text + "\n" + folded("Microseconds of each form", table([*header, "gain"], cells))


def range_text(values: Sequence[float]) -> str:
    """Return the least and the largest value."""
    return f"{min(values):.1f} to {max(values):.1f}"


def thousand_nodes_table(calibration: Calibration) -> str:
    """Return an all-reduce of 1,024 nodes of 4 GPUs, followed rank by rank.

    The ring is not one of our kernels over nodes.
    """
    spec = cluster.load(CLUSTERS[0])
    shape = NodeShape(1024, 4)
    late = [100.0 if rank == 1234 else 0.0 for rank in range(shape.world_size)]
    body = []
    for name in ("ring", *FORMS):
        label = registered()[name].label
        fabric = Fabric.on(spec, calibration.link)
        narrow = replace(fabric, nodes_per_leaf=32, oversubscription=2.0)
        for nbytes in (128 << 10, 2 << 20):
            call = CollectiveCall.all_reduce(name, nbytes, shape)
            plain = exact_end_times(call, fabric).max()
            noisy = exact_end_times(call, fabric, jitter=exponential_jitter(1.0, 1)).max()
            delayed = exact_end_times(call, fabric, late).max()
            queued = exact_end_times(call, narrow).max()
            body.append([label, format_size(nbytes), *(f"{each:.0f}" for each in (plain, noisy, delayed, queued))])
    header = ["algorithm", "bytes", "us", "with jitter of 1 us", "with one rank 100 us late", "leaves of 32 nodes, 2:1"]
    return table(header, body)
