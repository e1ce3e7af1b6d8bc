"""Specifications of GPUs and links: data-sheet figures, and measured link bandwidths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The link between a GPU and the other GPUs of its node."""

    name: str
    paper_bw_gbps: float  # GB/s in each direction, from one GPU to all others together. Data sheets add both directions
    measured_bw_gbps: float | None  # GB/s in each direction that copies reach; None if it was not measured here
    source: str  # of the figures

    @property
    def usable_bw_gbps(self) -> float:
        """The measured bandwidth if there is one, otherwise the data sheet's."""
        return self.paper_bw_gbps if self.measured_bw_gbps is None else self.measured_bw_gbps


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A GPU model."""

    name: str
    pattern: str  # a regular expression that matches the name reported by CUDA
    compute_capability: tuple[int, int]
    memory_bytes: int  # as CUDA reports it; where that was not seen, as sold, of which CUDA reports about 1% less
    memory_bw_gbps: float  # GB/s of device memory
    bf16_tflops: float  # dense bfloat16 tensor-core throughput, without sparsity
    fp8_tflops: float | None  # the same of FP8; None where the GPU has no such units
    link: LinkSpec
    source: str  # of the figures
