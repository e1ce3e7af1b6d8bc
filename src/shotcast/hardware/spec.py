"""What a part can do on paper, and what a link does in fact."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What joins a GPU to the others of its node.

    Attributes:
        paper_bw_gbps: GB/s each way of one GPU to all others together. Data sheets add both ways.
        measured_bw_gbps: GB/s each way that copies reach, or None where nobody here measured.
        source: where the figures are from.
    """

    name: str
    paper_bw_gbps: float
    measured_bw_gbps: float | None
    source: str

    @property
    def usable_bw_gbps(self) -> float:
        """The measured figure where there is one, otherwise that of the data sheet."""
        return self.paper_bw_gbps if self.measured_bw_gbps is None else self.measured_bw_gbps


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One kind of GPU.

    Attributes:
        pattern: regular expression that the name reported by CUDA matches.
        memory_bytes: as sold, in decimal gigabytes; CUDA reports somewhat less as usable.
        memory_bw_gbps: GB/s of device memory.
        bf16_tflops: dense bfloat16 tensor-core throughput, without sparsity.
        multicast: the switch of its node offers multicast stores and in-switch reduction (NVLink SHARP).
        source: where the figures are from.
    """

    name: str
    pattern: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    memory_bw_gbps: float
    bf16_tflops: float
    link: LinkSpec
    multicast: bool
    source: str
