"""Measure a chain of products and messages, one after the other and at once, beside the vendor's library.

Each step multiplies matrices and communicates what the product wrote; the next product does not need that. (Where a
whole left operand is gathered, the product reads the message instead.) Every form is checked before it is timed. Then
the forms take turns in rounds; a time is the median of a rank's rounds, and then the maximum over the ranks.
``compute`` and ``communication`` run the products and the messages alone. The rate of overlap is the part of the
communication that a form hides:

    hidden = (sequential - form) / (sequential - compute)

and the ideal is the longer of products and messages alone, by the vendor's product on all SMs and the faster of the
library's and our messages.

A form that cannot run gives a row with the reason. :mod:`overlap_forms` adds forms of other libraries.
"""

from __future__ import annotations

import functools
import math
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch
from simulated_hosts.facts import HostsConfig

from overlap_bench import library, own
from overlap_bench.config import (
    ALONE,
    COMMUNICATION,
    COMPUTE,
    LIBRARY,
    LIBRARY_COMMUNICATION,
    LIBRARY_PLAIN,
    OWN,
    OverlapConfig,
)
from overlap_bench.form import Candidate, Form
from overlap_bench.library import Groups, Messages
from overlap_bench.result import Measured, OverlapRow
from overlap_bench.steps import Steps
from overlap_bench.times import times_of
from shotcast.collectives.communicator import MAX_WORKSPACE_MESSAGE, Communicator
from shotcast.errors import ConfigError, ShotcastError, UnsupportedError
from shotcast.launcher.spawn import spawn
from shotcast.overlap.chains import Chain
from shotcast.overlap.policy import PLAIN, SEQUENTIAL, Way, agreed, measure

Found = Iterator[tuple[str, Candidate]]
"""Forms, and whose they are."""
Finder = Callable[[Steps, Chain | None, Groups], Found]
Note = Callable[[str, bool], None]
_CLOSE = 0.05
"""The distance from the wanted time at which a size is good enough."""
_SMALLEST, _LARGEST = 64 << 10, 2 << 30


def run(config: OverlapConfig) -> Measured:
    """Start the ranks and measure.

    Raises:
        ConfigError: hosts cannot be simulated here.
        ShotcastError: a result of ours was wrong, or the simulated network lost packets.
    """
    if config.hosts is None:
        return spawn(measure_on_rank, config.world_size, config, timeout_s=config.timeout_s)[0]
    hosts = config.hosts
    with hosts.network() as network:
        found = network.run(measure_on_rank, hosts.ranks_per_host, config, timeout_s=config.timeout_s)
        network.check()
    return found[0]


def candidates(steps: Steps, chain: Chain | None, groups: Groups) -> Found:
    """Yield the forms that may run here, and whose they are."""
    yield from ((ALONE, one) for one in own.alone(steps))
    first = own.gathered_first(steps) if chain is None else own.of_chain(steps, chain)
    yield from ((OWN, one) for one in first)
    yield ALONE, library.alone(steps, groups)
    yield from ((LIBRARY, one) for one in library.forms(steps, groups))


def measure_on_rank(config: OverlapConfig, found: Finder = candidates, at: Note = lambda name, own: None) -> Measured:
    """Measure as one rank of several.

    Args:
        config: the setting.
        found: yields the forms.
        at: is told of what begins, and whether it is ours.
    """
    if config.device == "cpu":
        torch.set_num_threads(config.threads)
    room = MAX_WORKSPACE_MESSAGE if config.device == "cuda" else None
    with Communicator(device=config.device, max_bytes=room) as comm, torch.no_grad():
        return _measure(config, comm, found, at)


def _measure(config: OverlapConfig, comm: Communicator, found: Finder, at: Note) -> Measured:
    others = [comm.split(0) for _ in range(config.lanes - 1)]
    communicators = [comm, *(other for other in others if other is not None)]
    groups = Groups(config)
    at("the size of a message", True)
    nbytes, repeat = _balanced(config, comm, groups)
    mapped = functools.partial(_mapped, comm) if config.device == "cuda" else None
    steps = Steps(config, comm, nbytes, repeat, mapped)
    chain = None if config.gathers_first else own.chain_of(steps, communicators)
    forms: dict[str, Form] = {}
    owners: dict[str, str] = {}
    reasons: dict[str, str] = {}
    clocks = [_clocks(config.device)]
    for by, candidate in found(steps, chain, groups):
        owners[candidate.name] = by
        at(candidate.name, candidate.own)
        form, reason = _tried(comm, candidate)
        if form is None:
            reasons[candidate.name] = reason
        else:
            forms[candidate.name] = form
    if chain is not None:
        at("auto", True)
        chain()

    def noted(name: str, form: Form) -> Callable[[], None]:
        def run() -> None:
            at(name, owners[name] in (OWN, ALONE))
            form.run()

        return run

    times = times_of(comm, [Way(name, noted(name, form)) for name, form in forms.items()], config)
    clocks.append(_clocks(config.device))
    timelines = {}
    for name, form in forms.items():
        if form.timeline is not None:
            at(name, True)
            comm.barrier()
            timelines[name] = form.timeline()
    hosts = config.hosts or HostsConfig(1)
    rows = tuple(
        OverlapRow(
            way=name,
            op=config.op,
            device=config.device,
            dtype=config.dtype,
            world_size=comm.world_size,
            nbytes=steps.nbytes,
            gemm=config.gemm,
            repeat=repeat,
            steps=config.steps,
            lanes=config.lanes,
            nodes=hosts.hosts,
            delay_us=hosts.delay_us,
            time_us=times.get(name),
            compute_us=times[COMPUTE],
            communication_us=times[COMMUNICATION],
            sequential_us=times[SEQUENTIAL],
            plain_us=times[PLAIN],
            spans=tuple(map(asdict, timelines[name].spans)) if name in timelines else (),
            whole=config.whole,
            library_us=times.get(LIBRARY_COMMUNICATION),
            library_plain_us=times.get(LIBRARY_PLAIN),
            by=by,
            reason=reasons.get(name, ""),
        )
        for name, by in owners.items()
    )
    decision = "" if chain is None else str(chain.decision)
    if chain is not None:
        chain.close()
    for other in communicators[1:]:
        other.close()
    return Measured(rows, decision, tuple(clock for clock in clocks if clock))


def _mapped(comm: Communicator, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory of a message, which calls on few SMs read and write in place."""
    return comm.empty(count, dtype=dtype)


def _tried(comm: Communicator, candidate: Candidate) -> tuple[Form | None, str]:
    """Return a form whose results were right, or why there is none. Collective.

    Raises:
        ShotcastError: a result of ours was wrong, or a call of ours failed.
    """
    expected: tuple[type[Exception], ...] = (ConfigError, UnsupportedError) if candidate.own else (Exception,)
    form, reason = None, ""
    try:
        form = candidate.build()
        form.steps.load()
        form.run()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        comm.check()
    except expected as error:
        lines = [line[:150] for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])) if lines else '')}"
    if agreed(comm, [1.0 if reason else 0.0])[0] or form is None:
        return None, reason or "it failed on another rank"
    reason = form.wrong()
    if agreed(comm, [1.0 if reason else 0.0])[0]:
        if candidate.own:
            raise ShotcastError(f"{form.steps.config.op} by {candidate.name}: {reason or 'wrong on another rank'}")
        return None, reason or "wrong results on another rank"
    return form, ""


def _balanced(config: OverlapConfig, comm: Communicator, groups: Groups) -> tuple[int, int]:
    """Return the bytes of a message and the products of a step, of which one may fit the other's time."""
    if config.whole:
        return 0, config.repeat
    one = replace(config, steps=1)
    served = config.device == "cuda" and _served(comm, groups)

    def times(nbytes: int, repeat: int) -> tuple[float, float]:
        steps = Steps(one, comm, nbytes, repeat)
        ways = [Way("product", lambda: steps.multiply(0)), Way("message", lambda: steps.communicate(comm, 0))]
        if served:
            messages = Messages(steps, groups.of())
            ways.append(Way("library", lambda: messages.begin(0)()))
        found = measure(comm, ways, 5)
        return found["product"], min(found["message"], found.get("library", math.inf))

    if config.repeat == 0:
        _, message = times(config.nbytes, 1)
        product, _ = times(16, 8)  # several, as one is over before the clock of a busy core runs again
        return config.nbytes, max(1, round(message / (product / 8)))
    if config.nbytes:
        return config.nbytes, config.repeat
    nbytes = _SMALLEST
    for _ in range(12):
        product, message = times(nbytes, config.repeat)
        wanted = config.ratio * product
        if abs(message / wanted - 1) < _CLOSE:
            break
        nbytes = min(_LARGEST, max(1, int(nbytes * min(8.0, max(0.25, wanted / message)))))
    return nbytes, config.repeat


def _served(comm: Communicator, groups: Groups) -> bool:
    """Return whether NCCL serves these ranks; it refuses those that share a GPU. Collective."""
    try:
        torch.distributed.barrier(group=groups.of(), device_ids=[comm.device.index or 0])
        failed = 0.0
    except RuntimeError:
        failed = 1.0
    return not agreed(comm, [failed])[0]


def _clocks(device: str) -> str:
    """Return clocks and power of the GPUs as nvidia-smi says them; empty without it."""
    if device != "cuda":
        return ""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        return "; ".join(subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.splitlines())
    except OSError:
        return ""
