"""Measure what the simulated network itself costs, before it is used."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np

from shotcast.errors import ShotcastError
from simulated_hosts.network import SimulatedHosts

_PACKETS = 200
_PAUSE_S = 0.0005
"""Time between two packets, in which the relay falls asleep."""
_SECONDS = 0.3
_CHUNK = 1 << 20


def own_delay_us(network: SimulatedHosts, packets: int = _PACKETS) -> tuple[float, float]:
    """Return the median and the 99th percentile of the time of one packet from host 0 to host 1, less the delay."""
    sender, receiver = (network.socket(host, socket.SOCK_DGRAM) for host in (0, 1))
    with sender, receiver:
        receiver.setblocking(False)
        address = receiver.getsockname()
        times_us = []
        for _ in range(packets):
            time.sleep(_PAUSE_S)
            start = time.perf_counter_ns()
            sender.sendto(b"packet", address)
            while True:
                now = time.perf_counter_ns()
                try:
                    receiver.recv(64)
                    break
                except BlockingIOError:
                    if now - start > 1e9 + 1e3 * network.delay_us:
                        raise ShotcastError("a packet did not arrive on the simulated network") from None
            times_us.append((time.perf_counter_ns() - start) / 1e3 - network.delay_us)
    return float(np.median(times_us)), float(np.percentile(times_us, 99))


def throughput_gbps(network: SimulatedHosts, seconds: float = _SECONDS) -> float:
    """Return the Gbit/s of one TCP connection from host 0 to host 1 while the network has no delay."""
    listener, sender = (network.socket(host, socket.SOCK_STREAM) for host in (1, 0))
    network.relay.set_delay(0.0)
    try:
        with listener, sender:
            listener.listen(1)
            sender.settimeout(10.0)
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            with receiver:
                thread = threading.Thread(target=_send, args=(sender, seconds), name="shotcast probe")
                start = time.perf_counter()
                thread.start()
                received, buffer = 0, bytearray(_CHUNK)
                while count := receiver.recv_into(buffer):
                    received += count
                elapsed = time.perf_counter() - start
                thread.join()
    finally:
        network.relay.set_delay(network.delay_us)
    return received * 8 / elapsed / 1e9


def _send(connection: socket.socket, seconds: float) -> None:
    data, end = bytes(_CHUNK), time.perf_counter() + seconds
    while time.perf_counter() < end:
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
