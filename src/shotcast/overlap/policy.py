"""The overlap policy: how to run work that could overlap, from measurements, and why.

Overlap can lose: communication takes cores or multiprocessors from computation. So all modes and the sequential one are
measured, and nothing more than 2% slower than the best of them is chosen.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shotcast.collectives.communicator import Communicator
from shotcast.collectives.started import tensors_in
from shotcast.errors import ConfigError
from shotcast.hardware.detect import available_cores
from shotcast.overlap.lanes import one_hardware_queue
from shotcast.overlap.schedule import Schedule

logger = logging.getLogger(__name__)

ROUNDS = 5
"""The number of measurement rounds, each of which runs every mode once; the median counts."""
WORTH = 1.01
"""The ratio of times from which overlap is used; noise is below it."""

AUTO, SEQUENTIAL, PLAIN = "auto", "sequential", "plain"
"""Mode names: measure all; a product, then a collective; both at once."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to do some work; all ways give the same results."""

    name: str  # the same on all ranks
    run: Callable[[], Any]  # does it once. Every rank calls it


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen mode and the reason. It is the same on all ranks.

    Attributes:
        way: the name of the chosen mode.
        why: the reason, in words.
        median_us: the median time of each measured mode, on the slowest rank.
        left_out: why other modes were not measured.
    """

    way: str
    why: str
    median_us: Mapping[str, float]
    left_out: Mapping[str, str]

    def __str__(self) -> str:
        measured = ", ".join(f"{name} {time_us:.0f}" for name, time_us in self.median_us.items())
        text = f"{self.way}: {self.why}"
        if measured:
            text += f"; measured us: {measured}"
        if self.left_out:
            text += "; not measured: " + ", ".join(f"{name} ({why})" for name, why in self.left_out.items())
        return text


def agreed(comm: Communicator, values: Sequence[float]) -> list[float]:
    """Return the maximum over all ranks of each value. Collective."""
    own = torch.tensor(values, dtype=torch.float64, device=comm.device)
    return [float(value) for value in comm.all_gather(own).view(comm.world_size, -1).amax(0)]


def agree_on(comm: Communicator, plan: Schedule, *settings: object) -> None:
    """Raise ConfigError on all ranks unless all have this schedule and these settings. Collective.

    Otherwise ranks would make their calls in different orders. ``settings`` are further facts that determine the calls;
    they are compared as text.
    """
    digest = hashlib.sha256(repr((plan.digest, *settings)).encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:8]) >> 1], dtype=torch.int64, device=comm.device)
    digests = [int(digest) for digest in comm.all_gather(own)]
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ConfigError(
            f"ranks {others} overlap by another schedule than rank 0; steps, their order, way and sms must be equal"
        )


def decide(comm: Communicator, ways: Sequence[Way], checked: Collection[str] = ()) -> Decision:
    """Choose among ``ways``. Collective: every rank passes the same ones, and each runs several times.

    Args:
        comm: the communicator, which nothing else may use meanwhile.
        ways: the first is the sequential one.
        checked: the names of ways to compare with the sequential one before measuring. A way whose results (the tensors
            that ``run`` returns) have different bits on any rank is dropped.

    Raises:
        ConfigError: the first way is not the sequential one.
    """
    if not ways or ways[0].name != SEQUENTIAL:
        raise ConfigError("the first way is the sequential one")
    left_out, chosen = dict[str, str](), list(ways)
    for name in _different(comm, [way for way in chosen if way.name in (SEQUENTIAL, *checked)]):
        chosen = [way for way in chosen if way.name != name]
        left_out[name] = "its results differ from those one after the other"
        logger.error("overlap: way %r is left out, as its results differ from those one after the other", name)
    median_us = measure(comm, chosen)
    name, why = _choose(comm, median_us)
    return Decision(name, why, median_us, left_out)


def _different(comm: Communicator, ways: Sequence[Way]) -> list[str]:
    """Return the names of ways whose results differ in bits from the first one's on any rank. Collective."""
    if len(ways) < 2:
        return []
    wanted = [tensor.clone() for tensor in tensors_in(ways[0].run())]  # a way may write into the tensors of another
    differ = []
    for way in ways[1:]:
        found = list(tensors_in(way.run()))
        differ.append(float(len(found) != len(wanted) or not all(map(_same_bits, found, wanted))))
    return [way.name for way, differs in zip(ways[1:], agreed(comm, differ), strict=True) if differs]


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    bits = (one.contiguous().view(-1).view(torch.uint8) for one in (x, y))  # NaN equals NaN
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(*bits)


def measure(comm: Communicator, ways: Sequence[Way], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median time of each way in microseconds, on the slowest rank. Collective.

    Ways take turns, so disturbances affect all of them; each begins a round in turn.
    """
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for way in ways:  # kernels compile, memory is allocated
        way.run()
    for number in range(rounds):
        first = number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            times[way.name].append(_time_us(comm, way.run))
    medians = agreed(comm, [statistics.median(times[way.name]) for way in ways])
    return {way.name: time_us for way, time_us in zip(ways, medians, strict=True)}


def _time_us(comm: Communicator, run: Callable[[], Any]) -> float:
    comm.barrier()
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    began = time.perf_counter_ns()
    run()
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    return (time.perf_counter_ns() - began) / 1e3


def _choose(comm: Communicator, median_us: Mapping[str, float]) -> tuple[str, str]:
    best = min(median_us, key=lambda name: median_us[name])
    sequential = median_us[SEQUENTIAL]
    gain = 1 - median_us[best] / sequential if sequential > 0 else 0.0
    if best != SEQUENTIAL and median_us[best] * WORTH <= sequential:
        return best, f"{gain:.0%} less time than one after the other"
    why = "no overlap pays"
    if best != SEQUENTIAL:
        why = f"overlap gains {gain:.1%} at most, which is not worth it"
    if reason := _reason_against_overlap(comm):
        why += f"; {reason}"
    return SEQUENTIAL, why


def _reason_against_overlap(comm: Communicator) -> str:
    """Return why communication cannot run during computation here; empty if nothing prevents it."""
    if comm.device.type == "cuda":
        return one_hardware_queue()
    layout = comm.topology.layout
    ranks, threads = len(layout.members[layout.node_of(comm.rank)]), torch.get_num_threads()
    cores = available_cores()
    if ranks * threads >= cores:
        return f"{ranks} ranks on this node compute with {threads} threads each, and there are {cores} cores"
    return ""
