"""Configuration of a benchmark of fused operations, of work between calls, or of host time."""

from __future__ import annotations

from dataclasses import dataclass, fields

from call_modes import names
from call_modes.gemm import WORK_BETWEEN
from shotcast import wire
from shotcast.bench.config import BenchConfig
from shotcast.errors import ConfigError
from shotcast.units import align_up


@dataclass(frozen=True)
class ModeConfig(BenchConfig):
    """The points to measure. Picklable, since it is sent to the ranks."""

    hidden: int = 0  # elements of a row (a token), for fused operations and for work between calls
    between: str = ""  # work that is also put between calls: ``gemm``, or empty for none
    inner: int = 0  # columns of the matrix product's left operand; 0 for hidden / ranks
    host: bool = False  # measure the host time of a call instead of the call's own time

    def __post_init__(self) -> None:
        plain = {"op": "all_reduce"} if self.fused else {}
        given = {each.name: getattr(self, each.name) for each in fields(BenchConfig)}
        BenchConfig(**given | plain | {"algorithms": ()})
        known = names.known(self.op, self.device)
        if unknown := [name for name in self.algorithms if name not in known]:
            raise ConfigError(f"unknown algorithms for {self.op}: {', '.join(unknown)}; known: {', '.join(known)}")
        if (self.fused or self.between) and self.dtype not in wire.REDUCIBLE:
            raise ConfigError(f"norms and products are of {', '.join(wire.REDUCIBLE)}, not {self.dtype}")
        if names.NCCL_SYMMETRIC in self.algorithms and self.reduction != "sum":
            raise ConfigError(f"{names.NCCL_SYMMETRIC} adds up; leave it out for {self.reduction}")
        if self.fused and self.reduction != "sum":
            raise ConfigError(f"{self.op} takes no reduction")
        if self.between and self.between not in WORK_BETWEEN:
            raise ConfigError(f"there is no work {self.between!r} between calls; choose from {', '.join(WORK_BETWEEN)}")
        if self.between and not self.op.startswith("all_reduce"):
            raise ConfigError(f"work between calls is measured for all-reduces, not for {self.op}")
        if self.between and self.host:
            raise ConfigError("host time is measured without work between calls")
        if self.host and self.eager:
            raise ConfigError("host already measures eager calls; leave out eager, which would measure the GPU")
        if self.hidden < 0 or self.inner < 0 or (not self.hidden and (self.between or self.fused)):
            raise ConfigError(f"hidden must be at least 1 (and inner at least 0), not {self.hidden} and {self.inner}")

    @property
    def fused(self) -> bool:
        return self.op in names.FUSED_OPS

    @property
    def measures(self) -> tuple[str, ...]:
        return ("host",) if self.host else ("call", "between") if self.between else ("call",)

    def implementations(self) -> tuple[str, ...]:
        return self.algorithms or names.default(self.op, self.device, self.nodes)

    def nbytes(self, world_size: int) -> tuple[int, ...]:
        """Return the sizes in whole rows, or as those of plain calls where there are no rows."""
        if not (self.fused or self.between):
            return super().nbytes(world_size)
        row_bytes = wire.DTYPES[self.dtype] * self.hidden
        return tuple(dict.fromkeys(align_up(size, row_bytes) for size in self.sizes))
