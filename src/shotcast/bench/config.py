"""Configuration of a collectives benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from shotcast import wire
from shotcast.bench import implementations
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
    nodes: int = 1  # the nodes that the ranks are on, equally many on each
    reduction: str = "sum"  # of operations that reduce

    def __post_init__(self) -> None:
        if self.op not in OPERATIONS:
            raise ConfigError(f"there is no benchmark of {self.op!r}; choose from {', '.join(OPERATIONS)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not measured; choose from {', '.join(DTYPES)}")
        if self.reduction not in REDUCTIONS:
            raise ConfigError(f"reduction {self.reduction!r} is not measured; choose from {', '.join(REDUCTIONS)}")
        if self.reduction != "sum" and not OPERATIONS[self.op].reduces:
            raise ConfigError(f"{self.op} takes no reduction")
        if self.reduction not in wire.REDUCED[self.dtype]:
            raise ConfigError(f"{self.reduction} of {self.dtype} is not measured")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device must be cpu or cuda, not {self.device!r}")
        known = implementations.known(self.op, self.device)
        if unknown := [name for name in self.algorithms if name not in known]:
            raise ConfigError(
                f"unknown algorithms for {self.op} on {self.device}: {', '.join(unknown)}; known: {', '.join(known)}"
            )
        if self.iters < MIN_CALLS:
            raise ConfigError(f"a median needs at least {MIN_CALLS} timed calls, not {self.iters}")
        if self.warmup_iters < 0:
            raise ConfigError(f"warm-up calls cannot be negative: {self.warmup_iters}")
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError("message sizes must be at least 1 byte")

    def implementations(self) -> tuple[str, ...]:
        """Return the implementation names in report order. ``vendor`` is listed under the name of the library."""
        return self.algorithms or implementations.default(self.op, self.device, self.nodes)

    def nbytes(self, world_size: int) -> tuple[int, ...]:
        """Return the sizes in whole elements, which are equal parts for each rank if the tensor is divided."""
        multiple = wire.DTYPES[self.dtype] * (world_size if OPERATIONS[self.op].divided else 1)
        return tuple(dict.fromkeys(align_up(size, multiple) for size in self.sizes))
