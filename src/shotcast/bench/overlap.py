"""The benchmark of overlap: a chain of products and messages, one after the other and at once, beside the library's.

Each step multiplies matrices and communicates a message that the next product does not need. Ways to run the chain
take turns in rounds; a time is the median of a rank's rounds, and then the maximum over the ranks. ``compute`` and
``communication`` run the products and the messages alone. The rate of overlap is the part of the communication that a
way hides:

    hidden = (sequential - way) / (sequential - compute)

and the ideal is the longer of products and messages alone.
"""

from __future__ import annotations

import datetime
import json
import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shotcast.bench.hosts.measure import HostsConfig
from shotcast.bench.hosts.network import SimulatedHosts
from shotcast.collectives.communicator import MAX_WORKSPACE_MESSAGE, Communicator
from shotcast.errors import ConfigError, ShotcastError
from shotcast.launcher.spawn import spawn
from shotcast.overlap.chains import Chain
from shotcast.overlap.policy import PLAIN, ROUNDS, SEQUENTIAL, Way, agreed, measure
from shotcast.units import align_up

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
COMPUTE, COMMUNICATION = "compute", "communication"
LIBRARY, LIBRARY_PLAIN, LIBRARY_PRIORITY = "library", "library plain", "library priority"
GEMMS = {"cuda": (8192, 8192, 8192), "cpu": (256, 256, 256)}
_BALANCED = 0.05
_SMALLEST = 64 << 10


@dataclass(frozen=True, slots=True)
class OverlapConfig:
    """The setting of a measurement.

    Attributes:
        op: the operation of the messages.
        device, dtype, world_size: of the ranks.
        nbytes: the bytes of a message (of an all_gather: of its result); 0 for as many as take the time of the products
            of a step.
        gemm: rows, columns and depth of a product.
        repeat: products of a step; 0 for as many as take the time of a message.
        steps: products and messages.
        lanes: messages that may be under way at once, on CPU ranks.
        rounds: measurements of each way.
        seconds: the least time of a measurement, for which a way is repeated.
        threads: threads of each CPU rank.
        sms: on GPUs, numbers of SMs that our messages are given, and that products leave.
        hosts: simulated hosts of CPU ranks.
        timeout_s: the limit for the ranks.
    """

    op: str
    device: str
    dtype: str
    world_size: int
    nbytes: int
    gemm: tuple[int, int, int]
    repeat: int
    steps: int = 8
    lanes: int = 1
    rounds: int = ROUNDS
    seconds: float = 0.2
    threads: int = 1
    sms: tuple[int, ...] = ()
    hosts: HostsConfig | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ConfigError(f"overlap is measured with {', '.join(OPS)}, not {self.op!r}")
        if self.nbytes == 0 and self.repeat == 0:
            raise ConfigError("give the size of a message or the number of products of a step: one fits the other")
        if min(self.steps, self.lanes, self.rounds, self.threads, *self.gemm) < 1 or self.nbytes < 0 or self.repeat < 0:
            raise ConfigError("steps, lanes, rounds, threads and the sides of a product are 1 or more")
        if self.device == "cuda" and (self.lanes > 1 or self.hosts is not None):
            raise ConfigError("on GPUs there is one lane of communication, and hosts are not simulated")


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """One way to run the chain.

    Attributes:
        way: its name.
        time_us: its time, of the slowest rank.
        compute_us, communication_us, sequential_us, plain_us: the times of products alone, of messages alone, of one
            after the other, and of our plain overlap.
        spans: when each step ran in one run on rank 0; empty where that is not known.
    """

    way: str
    op: str
    device: str
    dtype: str
    world_size: int
    nbytes: int
    gemm: tuple[int, int, int]
    repeat: int
    steps: int
    lanes: int
    nodes: int
    delay_us: float
    time_us: float
    compute_us: float
    communication_us: float
    sequential_us: float
    plain_us: float
    spans: tuple[dict[str, Any], ...] = ()

    @property
    def ideal_us(self) -> float:
        """The longer of products and messages alone."""
        return max(self.compute_us, self.communication_us)

    @property
    def hidden(self) -> float:
        """The part of the communication that products hide."""
        exposed = self.sequential_us - self.compute_us
        return (self.sequential_us - self.time_us) / exposed if exposed > 0 else math.nan


@dataclass(frozen=True, slots=True)
class Measured:
    """The rows of one configuration, and what ``auto`` decided there."""

    rows: tuple[OverlapRow, ...]
    decision: str
    clocks: tuple[str, ...] = ()


def run(config: OverlapConfig) -> Measured:
    """Start the ranks and measure.

    Raises:
        ConfigError: hosts cannot be simulated here.
        ShotcastError: a result was wrong, or the simulated network lost packets.
    """
    if config.hosts is None:
        found: list[Measured] = spawn(measure_on_rank, config.world_size, config, timeout_s=config.timeout_s)
        return found[0]
    hosts = config.hosts
    with SimulatedHosts(hosts.hosts, delay_us=hosts.delay_us, bandwidth_gbps=hosts.bandwidth_gbps) as network:
        found = network.run(measure_on_rank, hosts.ranks_per_host, config, timeout_s=config.timeout_s)
        network.check()
    return found[0]


class _Steps:
    """The products and messages of a rank."""

    def __init__(self, config: OverlapConfig, comm: Communicator, nbytes: int, repeat: int):
        self.config, self.comm, self.repeat = config, comm, repeat
        self._dtype = getattr(torch, config.dtype)
        rows, columns, depth = config.gemm
        generator = torch.Generator(comm.device).manual_seed(1 + comm.rank)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=comm.device).to(self._dtype)

        self._a, self._b = random(rows, depth), random(depth, columns)
        self._c = torch.empty(rows, columns, dtype=self._dtype, device=comm.device)
        unit = 16 * comm.world_size
        self.nbytes = max(unit, align_up(nbytes, unit))
        count = self.nbytes // self._a.element_size()
        part = count // comm.world_size
        sent = part if config.op == "all_gather" else count
        received = part if config.op == "reduce_scatter" else count
        self._sent = [random(sent) for _ in range(config.steps)]
        self._received = [self._sent[0].new_empty(received) for _ in range(config.steps)]

    def product(self) -> None:
        for _ in range(self.repeat):
            torch.mm(self._a, self._b, out=self._c)

    def computations(self) -> list[Callable[[], int]]:
        def computation(number: int) -> Callable[[], int]:
            def compute() -> int:
                self.product()
                return number

            return compute

        return [computation(number) for number in range(self.config.steps)]

    def communicate(self, comm: Communicator, number: int, sms: int | None = None) -> None:
        getattr(comm, self.config.op)(self._sent[number], out=self._received[number], sms=sms)

    def communicate_all(self, comm: Communicator) -> None:
        for number in range(self.config.steps):
            self.communicate(comm, number)

    def forget(self) -> None:
        """Overwrite the last results."""
        for received in self._received:
            received.fill_(float("nan"))

    def right(self) -> bool:
        """Return whether the last results are those that copies or a sum in float64 give, but for rounding."""
        world, op = self.comm.world_size, self.config.op
        for sent, received in zip(self._sent, self._received, strict=True):
            whole = self.comm.all_gather(sent).view(world, -1)
            if op == "all_gather":
                good = torch.equal(received, whole.view(-1))
            elif op == "all_to_all":
                good = torch.equal(received, whole.view(world, world, -1)[:, self.comm.rank].reshape(-1))
            else:
                total, size = whole.double().sum(0), whole.double().abs().sum(0)
                if op == "reduce_scatter":
                    total, size = (x.view(world, -1)[self.comm.rank] for x in (total, size))
                unit = torch.finfo(self._dtype).eps
                good = bool(((received.double() - total).abs() <= world * unit * size).all())
            if not good:
                return False
        return True

    def library(self, number: int, group: dist.ProcessGroup | None) -> Any:
        """Begin a message by the library; it may overwrite what it reads."""
        sent, received = self._sent[number], self._received[number]
        if self.config.op == "all_reduce":
            average = dist.ReduceOp.AVG if self.config.device == "cuda" else dist.ReduceOp.SUM
            return dist.all_reduce(received, average, group=group, async_op=True)
        if self.config.op == "all_gather":
            return dist.all_gather_into_tensor(received, sent, group=group, async_op=True)
        if self.config.op == "reduce_scatter":
            return dist.reduce_scatter_tensor(received, sent, group=group, async_op=True)
        return dist.all_to_all_single(received, sent, group=group, async_op=True)

    def by_library(self, overlap: bool, group: dist.ProcessGroup | None) -> None:
        under_way = []
        for number in range(self.config.steps):
            self.product()
            under_way.append(self.library(number, group))
            if not overlap:
                under_way.pop().wait()
        for one in under_way:
            one.wait()


def measure_on_rank(config: OverlapConfig) -> Measured:
    """Measure as one rank of several."""
    if config.device == "cpu":
        torch.set_num_threads(config.threads)
    room = MAX_WORKSPACE_MESSAGE if config.device == "cuda" else None
    with Communicator(device=config.device, max_bytes=room) as comm, torch.no_grad():
        others = [comm.split(0) for _ in range(config.lanes - 1)]
        communicators = [comm, *(other for other in others if other is not None)]
        nbytes, repeat = _balanced(config, comm)
        steps = _Steps(config, comm, nbytes, repeat)
        chain = Chain(communicators, steps.computations(), steps.communicate, "auto", config.sms)
        clocks = [_clocks(config.device)]
        for way in chain.ways():
            steps.forget()
            way.run()
            if agreed(comm, [0.0 if steps.right() else 1.0])[0]:
                raise ShotcastError(f"{config.op} by {way.name} gave a wrong result")
        chain()
        ways = [
            Way(COMPUTE, lambda: [compute() for compute in steps.computations()]),
            Way(COMMUNICATION, lambda: steps.communicate_all(comm)),
            *chain.ways(),
            *_library_ways(config, comm, steps),
        ]
        times = _times(comm, ways, config)
        clocks.append(_clocks(config.device))
        timelines = {}
        for way in chain.ways():
            comm.barrier()
            timelines[way.name] = chain.timed(way.name)[1]
        chain.close()
        for other in communicators[1:]:
            other.close()
    hosts = config.hosts or HostsConfig(1)
    rows = tuple(
        OverlapRow(
            name,
            config.op,
            config.device,
            config.dtype,
            comm.world_size,
            steps.nbytes,
            config.gemm,
            repeat,
            config.steps,
            config.lanes,
            hosts.hosts,
            hosts.delay_us,
            time_us,
            times[COMPUTE],
            times[COMMUNICATION],
            times[SEQUENTIAL],
            times[PLAIN],
            tuple(timelines[name].as_json()) if name in timelines else (),
        )
        for name, time_us in times.items()
    )
    return Measured(rows, str(chain.decision), tuple(clock for clock in clocks if clock))


def _times(comm: Communicator, ways: Sequence[Way], config: OverlapConfig) -> dict[str, float]:
    """Return the time of each way, repeated for long enough."""
    once = measure(comm, ways, 1)
    repeats = {name: max(1, math.ceil(config.seconds * 1e6 / time_us)) for name, time_us in once.items()}

    def sustained(way: Way) -> Callable[[], None]:
        def repeated() -> None:
            for _ in range(repeats[way.name]):
                way.run()

        return repeated

    times = measure(comm, [Way(way.name, sustained(way)) for way in ways], config.rounds)
    return {name: time_us / repeats[name] for name, time_us in times.items()}


def _balanced(config: OverlapConfig, comm: Communicator) -> tuple[int, int]:
    """Return the bytes of a message and the products of a step, of which one may fit the other's time."""
    one = replace(config, steps=1)

    def times(nbytes: int, repeat: int) -> tuple[float, float]:
        steps = _Steps(one, comm, nbytes, repeat)
        ways = [Way("product", steps.product), Way("message", lambda: steps.communicate(comm, 0))]
        found = measure(comm, ways, 5)
        return found["product"], found["message"]

    if config.repeat == 0:
        _, message = times(config.nbytes, 1)
        product, _ = times(16, 8)  # several, as one is over before the clock of a busy core runs again
        return config.nbytes, max(1, round(message / (product / 8)))
    if config.nbytes:
        return config.nbytes, config.repeat
    nbytes = _SMALLEST
    for _ in range(12):
        product, message = times(nbytes, config.repeat)
        if abs(message / product - 1) < _BALANCED:
            break
        nbytes = min(MAX_WORKSPACE_MESSAGE, int(nbytes * min(8.0, max(0.25, product / message))))
    return nbytes, config.repeat


def _library_ways(config: OverlapConfig, comm: Communicator, steps: _Steps) -> list[Way]:
    """Return the ways of the library that serve this operation on this device."""
    cuda = config.device == "cuda"
    group = dist.new_group(backend="nccl" if cuda else "gloo")
    try:
        steps.library(0, group).wait()
        served = 0.0
    except RuntimeError:
        served = 1.0
    if agreed(comm, [served])[0]:
        return []
    ways = [
        Way(LIBRARY, lambda: steps.by_library(False, group)),
        Way(LIBRARY_PLAIN, lambda: steps.by_library(True, group)),
    ]
    if cuda:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        urgent = dist.new_group(backend="nccl", pg_options=options)
        ways.append(Way(LIBRARY_PRIORITY, lambda: steps.by_library(True, urgent)))
    return ways


def _clocks(device: str) -> str:
    """Return clocks and power of the GPUs as nvidia-smi says them; empty without it."""
    if device != "cuda":
        return ""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        return "; ".join(subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.splitlines())
    except OSError:
        return ""


def document(measured: Sequence[Measured], environment: dict[str, Any], command: str, kernels: dict[str, str]) -> str:
    """Return results as JSON, with where, how and by which kernels they were measured."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = {"date": now, "command": command, "environment": environment, "kernels": kernels}
    rows = [asdict(row) | {"measurement": number} for number, one in enumerate(measured) for row in one.rows]
    choices = [{"decision": one.decision, "clocks": one.clocks} for one in measured]
    return json.dumps(result | {"measurements": choices, "rows": rows}, indent=1) + "\n"


def read(path: Path) -> tuple[Measured, ...]:
    """Return the results of a file written by :func:`document`.

    Raises:
        ConfigError: it is another file.
    """
    try:
        found = json.loads(path.read_text())
        rows: list[list[OverlapRow]] = [[] for _ in found["measurements"]]
        for row in found["rows"]:
            rows[row.pop("measurement")].append(_row(row))
        return tuple(
            Measured(tuple(each), one["decision"], tuple(one["clocks"]))
            for each, one in zip(rows, found["measurements"], strict=True)
        )
    except (OSError, UnicodeDecodeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path} is not a result of shotcast bench overlap: {error}") from error


def _row(row: dict[str, Any]) -> OverlapRow:
    return OverlapRow(**row | {"gemm": tuple(row["gemm"]), "spans": tuple(row["spans"])})
