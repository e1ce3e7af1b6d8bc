"""Namespaces and TUN devices of Linux, which need root.

A namespace has no name: it lives as long as a process is in it or holds its descriptor. A TUN device lives as long as
its descriptor. So nothing is left behind, however the processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shotcast.errors import ConfigError
from simulated_hosts.namespaces import enter_namespace

T = TypeVar("T")

INTERFACE = "sim0"
"""The name of the TUN device, which is the same on all hosts."""
MTU = 65520
PACKET_HEADER_BYTES = 10
"""Bytes of the struct virtio_net_hdr before each packet, which says whether a checksum is still to be computed."""

_TUN = "/dev/net/tun"
_QUEUE_PACKETS = 1 << 16
"""The packets that a TUN device holds until they are read; it drops those beyond."""

_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x200, 0x20000, 0x4000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x1000, 0x4000, 1 << 18, 0x2, 0x4
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN_F_CSUM, _TUN_F_TSO4 = 0x1, 0x2
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN, _IFF_UP = 0x8922, 0x8943, 0x1

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Return what keeps this process from simulating hosts; empty if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root, and this process does not run as root"
    try:
        os.close(os.open(_TUN, os.O_RDWR))
    except OSError as error:
        return f"TUN devices cannot be opened ({_TUN}: {error.strerror})"
    try:
        create_host("attempt", "127.0.0.1", "255.0.0.0", "").close()
    except OSError as error:
        return f"this process may not make a host, though it runs as root ({error.strerror})"
    return ""


def require() -> None:
    """Raise ConfigError where hosts cannot be simulated."""
    if lack := missing():
        raise ConfigError(
            f"hosts cannot be simulated here: {lack}. They take network namespaces and TUN devices, so root (as in "
            "`sudo make bench-hosts`) and /dev/net/tun"
        )


def in_thread(function: Callable[[], T]) -> T:
    """Run ``function`` on a separate thread, as a thread that enters a namespace does not come back."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="shotcast namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@dataclass(frozen=True, slots=True)
class HostDescriptors:
    """The descriptors that keep a simulated host alive.

    Attributes:
        namespaces: all its namespaces, in the order in which a process enters them.
        tun: its TUN device, non-blocking.
    """

    namespaces: tuple[int, ...]
    tun: int

    def close(self) -> None:
        for descriptor in (*self.namespaces, self.tun):
            os.close(descriptor)

    def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` on a thread that has entered the host."""

        def entered() -> T:
            _unshare(_CLONE_FS)  # without a file system view of its own, a thread cannot enter another
            for namespace in self.namespaces:
                enter_namespace(namespace)
            return function()

        return in_thread(entered)


def create_host(name: str, address: str, netmask: str, names: str) -> HostDescriptors:
    """Create a host: namespaces with this host name, own shared memory and boot id, and a TUN device.

    ``names`` is the text of its ``/etc/hosts``.
    """
    return in_thread(lambda: _create_host(name, address, netmask, names))


def _create_host(name: str, address: str, netmask: str, names: str) -> HostDescriptors:
    _unshare(_CLONE_NEWNET | _CLONE_NEWUTS | _CLONE_NEWNS)
    socket.sethostname(name)
    _own_mounts(names)
    tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    opened = [tun]
    try:
        kind = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), kind))
        fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
        with contextlib.suppress(OSError):  # the kernel may have no IPv6
            Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            raise_interface(control, "lo")
            for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, netmask)):
                inet = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(control, request, struct.pack("16s16s8x", INTERFACE.encode(), inet))
            for request, number in ((_SIOCSIFMTU, MTU), (_SIOCSIFTXQLEN, _QUEUE_PACKETS)):
                fcntl.ioctl(control, request, struct.pack("16si20x", INTERFACE.encode(), number))
            raise_interface(control, INTERFACE)
        for kind_of_namespace in ("net", "uts", "mnt"):
            opened.append(os.open(f"/proc/thread-self/ns/{kind_of_namespace}", os.O_RDONLY | os.O_CLOEXEC))
        return HostDescriptors(tuple(opened[1:]), tun)
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
        raise


def _own_mounts(names: str) -> None:
    """Give this mount namespace its own shared memory, boot id and names, as ranks of two hosts share none of them."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("shotcast", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV)
    boot_id = Path("/proc/sys/kernel/random/uuid").read_text()
    for target, text in (("/proc/sys/kernel/random/boot_id", boot_id), ("/etc/hosts", names)):
        source = Path("/dev/shm/mounted")
        source.write_text(text)
        _mount(str(source), target, "", _MS_BIND)
        source.unlink()  # the mount keeps the file


def interface_drops(host: HostDescriptors) -> int:
    """Return how many packets the TUN device of a host has dropped, in both directions."""

    def read() -> int:
        with open("/proc/thread-self/net/dev") as file:
            fields = next(line for line in file if line.strip().startswith(INTERFACE)).split(":")[1].split()
        return int(fields[3]) + int(fields[11])

    return host.run(read)


def retransmitted(host: HostDescriptors) -> int:
    """Return how many TCP segments a host has sent again."""

    def read() -> int:
        with open("/proc/thread-self/net/snmp") as file:
            names, values = (line.split() for line in file if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    return host.run(read)


def raise_interface(control: socket.socket, interface: str, up: bool = True) -> None:
    """Take an interface of the current network up, or down."""
    answer = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH22x", interface.encode(), 0))
    flags = struct.unpack("16sH22x", answer)[1]
    flags = flags | _IFF_UP if up else flags & ~_IFF_UP
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", interface.encode(), flags))


def _unshare(kinds: int) -> None:
    _check(_libc.unshare(kinds), "unshare")


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    _check(_libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None), f"mount {target}")


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
