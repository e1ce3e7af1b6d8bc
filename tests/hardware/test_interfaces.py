"""The address that a host gives to others, and the port that it listens on."""

from __future__ import annotations

import socket

import pytest

from shotcast.errors import ConfigError
from shotcast.hardware import interfaces
from shotcast.hardware.interfaces import address_of_this_host, listen


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOTCAST_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "SHOTCAST_PORT_RANGE"):
        monkeypatch.delenv(name, raising=False)


def test_the_route_decides() -> None:
    assert address_of_this_host("127.0.0.5") == "127.0.0.1"
    assert address_of_this_host("localhost") in ("127.0.0.1", "::1")


def test_no_route() -> None:
    with pytest.raises(ConfigError, match=r"no route to no\.such\.host\.invalid .*SHOTCAST_SOCKET_IFNAME"):
        address_of_this_host("no.such.host.invalid")


def test_the_interface_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCAST_SOCKET_IFNAME", "lo")
    assert address_of_this_host("no.such.host.invalid") == "127.0.0.1"
    monkeypatch.setenv("SHOTCAST_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(ConfigError, match=r"no network interface nosuch0 .*it has .*lo"):
        address_of_this_host("127.0.0.1")


def test_addresses_of_version_6() -> None:
    found = interfaces._ipv6_addresses("lo")
    assert found in ([], ["::1"])


def test_an_interface_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "bare0")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bare0,lo")
    with pytest.raises(ConfigError, match="network interface bare0 has no address"):
        address_of_this_host("127.0.0.1")


def test_any_port() -> None:
    with listen("127.0.0.1") as listener, socket.create_connection(listener.getsockname()):
        assert listener.getsockname()[1] > 0


def test_the_first_free_port_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("SHOTCAST_PORT_RANGE", f"{port}-{min(port + 50, 65535)}")
        with listen("127.0.0.1") as listener:
            assert port < listener.getsockname()[1] <= port + 50
        monkeypatch.setenv("SHOTCAST_PORT_RANGE", f"{port}-{port}")
        with pytest.raises(ConfigError, match=rf"no port from {port} to {port} is free at 127\.0\.0\.1"):
            listen("127.0.0.1")


def test_the_address_of_another_host() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 203\.0\.113\.7"):
        listen("203.0.113.7")
