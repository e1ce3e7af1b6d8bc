"""The hosts to simulate, and what was measured of the network between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from shotcast.errors import ConfigError
from simulated_hosts import probe
from simulated_hosts.network import SimulatedHosts


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

    def network(self) -> SimulatedHosts:
        """Return the simulated hosts, to be closed after use."""
        return SimulatedHosts(self.hosts, delay_us=self.delay_us, bandwidth_gbps=self.bandwidth_gbps)


def simulated(
    hosts: Annotated[
        int,
        typer.Option(
            "--hosts", min=0, help="Simulate that many hosts on this machine, joined by a network. Needs root."
        ),
    ] = 0,
    ranks_per_host: Annotated[int, typer.Option("--ranks-per-host", min=1, help="Ranks on each simulated host.")] = 1,
    delay_us: Annotated[
        float, typer.Option("--delay-us", min=0.0, help="The one-way delay between simulated hosts, in microseconds.")
    ] = 0.0,
    bandwidth_gbps: Annotated[
        float, typer.Option("--bandwidth-gbps", min=0.0, help="Gbit/s of a simulated host's link. Default: no limit.")
    ] = 0.0,
) -> Any:
    """Return the :class:`HostsConfig` of the hosts to simulate; None if there are none."""
    if hosts:
        return HostsConfig(hosts, ranks_per_host, delay_us, bandwidth_gbps)
    if ranks_per_host != 1 or delay_us or bandwidth_gbps:
        raise ConfigError("--ranks-per-host, --delay-us and --bandwidth-gbps are for simulated hosts: say --hosts too")
    return None


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


def run_on_hosts(hosts: HostsConfig, fn: Callable[..., Any], *args: Any) -> tuple[list[Any], NetworkFacts]:
    """Simulate the hosts, measure their network, and run ``fn(*args)`` on them; return its results and the facts.

    Raises:
        ConfigError: hosts cannot be simulated here.
        ShotcastError: the network lost packets.
    """
    with hosts.network() as network:
        own_delay_us, throughput_gbps = probe.own_delay_us(network), probe.throughput_gbps(network)
        before, retransmitted = network.relay.counters(), network.retransmitted()
        results = network.run(fn, hosts.ranks_per_host, *args)
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
    return results, facts
