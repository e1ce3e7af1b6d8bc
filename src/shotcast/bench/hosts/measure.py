"""A benchmark of collectives on simulated hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from shotcast.bench import harness
from shotcast.bench.config import BenchConfig
from shotcast.bench.hosts import linux, probe
from shotcast.bench.hosts.network import SimulatedHosts
from shotcast.bench.report import Row
from shotcast.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HostsConfig:
    """The hosts to simulate.

    Attributes:
        delay_us: the one-way delay between hosts.
        bandwidth_gbps: the limit of each host's link in Gbit/s; 0 for none.
    """

    hosts: int
    ranks_per_host: int = 1
    delay_us: float = 0.0
    bandwidth_gbps: float = 0.0

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """A simulated network, what was measured of it before a benchmark, and how it fared meanwhile.

    Attributes:
        config: what was asked for.
        own_delay_us: what the way of a single packet took beyond the delay: median and 99th percentile.
        throughput_gbps: Gbit/s of one TCP connection without delay.
        packets, nbytes: carried between hosts.
        late_us: upper bounds of the time by which 50% and 99% of the packets were delivered after they were due.
        busy: the share of the time in which the relay worked.
        retransmitted: TCP segments that were sent again, as their acknowledgement was late.
    """

    config: HostsConfig
    own_delay_us: tuple[float, float]
    throughput_gbps: float
    packets: int
    nbytes: int
    late_us: tuple[float, float]
    busy: float
    retransmitted: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        own, slow = self.own_delay_us
        limit = f", {self.config.bandwidth_gbps:g} Gbit/s a link" if self.config.bandwidth_gbps else ""
        return (
            f"network: {self.config.delay_us:g} us one way{limit}. Unloaded, the relay adds {own:.1f} us (99%: "
            f"{slow:.1f}); one connection carries {self.throughput_gbps:.1f} Gbit/s. In this run it was busy "
            f"{self.busy:.0%} of the time, and delivered half of {self.packets} packets less than "
            f"{self.late_us[0]:.0f} us late, 99% less than {self.late_us[1]:.0f}. It lost none, though "
            f"{self.retransmitted} segments were sent again"
        )


def run(config: BenchConfig, hosts: HostsConfig) -> tuple[list[Row], NetworkFacts]:
    """Simulate the hosts, measure their network, and then the collectives.

    Raises:
        ConfigError: hosts cannot be simulated here, or the configuration is not for them.
        ShotcastError: the network lost packets.
    """
    if config.device != "cpu":
        raise ConfigError("simulated hosts run CPU ranks; leave out --device, or say --device cpu")
    if hosts.ranks_per_host < 1:
        raise ConfigError(f"a host runs at least 1 rank, not {hosts.ranks_per_host}")
    linux.require()
    with SimulatedHosts(hosts.hosts, delay_us=hosts.delay_us, bandwidth_gbps=hosts.bandwidth_gbps) as network:
        own_delay_us, throughput_gbps = probe.own_delay_us(network), probe.throughput_gbps(network)
        before, retransmitted = network.relay.counters(), network.retransmitted()

        def start(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
            return network.run(fn, world_size // hosts.hosts, *args, **options)

        rows = harness.run(replace(config, nodes=hosts.hosts), hosts.world_size, start)
        counters = network.relay.counters().since(before)
        facts = NetworkFacts(
            hosts,
            own_delay_us,
            throughput_gbps,
            sum(counters.packets),
            sum(counters.nbytes),
            (counters.late_us(0.5), counters.late_us(0.99)),
            counters.busy,
            network.retransmitted() - retransmitted,
        )
        network.check()
    return [replace(row, delay_us=hosts.delay_us) for row in rows], facts
