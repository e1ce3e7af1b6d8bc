"""Known GPUs. Each figure names its source; throughput is dense, and link bandwidth is for one direction.

Data sheets count memory in gigabytes of 2^30 bytes: an H200 of 141 GB has 150.1e9 bytes that CUDA can use, and 141 GiB
is 151.4e9. Bandwidths and throughputs are decimal.
"""

from __future__ import annotations

import re
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


NVLINK_3 = LinkSpec("NVLink 3", 300.0, None, "A100 data sheet: 600 GB/s both ways together")
NVLINK_4_H100 = LinkSpec("NVLink 4", 450.0, None, "H100 data sheet: 900 GB/s both ways together")
NVLINK_4_H200 = LinkSpec(
    "NVLink 4", 450.0, 378.0, "H200 data sheet: 900 GB/s both ways together; peer copies measured on 4 H200 SXM"
)
NVLINK_5 = LinkSpec("NVLink 5", 900.0, None, "DGX B200 data sheet: 14.4 TB/s for 8 GPUs, both ways together")

CATALOG = (
    GpuSpec(
        name="A100 SXM 80 GB",
        pattern=r"A100-SXM.*80GB",
        compute_capability=(8, 0),
        memory_bytes=80 << 30,
        memory_bw_gbps=2039.0,
        bf16_tflops=312.0,
        fp8_tflops=None,
        link=NVLINK_3,
        source="NVIDIA A100 Tensor Core GPU data sheet",
    ),
    GpuSpec(
        name="H100 SXM",
        # The PCIe card and the NVL pair have other memory and links.
        pattern=r"H100 80GB HBM3|H100 SXM",
        compute_capability=(9, 0),
        memory_bytes=85_017_493_504,  # as CUDA reports it (benchmarks/data/h100)
        memory_bw_gbps=3350.0,
        bf16_tflops=989.5,  # 1,979 with sparsity
        fp8_tflops=1979.0,  # 3,958 with sparsity
        link=NVLINK_4_H100,
        source="NVIDIA H100 Tensor Core GPU data sheet",
    ),
    GpuSpec(
        name="H200 SXM",
        pattern=r"(?<!G)H200(?! NVL)",
        compute_capability=(9, 0),
        memory_bytes=150_109_880_320,  # as CUDA reports it (benchmarks/data/h200)
        memory_bw_gbps=4800.0,
        bf16_tflops=989.5,  # 1,979 with sparsity
        fp8_tflops=1979.0,  # 3,958 with sparsity
        link=NVLINK_4_H200,
        source="NVIDIA H200 Tensor Core GPU data sheet",
    ),
    GpuSpec(
        name="B200",
        pattern=r"(?<!G)B200",
        compute_capability=(10, 0),
        memory_bytes=180 << 30,
        memory_bw_gbps=8000.0,
        bf16_tflops=2250.0,
        fp8_tflops=4500.0,
        link=NVLINK_5,
        source="NVIDIA DGX B200 data sheet (1,440 GB and 64 TB/s for 8 GPUs); Blackwell architecture brief (TFLOPS)",
    ),
)


def find(device_name: str) -> GpuSpec | None:
    """Return the GPU that CUDA calls ``device_name``, such as ``"NVIDIA H200"``; None if it is not in the catalog.

    The catalog lacks slices of a GPU, such as ``"NVIDIA H200 MIG 3g.71gb"``.
    """
    if " MIG " in device_name:
        return None
    for spec in CATALOG:
        if re.search(spec.pattern, device_name):
            return spec
    return None
