r"""The alpha-beta model of collectives: a latency per step, bytes over bandwidth, and local work.

.. math:: T = f + s\,a + S / b + R / m + s_n\,a_n + S_n / b_n + s_w\,a_w + S_w / b_w

A rank makes s steps, sends S bytes, and consumes R bytes (reads, uses and clears them). f is the fixed cost of a call,
a the latency of a step, b the bandwidth in each direction, and m the rate at which a rank consumes received bytes. Over
several nodes, s and S count only traffic within nodes. In :math:`s_n` further steps a rank sends :math:`S_n` bytes to
one peer on another node, with a latency :math:`a_n` and a bandwidth :math:`b_n` for each rank; in :math:`s_w` steps it
sends :math:`S_w` bytes to all other nodes at once, with :math:`a_w` and :math:`b_w`. (On CPU hosts these differ, since
each message takes core time.) An SM-limited call takes at least as long as its SMs need to move the bytes. Each
algorithm's description gives its numbers (:mod:`shotcast.collectives.algorithms`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from shotcast.wire import NodeShape


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The cost constants of a machine."""

    fixed_us: float  # the fixed cost of a call
    step_us: float  # the latency of a step
    bw_gbps: float  # bandwidth between ranks in each direction, in 1e9 bytes a second
    local_gbps: float = math.inf  # the rate at which a rank takes in received bytes, in 1e9 bytes a second
    sm_gbps: float = math.inf  # the bytes that one SM sends, in 1e9 a second, where a call keeps to a number of them

    def transfer_us(self, nbytes: float) -> float:
        """Return the microseconds that ``nbytes`` take on the wire."""
        return nbytes / (self.bw_gbps * 1e3)


NVLINK4 = LinkCost(fixed_us=0.9781, step_us=0.8670, bw_gbps=362.3, local_gbps=43304.0, sm_gbps=20.0)
"""Hopper with 18 links, fitted by ``research/calibrate_gpu.py``.

The measurements are benchmarks/data/h200/all_reduce_bf16_x4.json (of earlier kernels) and _x2.json. The root mean
square error is 8%. They hardly determine ``local_gbps``, as what arrives costs next to nothing. Choosing by the model
costs at most 6% more than the fastest measurement, from 1 KiB to 256 MiB. ``sm_gbps`` is not fitted: on 2 H200, NCCL's
all-reduce of 448 MB took 5.7, 3.0 and 1.8 ms with 4, 8 and 16 blocks.
"""
SHARED_MEMORY = LinkCost(fixed_us=1.0, step_us=3.0, bw_gbps=15.0)
"""Processes of one host. Only the order of the algorithms is meaningful.

With 4 ranks on 2 cores, two-shot overtakes one-shot between 16 and 64 KiB (benchmarks/data/cpu).
"""


class NetworkCost(NamedTuple):
    """The constants of the network between nodes, in GB/s (1e9) and microseconds."""

    step_us: float  # the time of a step in which each rank sends to one peer, from the send to the arrival
    bw_gbps: float  # bandwidth of each rank in each direction, to one peer
    # the time of a step in which each rank sends to all peers; None for that of one peer
    spread_us: float | None = None
    spread_gbps: float | None = None  # bandwidth of each rank to all peers at once; None for that to one peer

    def __str__(self) -> str:
        one = f"{self.step_us:.4g} us and {self.bw_gbps:.3g} GB/s"
        step_us, bw_gbps = self.to_all
        return one if self.spread_us is None else f"{one} to one peer, {step_us:.4g} us and {bw_gbps:.3g} GB/s to all"

    @property
    def to_all(self) -> tuple[float, float]:
        """The latency of a step and the bandwidth when a rank sends to all peers at once."""
        step_us = self.step_us if self.spread_us is None else self.spread_us
        return step_us, self.bw_gbps if self.spread_gbps is None else self.spread_gbps


NO_NETWORK = NetworkCost(0.0, math.inf)
INFINIBAND = NetworkCost(step_us=5.0, bw_gbps=45.0)
"""GPUs with an NDR adapter each; not measured here.

Both are assumptions: 5 us is NCCL's model of a tree step between nodes (``hwLatencies``, LL, src/graph/tuning.cc of
NCCL 2.30.7), and 45 GB/s is slightly below the 46 to 48 that its maintainers expect from 400 Gbit/s
(https://github.com/NVIDIA/nccl-tests/issues/290).
"""


class Work(NamedTuple):
    """A rank's work in one call."""

    steps: int  # steps within its node
    sent: float  # bytes sent to ranks of its node
    taken: float  # bytes taken in
    network_steps: int = 0  # steps over the network between nodes in which a rank sends to one peer
    network_sent: float = 0.0  # bytes sent in these steps
    spread_steps: int = 0  # steps over the network in which a rank sends to all other nodes
    spread_sent: float = 0.0  # bytes sent in these steps, to all of them

    def over(self, shape: NodeShape) -> Work:
        """Move part of this work to the network, for calls in which a rank treats all others alike.

        Each step waits for the network, and the bytes for other nodes cross it.
        """
        if shape.nodes == 1:
            return self
        others = (shape.world_size - shape.ranks_per_node) / (shape.world_size - 1)
        network = self.sent * others
        return self._replace(steps=0, sent=self.sent - network, spread_steps=self.steps, spread_sent=network)


def time_us(work: Work, link: LinkCost, network: NetworkCost = NO_NETWORK, sms: int = 0) -> float:
    """Predict the time of a call in microseconds with the equation above.

    A call limited to ``sms`` SMs (0 for no limit) moves its bytes no faster than they can.
    """
    local_us = work.taken / (link.local_gbps * 1e3)
    spread_us, spread_gbps = network.to_all
    network_us = work.network_steps * network.step_us + work.network_sent / (network.bw_gbps * 1e3)
    network_us += work.spread_steps * spread_us + work.spread_sent / (spread_gbps * 1e3)
    moved_us = link.transfer_us(work.sent) + local_us
    if sms:
        moved_us = max(moved_us, work.sent / (sms * link.sm_gbps * 1e3))
    return link.fixed_us + work.steps * link.step_us + moved_us + network_us
