"""Calibrate a CPU machine: measure its kernels and host time, and describe it as a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from shotcast.bench import cpu_host, cpu_kernels, kernels
from shotcast.bench.progress import progress
from shotcast.collectives.communicator import Communicator
from shotcast.cost.collective import LinkCost
from shotcast.errors import ConfigError
from shotcast.hardware.detect import detect
from shotcast.launcher.spawn import spawn
from shotcast.planner.calibration import Calibration, Share
from shotcast.planner.cpu_rows import fit_rows
from shotcast.units import counted
from shotcast.wire import MAX_WORLD_SIZE

_DTYPE = "float32"
_SMALL, _LARGE = 1 << 10, 8 << 20
_MESSAGES = 20


class Machine(NamedTuple):
    """A CPU machine to calibrate."""

    calibration: Calibration  # the constants of its ranks
    cluster: str  # its description in YAML, one node whose "GPUs" are the ranks


def calibrate(ranks: int, shown: bool = False) -> Machine:
    """Measure this machine with ``ranks`` ranks busy at once, each on its share of the cores."""
    if not 1 <= ranks <= MAX_WORLD_SIZE:
        raise ConfigError(f"world size must be from 1 to {MAX_WORLD_SIZE} ranks, not {ranks}")
    points = [point for rank in spawn(cpu_kernels.measure, ranks, shown) for point in rank]
    (host,) = spawn(cpu_host.measure, 1, shown)
    with progress(1, shown) as advance:
        advance("messages between ranks")
        link, link_residual, copy_gbps = spawn(_link, ranks)[0]
    kinds = fit_rows(points)
    facts = detect()
    part = facts.cpu_model
    calibration = Calibration(
        part,
        kinds,
        link,
        link_residual,
        (f"{cpu_kernels.__name__}, {ranks} ranks",),
        kernels.of_layout("cpu", ranks),
        "cpu",
        _DTYPE,
        host=host,
        shares={ranks: Share(kinds, host)},
    )
    product = max((name for name in kinds if name.startswith("product@")), key=lambda name: int(name.partition("@")[2]))
    rows, cost = int(product.partition("@")[2]), kinds[product].cost
    flops = 2 * rows * cost.first_rate * 1e9 / 4  # a weight of 4 bytes has two operations a row
    cluster = f"""\
name: {part}, {counted(ranks, "rank")}
gpu:  # a rank
  name: {part}
  mem_bw: {copy_gbps * 1e9:.3e}  # bytes/s
  mem_capacity: {facts.memory_bytes // ranks}
  bfloat16_tc_flops: {flops:.3e}  # of products in {_DTYPE}
  source: measured by shotcast calibrate
node:
  num_gpus_per_node: {ranks}
  intra_node_bw: {link.bw_gbps * 1e9:.3e}
  source: measured by shotcast calibrate
"""
    return Machine(calibration, cluster)


def _link() -> tuple[LinkCost, float, float]:
    """Return the latency of a message between ranks, the spread of single messages, and the copy bandwidth in GB/s."""
    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    copies = [_timed_us(lambda: target.copy_(source)) for _ in range(8)]
    copy_gbps = source.numel() / median(copies) / 1e3
    with Communicator(device="cpu") as comm:
        if comm.world_size == 1:
            return LinkCost(0.0, 0.0, copy_gbps, copy_gbps), 0.0, copy_gbps
        small, large = (_message_us(comm, nbytes) for nbytes in (_SMALL, _LARGE))
        bw_gbps = (_LARGE - _SMALL) / max(1e-3, median(large) - median(small)) / 1e3
        middle = median(small)
        residual = median(abs(time_us / middle - 1) for time_us in small)
        return LinkCost(0.0, middle, bw_gbps, copy_gbps), residual, copy_gbps


def _message_us(comm: Communicator, nbytes: int) -> list[float]:
    """Return half the round-trip time between the first two ranks; other ranks do nothing."""
    data, times = torch.zeros(nbytes, dtype=torch.uint8), []

    def there_and_back() -> None:
        if comm.rank == 0:
            comm.send(data, 1)
            comm.recv(data, 1)
        elif comm.rank == 1:
            comm.recv(data, 0)
            comm.send(data, 0)

    for _ in range(_MESSAGES):
        comm.barrier()
        times.append(_timed_us(there_and_back) / 2)
    return times[2:]


def _timed_us(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e3
