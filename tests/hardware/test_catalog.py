"""The catalog of GPUs, beside what CUDA said of those that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shotcast.hardware import catalog

DATA = Path(__file__).parent.parent.parent / "benchmarks" / "data"


@pytest.mark.parametrize(("result", "part"), [("h200/linear.json", "H200 SXM"), ("h100/engine_8b_x1.json", "H100 SXM")])
def test_memory_is_what_cuda_reports(result: str, part: str) -> None:
    """The gigabytes of data sheets are of 2^30 bytes; plans that take 10^9 leave 6% of a GPU unused."""
    seen = json.loads((DATA / result).read_text())["environment"]["gpus"][0]
    known = catalog.find(seen["name"])
    assert known is not None
    assert known.name == part
    assert known.memory_bytes == seen["memory_bytes"]


@pytest.mark.parametrize(("name", "sold"), [("NVIDIA A100-SXM4-80GB", 80), ("NVIDIA B200", 180)])
def test_memory_is_as_sold_where_cuda_was_not_asked(name: str, sold: int) -> None:
    known = catalog.find(name)
    assert known is not None
    assert known.memory_bytes == sold << 30


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H200 NVL", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"),
        *("NVIDIA H200 MIG 3g.71gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-80GB MIG 2g.20gb"),
    ],
)
def test_parts_with_other_memory_or_links_are_not_in_it(name: str) -> None:
    assert catalog.find(name) is None
