"""Configuration of a collectives benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from shotcast import wire
from shotcast.bench import implementations
from shotcast.bench.gemm import WORK_BETWEEN
from shotcast.bench.operations import OPERATIONS
from shotcast.errors import ConfigError
from shotcast.units import align_up

DTYPES = (*wire.REDUCIBLE, "float64", "int8", "uint8", "int16", "int32", "int64")
REDUCTIONS = ("sum", "prod", "min", "max", "avg")
MIN_CALLS = 5
"""The minimum number of timed calls of an implementation at one point."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The points to measure. Picklable, since it is sent to the ranks."""

    op: str
    device: str
    dtype: str
    # bytes of the whole tensor, ascending. A size is rounded up to one that divides evenly among the ranks
    sizes: tuple[int, ...]
    # names of implementations; empty for all legal ones except those measured on request only
    algorithms: tuple[str, ...] = ()
    iters: int = 1000  # the largest number of timed calls at one point
    warmup_iters: int = 5
    check: bool = True
    eager: bool = False
    # seconds of timed calls for each implementation at one point; at least :data:`MIN_CALLS` calls are timed
    budget_s: float = 0.4
    timeout_s: float = 600.0  # seconds for all sizes at one world size; then the ranks are ended
    progress: bool = False
    hidden: int = 0  # elements of a row (a token), for fused operations and for work between calls
    between: str = ""  # work that is also put between calls: ``gemm``, or empty for none
    inner: int = 0  # columns of the matrix product's left operand; 0 for hidden / ranks
    host: bool = False  # measure the host time of a call instead of the call's own time
    nodes: int = 1  # the nodes that the ranks are on, equally many on each
    reduction: str = "sum"  # of operations that reduce

    def __post_init__(self) -> None:
        if self.op not in implementations.OPS:
            raise ConfigError(f"there is no benchmark of {self.op!r}; choose from {', '.join(implementations.OPS)}")
        if self.dtype not in (served := wire.REDUCIBLE if self._fused else DTYPES):
            raise ConfigError(f"dtype {self.dtype!r} is not measured; choose from {', '.join(served)}")
        if self.reduction not in REDUCTIONS:
            raise ConfigError(f"reduction {self.reduction!r} is not measured; choose from {', '.join(REDUCTIONS)}")
        if self.reduction != "sum" and (self._fused or not OPERATIONS[self.op].reduces):
            raise ConfigError(f"{self.op} takes no reduction")
        if self.reduction not in wire.REDUCED[self.dtype]:
            raise ConfigError(f"{self.reduction} of {self.dtype} is not measured")
        if self.between and self.dtype not in wire.REDUCIBLE:
            raise ConfigError(f"matrix products between calls are of {', '.join(wire.REDUCIBLE)}, not {self.dtype}")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device must be cpu or cuda, not {self.device!r}")
        known = implementations.known(self.op, self.device)
        if unknown := [name for name in self.algorithms if name not in known]:
            raise ConfigError(
                f"unknown algorithms for {self.op} on {self.device}: {', '.join(unknown)}; known: {', '.join(known)}"
            )
        if self.between and self.between not in WORK_BETWEEN:
            raise ConfigError(f"there is no work {self.between!r} between calls; choose from {', '.join(WORK_BETWEEN)}")
        if self.between and not self.op.startswith("all_reduce"):
            raise ConfigError(f"work between calls is measured for all-reduces, not for {self.op}")
        if self.between and self.host:
            raise ConfigError("host time is measured without work between calls")
        if self.host and self.eager:
            raise ConfigError("host already measures eager calls; leave out eager, which would measure the GPU")
        if self.hidden < 0 or self.inner < 0 or (not self.hidden and (self.between or self._fused)):
            raise ConfigError(f"hidden must be at least 1 (and inner at least 0), not {self.hidden} and {self.inner}")
        if self.iters < MIN_CALLS:
            raise ConfigError(f"a median needs at least {MIN_CALLS} timed calls, not {self.iters}")
        if self.warmup_iters < 0:
            raise ConfigError(f"warm-up calls cannot be negative: {self.warmup_iters}")
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError("message sizes must be at least 1 byte")

    @property
    def _fused(self) -> bool:
        return self.op in implementations.FUSED_OPS

    @property
    def measures(self) -> tuple[str, ...]:
        return ("host",) if self.host else ("call", "between") if self.between else ("call",)

    def implementations(self) -> tuple[str, ...]:
        """Return the implementation names in report order. ``vendor`` is listed under the name of the library."""
        return self.algorithms or implementations.default(self.op, self.device, self.nodes)

    def nbytes(self, world_size: int) -> tuple[int, ...]:
        """Return the sizes in whole elements: whole rows, or equal parts for each rank if the tensor is divided."""
        multiple = wire.DTYPES[self.dtype]
        if self._fused or self.between:
            multiple *= self.hidden
        elif OPERATIONS[self.op].divided:
            multiple *= world_size
        return tuple(dict.fromkeys(align_up(size, multiple) for size in self.sizes))
