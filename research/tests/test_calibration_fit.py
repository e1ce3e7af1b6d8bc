"""The fit of a GPU's calibration: constants that made the rows are found, and what rows must have."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gpu_calibration.fit import KERNELS_FILE, calibrate, fit_kinds, host_cost, kernel_point
from gpu_calibration.least_squares import KernelPoint
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.cost.inference import HostCost, KernelCost, KernelWork, product, sustained_kind
from shotcast.errors import ConfigError
from shotcast.hardware import catalog
from shotcast.planner.calibration import load

RESULTS = Path(__file__).parents[2] / "benchmarks" / "data" / "h200"
H200 = catalog.find("NVIDIA H200")


def host_rows(cost: HostCost, eager_us: float = 900.0) -> list[dict[str, Any]]:
    """Return the rows of a host by its constants; steps without graphs take ``eager_us`` and their layers besides."""
    steps = [(number, number) for number in (1, 8, 64, 256)] + [(1, tokens) for tokens in (16, 128, 512, 2048)]
    rows = []
    for layers, graphs, (sequences, tokens) in itertools.product((2, 8, 30), (True, False), steps):
        begins = int(tokens > sequences)
        time_us = cost.time_us(sequences, tokens, begins, 0 if graphs else layers) + (0 if graphs else eager_us)
        row = {"kernel": "host", "graphs": graphs, "layers": layers, "sequences": sequences, "rows": tokens}
        rows.append(row | {"us": time_us})
    for tokens in (16, 512):
        time_us = cost.time_us(1, tokens, 1) + cost.client_us
        rows.append({"kernel": "first_token", "layers": 2, "prompt": tokens, "us": time_us})
    return rows


@settings(max_examples=30)
@given(
    st.floats(10, 500), st.floats(0.1, 9), st.floats(0.01, 1), st.floats(1, 600), st.floats(5, 500), st.floats(0, 900)
)
def test_the_host_is_found(
    fixed_us: float, sequence_us: float, row_us: float, layer_us: float, request_us: float, client_us: float
) -> None:
    known = HostCost(fixed_us, sequence_us, row_us, True, "x", layer_us, request_us, client_us)
    found = host_cost(host_rows(known))
    for name in ("fixed_us", "per_sequence_us", "per_row_us", "per_layer_us", "per_request_us", "client_us"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-5, abs=1e-5), name
    assert (found.hidden, found.source) == (True, "steps of a small model")


def test_a_host_is_not_below_zero() -> None:
    rows = host_rows(HostCost(50.0, 2.0, 0.0, True, "x", 10.0, 100.0, 0.0))
    for row in rows:
        row["us"] *= 0.7 if row.get("rows") == 2048 or row["kernel"] == "first_token" else 1.0
    found = host_cost(rows)
    assert found.per_row_us == found.client_us == 0.0
    assert found.fixed_us > 0


@pytest.mark.parametrize("without", ["graphs", "eager", "prompts"])
def test_a_host_needs_steps_of_every_kind(without: str) -> None:
    rows = host_rows(HostCost(50.0, 2.0, 0.1, True, "x", 10.0, 100.0, 0.0))
    left_out = {
        "graphs": lambda row: row.get("graphs") is True,
        "eager": lambda row: row.get("graphs") is False and row["layers"] > 2,
        "prompts": lambda row: row.get("rows", 0) > row.get("sequences", 0),
    }[without]
    with pytest.raises(ConfigError, match="steps of several sequences, prompts of several lengths and layers"):
        host_cost([row for row in rows if not left_out(row)])


def test_products_in_a_row_read_weights_as_others() -> None:
    """Memory has a clock of its own: points that arithmetic bounds say nothing of the rate of reading."""
    assert H200 is not None
    rested, slow = KernelCost(4.0, 4100.0, 790e3), KernelCost(4.0, 4100.0, 670e3)
    sides = [(8192, 8192), (28672, 8192), (4096, 14336)]
    points = {
        kind: [
            KernelPoint(work, cost.time_us(work))
            for outputs, inputs in sides
            for rows in numbers
            for work in [product(rows, outputs, inputs, 2)]
        ]
        for kind, cost, numbers in (
            ("product_few_rows", rested, (2, 16, 64)),
            ("product_many_rows", rested, (128, 256, 1024)),
            (sustained_kind(False), slow, (512, 1024, 2048)),
        )
    }
    found = fit_kinds(points, H200)[sustained_kind(False)]
    assert found.cost.first_rate == pytest.approx(4100, rel=1e-3)
    assert found.cost.second_rate == pytest.approx(670e3, rel=0.01)
    assert found.residual < 0.01


def test_rows_are_of_the_kinds_that_steps_have() -> None:
    weights = {"outputs": 4096, "inputs": 1024, "us": 7.0}
    for row, kind, work in (
        ({"kernel": "product", "rows": 1, "fp8": False}, "product_one_row", KernelWork(4096 * 1024 * 2 / 1e9)),
        ({"kernel": "product", "rows": 64, "fp8": True}, "product_few_rows_fp8", product(64, 4096, 1024, 1)),
        ({"kernel": "sustained_product", "rows": 512, "fp8": True}, sustained_kind(True), product(512, 4096, 1024, 1)),
        ({"kernel": "rows_pass", "name": "norm_fp8", "width": 9, "nbytes": 5e9}, "norm_fp8", KernelWork(5.0)),
        ({"kernel": "rows_pass", "name": "embedding", "width": 9, "nbytes": 5e9}, "rows_pass", KernelWork(5.0)),
        ({"kernel": "rows_pass", "name": "quantization", "width": 9, "nbytes": 5e9}, "rows_pass_fp8", KernelWork(5.0)),
        ({"kernel": "rows_pass", "name": "sampling", "width": 9, "nbytes": 5e9}, "sampling", KernelWork(5.0)),
    ):
        assert kernel_point(weights | row) == (kind, KernelPoint(work, 7.0))
    wide = {"kernel": "rows_pass", "name": "quantization", "width": 32769, "nbytes": 1, "us": 1.0}
    assert kernel_point(wide) is None
    assert kernel_point(wide | {"name": "activation"}) is not None
    assert kernel_point({"kernel": "mixed_attention", "us": 1.0}) is None


def test_a_gpu_alone_has_the_packaged_link(tmp_path: Path) -> None:
    """Without results of sums, link and fused norm are packaged ones, by the data sheets, and the sources say so."""
    packaged = load("NVIDIA H200")
    document = json.loads((RESULTS / KERNELS_FILE).read_text())
    (tmp_path / KERNELS_FILE).write_text(json.dumps(document))
    alone = calibrate(tmp_path)
    assert (alone.link, alone.link_residual) == (packaged.link, packaged.link_residual)
    assert alone.fused_norms == packaged.fused_norms
    end = "of the packaged calibration of NVIDIA H200"
    assert alone.sources == (KERNELS_FILE, f"link, fused_norm, fused_norm_fp8 {end}")
    document["environment"]["gpus"][0]["name"] = "NVIDIA H100 80GB HBM3"
    (tmp_path / KERNELS_FILE).write_text(json.dumps(document))
    other = calibrate(tmp_path)
    assert other.part == "NVIDIA H100 80GB HBM3"
    assert other.fused_norms == packaged.fused_norms
    assert other.link.local_gbps == pytest.approx(packaged.link.local_gbps * 3350 / 4800)
    shutil.copy(RESULTS.parent / "h100" / "all_reduce_bf16_x2.json", tmp_path)
    measured = calibrate(tmp_path)
    assert measured.link == calibrate(RESULTS.parent / "h100").link
    assert measured.sources[-1] == f"fused_norm, fused_norm_fp8, bandwidth of the link {end}"
