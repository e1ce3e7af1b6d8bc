"""Simulated hosts: their namespaces, the relay between them, and the ranks that run on them.

Each host has its own network, host name, boot id and ``/dev/shm``; all share the cores of this machine.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shotcast.errors import ConfigError, ShotcastError
from shotcast.launcher.spawn import RankGroup
from simulated_hosts import linux
from simulated_hosts.linux import INTERFACE
from simulated_hosts.namespaces import enter_namespaces
from simulated_hosts.relay import Relay

_log = logging.getLogger(__name__)

_NETMASK = "255.255.0.0"
MAX_HOSTS = 64
_SPIN_US = 60.0
"""The relay stays awake this long before a packet is due, because timers of a virtual machine fire this late."""


def address_of(host: int) -> str:
    """Return the address of a host on the simulated network."""
    return f"10.231.0.{host + 1}"


def name_of(host: int) -> str:
    return f"host{host}"


def _names(hosts: int) -> str:
    """Return an ``/etc/hosts``; it names IPv4 addresses in IPv6 form too, as torch.distributed looks up its own so."""
    lines = ["127.0.0.1 localhost"]
    for host in range(hosts):
        lines += [f"{address_of(host)} {name_of(host)}", f"::ffff:{address_of(host)} {name_of(host)}.mapped"]
    return "\n".join(lines) + "\n"


class SimulatedHosts:
    """Hosts on this machine, each in namespaces of its own, joined by a network that delays every packet.

    Nothing is left behind when the process ends, however it ends: namespaces and devices have no names, and the ranks
    on the hosts end with the process that started them.

    Args:
        hosts: how many, 2 or more.
        delay_us: the one-way delay of every packet between hosts; the relay's own comes on top.
        bandwidth_gbps: Gbit/s of each host's link in each direction; 0 for as much as the relay can carry.

    Raises:
        ConfigError: this process may not create namespaces or TUN devices, or an argument is wrong.
    """

    def __init__(self, hosts: int, *, delay_us: float = 0.0, bandwidth_gbps: float = 0.0):
        if not 2 <= hosts <= MAX_HOSTS:
            raise ConfigError(f"a simulated network joins 2 to {MAX_HOSTS} hosts, not {hosts}")
        if not delay_us >= 0 or not bandwidth_gbps >= 0:
            raise ConfigError(f"delay and bandwidth cannot be negative: {delay_us} us, {bandwidth_gbps} Gbit/s")
        linux.require()
        self.hosts, self.delay_us, self.bandwidth_gbps = hosts, delay_us, bandwidth_gbps
        self._hosts: list[linux.HostDescriptors] = []
        self._stores: list[dist.TCPStore] = []  # a store must live as long as its ranks
        self._relay: Relay | None = None
        try:
            names = _names(hosts)
            for host in range(hosts):
                self._hosts.append(linux.create_host(name_of(host), address_of(host), _NETMASK, names))
            self._relay = Relay([host.tun for host in self._hosts], delay_us, bandwidth_gbps, _SPIN_US)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SimulatedHosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the network. End the ranks on the hosts first."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        for host in self._hosts:
            host.close()
        self._hosts, self._stores = [], []

    @property
    def relay(self) -> Relay:
        if self._relay is None:
            raise ShotcastError("the simulated network was closed")
        return self._relay

    # --- ranks --------------------------------------------------------------------------------------------------------

    def start(
        self, fn: Callable[..., Any], ranks_per_host: int, *args: Any, env: Mapping[str, str] | None = None
    ) -> RankGroup:
        """Start ``fn(*args)`` in ``ranks_per_host`` processes on each host, as :func:`shotcast.spawn` does on one.

        Ranks are numbered host by host. The job's store is on host 0.
        """
        if ranks_per_host < 1:
            raise ConfigError(f"a host runs at least 1 rank, not {ranks_per_host}")
        store = self._hosts[0].run(lambda: dist.TCPStore(address_of(0), 0, is_master=True, wait_for_workers=False))
        self._stores.append(store)
        namespaces = [host.namespaces for host in self._hosts]
        address = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
        call = os.getpid(), namespaces, address | {"LOCAL_WORLD_SIZE": str(ranks_per_host)}, fn, args
        return RankGroup.start(_on_host, self.hosts * ranks_per_host, *call, env=self._interfaces | dict(env or {}))

    def run(
        self,
        fn: Callable[..., Any],
        ranks_per_host: int,
        *args: Any,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Run ``fn(*args)`` on all hosts and return the results by rank, as :func:`shotcast.spawn` does on one."""
        group = self.start(fn, ranks_per_host, *args, env=env)
        return group.results(timeout_s, return_exceptions=return_exceptions)

    def socket(self, host: int, kind: socket.SocketKind) -> socket.socket:
        """Return a socket of this process on a host, bound to the host's address and a free port."""

        def create() -> socket.socket:
            created = socket.socket(socket.AF_INET, kind)
            created.bind((address_of(host), 0))
            return created

        return self._hosts[host].run(create)

    @property
    def _interfaces(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "SHOTCAST_SOCKET_IFNAME": INTERFACE}

    # --- what happened ------------------------------------------------------------------------------------------------

    def retransmitted(self) -> int:
        """Return how many TCP segments the hosts have sent again."""
        return sum(linux.retransmitted(host) for host in self._hosts)

    def check(self) -> None:
        """Raise ShotcastError if a packet was lost: times would mean nothing."""
        counters = self.relay.counters()
        dropped = sum(linux.interface_drops(host) for host in self._hosts)
        if dropped or counters.failed or sum(counters.lost):
            raise ShotcastError(
                f"the simulated network lost packets: the interfaces dropped {dropped}, the relay lost "
                f"{sum(counters.lost)} and could not deliver {counters.failed}"
            )


def _on_host(
    owner: int,
    hosts: Sequence[Sequence[int]],
    environment: dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Call ``fn(*args)`` as a rank that has entered its host.

    Args:
        owner: the process that simulates the hosts.
        hosts: its descriptors of each host's namespaces.
        environment: of all ranks.
    """
    host, local_rank = divmod(int(os.environ["RANK"]), int(environment["LOCAL_WORLD_SIZE"]))
    os.environ |= environment | {"LOCAL_RANK": str(local_rank), "GROUP_RANK": str(host)}
    enter_namespaces([f"/proc/{owner}/fd/{descriptor}" for descriptor in hosts[host]])
    return fn(*args)
