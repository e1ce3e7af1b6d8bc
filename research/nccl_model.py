r"""NCCL's all-reduces over several nodes, priced by NCCL's own cost model: the baseline for native algorithms.

NCCL predicts each algorithm and protocol by a latency and a bandwidth (``src/graph/tuning.cc`` of NCCL 2.30.7, the
source of all constants here; the important ones have not changed since 2.23), and takes the fastest. For H nodes of L
ranks, N = HL, and a message of M bytes, with :math:`a` the latency of a step within a node, :math:`a_n` of one between
nodes, and f the fixed cost, each per algorithm and protocol,

.. math::
    T_{ring} &= f + (2N - 2H)\, \max(a, o) + (2H - 2)\, a_n + \frac{2 (N - 1)}{N} \frac{M}{B} \\
    T_{tree} &= f + 2 (L - 1)\, a + 2 \lfloor \log_2 H \rfloor\, a_n + \frac{2 M}{B c(M)}

o is the proxy thread's time for a step. B is the combined bandwidth of a node's adapters, less protocol overhead and
limited by its channels; :math:`c(M)` is NCCL's empirical correction for trees. Short messages use LL, whose flags take
half of the bandwidth and which the host's CPU limits; medium ones use LL128; long ones use Simple, whose steps take
longest.

The model is NCCL's, so nothing is fitted here; ``research/tests/test_nccl_model.py`` compares it with times that NCCL
printed and with published measurements, which are up to twice as long for short messages on two nodes, and close
elsewhere. It covers neither NVLink multicast, which this package leaves off, nor in-switch reductions.

Within one node the times come from measured rings: :math:`T = f + 2 (N - 1)\, a + 2 \frac{N-1}{N} M / b`.

The consequence: between nodes, the time of rings grows with the number of ranks and the time of trees with the
logarithm of the nodes; from about 64 KiB to a few MiB, a protocol change costs as much as several steps.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from typing import NamedTuple

from shotcast.cost.collective import INFINIBAND, LinkCost, NetworkCost
from shotcast.errors import ConfigError
from shotcast.wire import NodeShape

ALGORITHMS, PROTOCOLS = ("tree", "ring"), ("LL", "LL128", "Simple")
_BASE_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
"""``baseLatencies``, by protocol."""
_NVLINK_US = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_NETWORK_US = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
"""``hwLatencies`` of NVLINK and NET, by protocol."""
_PROXY_US = {"intel": 1.0, "amd": 2.0}
"""``getNetOverhead``; three times as much for Simple."""
_LL_GBPS = {"intel": (39.0, 20.4), "amd": (22.5, 19.0)}
"""``llMaxBws`` for two nodes and for more."""
_TREE_CORRECTION = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
"""``treeCorrectionFactor`` by protocol, for 64 bytes and each further doubling."""
_RING_PLATEAU = 1.4
"""The factor on the latency of long rings between nodes, from Ampere on."""


class _Generation(NamedTuple):
    """Channel limits of a GPU generation in GB/s, on two nodes and on more.

    ``speeds`` are the channel speeds that NCCL tries on a network (``src/graph/search.cc``), ascending.
    """

    ring_ll128: tuple[float, float]
    tree_ll128: tuple[float, float]
    tree: tuple[float, float]
    speeds: tuple[float, ...]


_AMPERE = _Generation(
    (20.0, 20.0), (20.0, 20.0), (23.6, 17.8), (0.1, 0.2, 1.2, 2.4, 3, 4, 5, 6, 7, 9, 10, 12, 15, 18, 20, 24, 28, 30, 48)
)
_HOPPER = _Generation(
    (36.7, 36.7), (36.7, 29.0), (41.4, 36.0), (0.12, 0.24, 1.2, 2.4, 3, 6, 12, 15, 17.5, 20, 22, 24, 30, 40, 42, 45, 48)
)
_BLACKWELL = _Generation(
    (40.0, 40.0),
    (31.67, 20.0),
    (42.8, 24.0),
    (0.12, 0.24, 1.2, 2.4, 3, 6, 12, 15, 17.5, 20, 22, 24, 30, 40, 42, 45.1, 48, 80, 86, 96),
)
NVLINK_RINGS = LinkCost(4.155, 0.7727, 281.5)
"""NCCL's rings on one node of H200 (NVLink 4, 450 GB/s per GPU and direction), fitted by ``research/nccl_rings.py``.

The fit uses 2 and 4 GPUs (``nccl_ring`` in ``benchmarks/data/h200/all_reduce_bf16_x2.json`` and ``_x4.json``).
"""
NVLINK_RINGS_GBPS = 450.0
RING_RESIDUAL = 0.15
"""The root mean square of the fit's relative errors."""
NETWORK_RESIDUAL = 0.32
"""The same for the model between nodes, against the published measurements in ``research/published_nccl.py``."""
_SPLIT_GBPS = 25.0
"""Channels at this speed or faster are split into two of half the speed."""


class Host(NamedTuple):
    """A node as NCCL's model sees it, without its network: GPU generation and CPU vendor.

    ``plain_trees`` means trees with one child per node, which costs 15% of their bandwidth; NCCL builds them if a
    node's adapters are not balanced between its GPUs.
    """

    compute_capability: tuple[int, int] = (9, 0)
    cpu_vendor: str = "intel"
    plain_trees: bool = False


HOPPER = Host()


class NcclChoice(NamedTuple):
    """An algorithm and protocol, with NCCL's predicted time in microseconds."""

    time_us: float
    algorithm: str
    protocol: str


def ring_us(nbytes: int, ranks: int, link: LinkCost) -> float:
    """Return the time of NCCL's ring on one node in microseconds."""
    moved_us = 2 * (ranks - 1) / ranks * nbytes / (link.bw_gbps * 1e3)
    return link.fixed_us + 2 * (ranks - 1) * link.step_us + moved_us


def all_reduce_us(nbytes: int, shape: NodeShape, link: LinkCost, network: NetworkCost, host: Host = HOPPER) -> float:
    """Return the time of an all-reduce in microseconds.

    Args:
        link: constants of NCCL's rings on one node.
        network: the network, without flags.
    """
    if shape.nodes == 1:
        return ring_us(nbytes, shape.world_size, link)
    return between_nodes(nbytes, shape, network, host).time_us


def between_nodes(nbytes: int, shape: NodeShape, network: NetworkCost, host: Host = HOPPER) -> NcclChoice:
    """Return NCCL's choice over several nodes: the fastest algorithm and protocol that it may use."""
    return min(choices(nbytes, shape, network, host))


def choices(nbytes: int, shape: NodeShape, network: NetworkCost, host: Host = HOPPER) -> tuple[NcclChoice, ...]:
    """Return every algorithm and protocol over several nodes, with its time.

    The constants describe InfiniBand. A network whose step takes longer has the difference added, as NCCL does with the
    latency that a network reports (``latencyInter``).

    Raises ConfigError if there is one node.
    """
    if shape.nodes < 2:
        raise ConfigError(f"this is the model of NCCL over several nodes, not of {shape} ranks")
    return tuple(
        NcclChoice(_time_us(algorithm, protocol, nbytes, shape, network, host), algorithm, PROTOCOLS[protocol])
        for algorithm, protocol in itertools.product(ALGORITHMS, range(len(PROTOCOLS)))
    )


def _time_us(algorithm: str, protocol: int, nbytes: int, shape: NodeShape, network: NetworkCost, host: Host) -> float:
    nodes, local, ranks = shape.nodes, shape.ranks_per_node, shape.world_size
    simple = PROTOCOLS[protocol] == "Simple"
    further_us = max(0.0, network.step_us - INFINIBAND.step_us) * (2 if simple else 1)
    # with one rank a node nothing hides the latency of the network: rings take that of trees
    network_us = _NETWORK_US["tree" if local == 1 else algorithm][protocol] + further_us
    inside_us, fixed_us = _NVLINK_US[algorithm][protocol], _BASE_US[algorithm][protocol]
    gbps, channels = _bus_gbps(algorithm, protocol, shape, network, host)
    if algorithm == "tree":
        latency_us = fixed_us + 2 * ((local - 1) * inside_us + (nodes.bit_length() - 1) * network_us)
        size = (nbytes >> 6).bit_length() - 1
        correction = _TREE_CORRECTION[protocol][size] if 0 <= size < len(_TREE_CORRECTION[protocol]) else 1.0
        return latency_us + nbytes / (gbps / 2 * correction * 1e3)
    hops, between = 2 * (ranks - 1), 2 * (nodes - 1)
    proxy_us = _PROXY_US[host.cpu_vendor] * (3 if simple else 1)
    latency_us = fixed_us + (hops - between) * max(inside_us, proxy_us) + between * network_us
    if simple and nbytes // (channels * ranks) >= 64:
        latency_us *= _RING_PLATEAU
    return latency_us + nbytes / (gbps * ranks / hops * 1e3)


def _bus_gbps(algorithm: str, protocol: int, shape: NodeShape, network: NetworkCost, host: Host) -> tuple[float, int]:
    """Return the total bandwidth of a node's channels in GB/s, and their number."""
    major, more = host.compute_capability[0], min(shape.nodes, 3) - 2
    generation = _BLACKWELL if major >= 10 else _HOPPER if major >= 9 else _AMPERE
    speeds = generation.speeds
    speed = speeds[max(0, bisect_right(speeds, network.bw_gbps) - 1)] if math.isfinite(network.bw_gbps) else speeds[-1]
    channels = shape.ranks_per_node * (2 if speed >= _SPLIT_GBPS else 1)
    gbps, ll_gbps = shape.ranks_per_node * speed, _LL_GBPS[host.cpu_vendor][more]
    if algorithm == "ring":
        if PROTOCOLS[protocol] == "LL":
            gbps = min(ll_gbps, gbps / 2)
        elif PROTOCOLS[protocol] == "LL128":
            gbps = min(0.92 * gbps, channels * generation.ring_ll128[more])
        return gbps, channels
    gbps = min(0.92 * gbps, channels * generation.tree[more])
    if PROTOCOLS[protocol] == "LL":
        gbps = min(gbps / 3.8, ll_gbps)
    elif PROTOCOLS[protocol] == "LL128":
        gbps = min(gbps * 120 / 128, channels * generation.tree_ll128[more])
    return gbps * (0.85 if host.plain_trees else 1.0), channels
