"""Addresses and listening sockets of this host: which interface, which port."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct

from shotcast import env
from shotcast.errors import ConfigError

_SIOCGIFADDR = 0x8915
_LINK_LOCAL = "20"
"""The scope, in /proc/net/if_inet6, of addresses that are useful only with an interface name."""


def address_of_this_host(toward: str) -> str:
    """Return the address at which other hosts reach this one.

    It is the address of the interface from :func:`shotcast.env.socket_ifname`, preferably IPv4. Without that setting,
    the route to ``toward`` determines it, the name or address of a host of the job. Raises ConfigError if there is no
    such interface, it has no address, or there is no route.
    """
    if name := env.socket_ifname():
        return _address_of_interface(name)
    try:
        family, _, _, _, remote = socket.getaddrinfo(toward, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(remote)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"this host has no route to {toward} ({error}); set SHOTCAST_SOCKET_IFNAME to the interface that other "
            "hosts reach"
        ) from error


def listen(address: str, backlog: int = 128) -> socket.socket:
    """Listen at ``address``, on the first free port of :func:`shotcast.env.port_range`. Raises ConfigError if the
    address does not belong to this host, or no port in the range is free.
    """
    first, last = env.port_range()
    family, kind, protocol, _, place = socket.getaddrinfo(
        address, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    for port in range(first, last + 1):
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((place[0], port, *place[2:]))
            listener.listen(backlog)
            return listener
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(f"cannot listen at {address}: {error}") from error
    raise ConfigError(f"no port from {first} to {last} is free at {address}; SHOTCAST_PORT_RANGE names the ports")


def _address_of_interface(name: str) -> str:
    present = [interface for _, interface in socket.if_nameindex()]
    if name not in present:
        raise ConfigError(
            f"this host has no network interface {name} (SHOTCAST_SOCKET_IFNAME or GLOO_SOCKET_IFNAME); "
            f"it has {', '.join(present)}"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    found = _ipv6_addresses(name)
    if not found:
        raise ConfigError(f"network interface {name} has no address (SHOTCAST_SOCKET_IFNAME or GLOO_SOCKET_IFNAME)")
    return found[0]


def _ipv6_addresses(name: str) -> list[str]:
    """Return the IPv6 addresses of an interface; the ones that need its name come last and include it."""
    found: list[tuple[bool, str]] = []
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, scope, _, interface = line.split()
            if interface == name:
                local = scope == _LINK_LOCAL
                found.append((local, f"{ipaddress.IPv6Address(int(digits, 16))}{f'%{name}' if local else ''}"))
    return [address for _, address in sorted(found)]
