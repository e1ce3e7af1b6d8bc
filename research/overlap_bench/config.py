"""The setting of a measurement of overlap, and the names of what every measurement has."""

from __future__ import annotations

from dataclasses import dataclass

from simulated_hosts.facts import HostsConfig

from shotcast.errors import ConfigError
from shotcast.overlap.policy import ROUNDS

REDUCE_SCATTER_ALL_GATHER = "reduce_scatter_all_gather"
OPS = ("all_reduce", "reduce_scatter", REDUCE_SCATTER_ALL_GATHER, "all_gather", "all_to_all")
WHOLE_OPS = ("all_reduce", "reduce_scatter", "all_gather")
COMPUTE, COMMUNICATION, LIBRARY_COMMUNICATION = "compute", "communication", "library communication"
LIBRARY, LIBRARY_PLAIN, LIBRARY_PRIORITY = "library", "library plain", "library priority"
ALONE, OWN = "alone", "own"
GEMMS = {"cuda": (8192, 8192, 8192), "cpu": (256, 256, 256)}


@dataclass(frozen=True, slots=True)
class OverlapConfig:
    """The setting of a measurement.

    Attributes:
        op: the operation of the messages.
        device, dtype, world_size: of the ranks.
        nbytes: the bytes of a message (of an all_gather: of its result); 0 for as many as take ``ratio`` times the time
            of the products of a step.
        gemm: rows, columns and depth of a product.
        repeat: products of a step; 0 for as many as take the time of a message.
        steps: products and messages.
        ratio: the time of a message over that of the products of a step, where its size is chosen by the time.
        whole: the message is a matrix of the product: its result, or the left operand where the message is gathered.
        lanes: messages that may be under way at once, on CPU ranks.
        rounds: measurements of each form.
        seconds: the least time of a measurement, for which a form is repeated.
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
    ratio: float = 1.0
    whole: bool = False
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
        if self.nbytes == 0 and self.repeat == 0 and not self.whole:
            raise ConfigError("give the size of a message or the number of products of a step: one fits the other")
        if min(self.steps, self.lanes, self.rounds, self.threads, *self.gemm) < 1 or self.nbytes < 0 or self.repeat < 0:
            raise ConfigError("steps, lanes, rounds, threads and the sides of a product are 1 or more")
        if self.ratio <= 0:
            raise ConfigError(f"the time of a message over that of products is above 0, not {self.ratio}")
        if self.device == "cuda" and (self.lanes > 1 or self.hosts is not None):
            raise ConfigError("on GPUs there is one lane of communication, and hosts are not simulated")
        if self.whole and (self.op not in WHOLE_OPS or self.nbytes or self.repeat != 1):
            raise ConfigError(f"a whole matrix of one product is the message of {', '.join(WHOLE_OPS)}; with its size")
        if self.whole and self.gemm[0] % self.world_size:
            raise ConfigError(f"{self.gemm[0]} rows are not divisible among {self.world_size} ranks")

    @property
    def gathers_first(self) -> bool:
        """True if a product reads its message, instead of writing it."""
        return self.whole and self.op == "all_gather"
