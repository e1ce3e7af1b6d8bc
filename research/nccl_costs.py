"""Steps of an engine whose sums NCCL computes, by ``nccl_model.py``: what our own sums are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nccl_model import HOPPER, NETWORK_RESIDUAL, NVLINK_RINGS, NVLINK_RINGS_GBPS, RING_RESIDUAL, Host, all_reduce_us

from shotcast.cost.collective import LinkCost
from shotcast.cost.inference import FP8, MOST_WIDE_ROWS
from shotcast.hardware.cluster import Cluster
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.step import Priced, StepModel

CPU_VENDORS = {"a100x4": "amd", "a100x8": "amd"}
"""The CPUs of packaged clusters that are not Intel's; NCCL takes another rate of short messages for them."""


@dataclass(frozen=True, slots=True)
class NcclCosts(CollectiveCosts):
    """The costs of our collectives on a cluster, and of NCCL's sums.

    Attributes:
        rings: constants of NCCL's rings within a node.
        host: what NCCL's model of several nodes takes besides the network.
    """

    rings: LinkCost = field(default=NVLINK_RINGS, kw_only=True)
    host: Host = field(default=HOPPER, kw_only=True)

    @classmethod
    def on(cls, cluster: Cluster, link: LinkCost) -> NcclCosts:
        """Return the constants of a cluster; rings have their bandwidth by the ratio of the links' data sheets."""
        own = CollectiveCosts.on(cluster, link)
        bw_gbps = NVLINK_RINGS.bw_gbps * cluster.gpu.link.paper_bw_gbps / NVLINK_RINGS_GBPS
        rings = replace(NVLINK_RINGS, bw_gbps=bw_gbps)
        host = Host(cluster.gpu.compute_capability, CPU_VENDORS.get(cluster.name, "intel"))
        return cls(own.link, own.network, own.gpus_per_node, wires=own.wires, rings=rings, host=host)

    def nccl_sum(self, nbytes: int, ranks: int) -> Priced:
        """Return the time of an all-reduce by NCCL, and the residual of its model."""
        shape = self.shape(ranks)
        time_us = all_reduce_us(nbytes, shape, self.rings, self.network_over(shape.nodes), self.host)
        return Priced(time_us, RING_RESIDUAL if shape.nodes == 1 else NETWORK_RESIDUAL)


class NcclStepModel(StepModel):
    """Predicts the steps of an engine whose sums are NCCL's, each followed by a norm of one rank."""

    _collectives: NcclCosts

    def _summed(self, nbytes: int) -> Priced:
        return self._collectives.nccl_sum(nbytes, self.layout.tensor_parallel)

    def _sum_and_norm(self, rows: int) -> dict[str, Priced]:
        fp8 = FP8 if self._fp8 and rows > MOST_WIDE_ROWS else ""
        norm = {"norm": self._norm(rows, fp8)}
        if self.layout.tensor_parallel == 1:
            return norm
        return {"all_reduce": self._summed(rows * self.model.hidden * self.itemsize)} | norm
