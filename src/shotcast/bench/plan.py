"""What a benchmark of collectives measures."""

from __future__ import annotations

from dataclasses import dataclass

from shotcast import wire
from shotcast.bench import contenders
from shotcast.bench.work import WORKS
from shotcast.errors import ConfigError
from shotcast.units import align_up

MIN_CALLS = 5
"""Of a point and contender, timed."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure; picklable, as it travels to the ranks.

    Attributes:
        sizes: bytes of the whole tensor, ascending. A size is raised to what the ranks can share out evenly.
        algorithms: contenders; empty for all that are legal but those on request.
        iters: timed calls a point at most.
        budget_s: seconds of timed calls a point and contender; at least :data:`MIN_CALLS` calls are timed.
        timeout_s: seconds for all sizes at one world size; then the ranks are ended.
        hidden: elements of a row (a token), for fused operations and work between calls.
        between: the work that also is put between calls, ``gemm``; empty for none.
        inner: columns of the matrix product's left operand; 0 for hidden / ranks.
        host: measure the host's time rather than the calls'.
    """

    op: str
    device: str
    dtype: str
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...] = ()
    iters: int = 1000
    warmup_iters: int = 5
    check: bool = True
    eager: bool = False
    budget_s: float = 0.4
    timeout_s: float = 600.0
    progress: bool = False
    hidden: int = 0
    between: str = ""
    inner: int = 0
    host: bool = False

    def __post_init__(self) -> None:
        if self.op not in contenders.OPS:
            raise ConfigError(f"there is no benchmark of {self.op!r}; there are {', '.join(contenders.OPS)}")
        if self.dtype not in wire.REDUCIBLE:
            raise ConfigError(f"dtype {self.dtype!r} is not measured; choose from {', '.join(wire.REDUCIBLE)}")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device is cpu or cuda, not {self.device!r}")
        known = contenders.known(self.op, self.device)
        if unknown := [name for name in self.algorithms if name not in known]:
            raise ConfigError(
                f"unknown algorithms for {self.op} on {self.device}: {', '.join(unknown)}; known: {', '.join(known)}"
            )
        if self.between and self.between not in WORKS:
            raise ConfigError(f"there is no work {self.between!r} between calls; there is {', '.join(WORKS)}")
        if self.between and not self.op.startswith("all_reduce"):
            raise ConfigError(f"work between calls is measured for all-reduces, not for {self.op}")
        if self.between and self.host:
            raise ConfigError("host time is measured without work between calls")
        if self.host and self.eager:
            raise ConfigError("host time is that of eager calls already; eager would measure the GPU")
        if self.hidden < 0 or self.inner < 0 or (not self.hidden and (self.between or self._fused)):
            raise ConfigError(f"rows need a hidden size from 1 up (and an inner one), not {self.hidden}, {self.inner}")
        if self.iters < MIN_CALLS:
            raise ConfigError(f"a median needs at least {MIN_CALLS} timed calls, not {self.iters}")
        if self.warmup_iters < 0:
            raise ConfigError(f"warm-up calls cannot be negative: {self.warmup_iters}")
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError("message sizes start at 1 byte")

    @property
    def _fused(self) -> bool:
        return self.op in contenders.FUSED_OPS

    @property
    def measures(self) -> tuple[str, ...]:
        """What is measured of each contender."""
        return ("host",) if self.host else ("call", "between") if self.between else ("call",)

    def contenders(self) -> tuple[str, ...]:
        """Names in the order of the report. ``vendor`` is the library that stands there by its own name."""
        return self.algorithms or contenders.default(self.op, self.device)

    def nbytes(self, world_size: int) -> tuple[int, ...]:
        """Sizes that hold whole elements: whole rows, and equally many a rank where the tensor is shared out."""
        multiple = wire.DTYPES[self.dtype]
        if self._fused or self.between:
            multiple *= self.hidden
        elif self.op != "all_reduce":
            multiple *= world_size
        return tuple(dict.fromkeys(align_up(size, multiple) for size in self.sizes))
