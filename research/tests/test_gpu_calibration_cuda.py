"""Measuring a GPU: a few points of every kind, from kernels to a calibration that plans. Run with ``pytest -m gpu``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gpu_calibration import measurement, products
from gpu_calibration.attention import DecodeShape, PromptShape
from gpu_calibration.fit import KERNELS_FILE, calibrate
from gpu_calibration.host import HostSteps
from gpu_calibration.measurement import Measurement
from gpu_calibration.passes import pass_shapes

from shotcast.hardware import cluster
from shotcast.models.presets import preset
from shotcast.planner.plan import Query, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROWS = (1, 2, 64, 128, 512)


def test_a_few_points_make_a_calibration(tmp_path: Path) -> None:
    spec = measurement.require_gpus(1)
    fp8 = Measurement.everything(spec.fp8_tflops is not None).products[-1].fp8
    dtypes = (False, True) if fp8 else (False,)
    prompts = tuple(((tokens, before),) for tokens, before in ((128, 0), (512, 0), (512, 1024), (64, 2048)))
    points = Measurement(
        tuple(shape for each in dtypes for shape in products.shapes(each, {"8b": (1,)}, ROWS, (1, 64, 128))),
        tuple(shape for each in dtypes for shape in products.shapes(each, {"8b": (1,)}, (512, 1024))),
        (
            DecodeShape(32, 8, ((1, 128), (1, 2048), (16, 576), (128, 576))),
            PromptShape(32, 8, (*prompts, ((512, 0), *((1, 575),) * 64))),
            *(shape._replace(rows=shape.rows[::3]) for shape in pass_shapes(fp8)),
        ),
        HostSteps((1, 2), (1, 8), (16, 128), 16, 12, 1),
        heat_s=0.2,
    )
    (file,) = measurement.measure(tmp_path, 1, "a test", True, points)
    rows = json.loads(file.read_text())["rows"]
    assert file.name == KERNELS_FILE
    times, sustained = (
        {(row["name"], row["rows"]): row["us"] for row in rows if row["kernel"] == kernel and not row["fp8"]}
        for kernel in ("product", "sustained_product")
    )
    weights_gb = preset("llama-3.1-8b").hidden * 128256 * 2 / 1e9
    read_us = 1e6 * weights_gb / spec.memory_bw_gbps
    assert read_us < times["8b/1 head", 1] < 2 * read_us, "weights come from memory, and at its rate"
    assert sustained["8b/1 gate_up", 512] > 0.9 * times["8b/1 gate_up", 512]
    eager = {
        row["layers"]: row["us"] for row in rows if row["kernel"] == "host" and not row["graphs"] and row["rows"] == 1
    }
    assert eager[2] > eager[1]
    found = calibrate(tmp_path)
    assert found.gpu == spec
    assert found.sources[-1].startswith("link, fused_norm, fused_norm_fp8 of the packaged calibration")
    here = cluster.parse(measurement.cluster_text(), "here.yaml")
    best = plan(Query(preset("llama-3.1-8b"), "8b", "", here, 1, 512, 64), found).best
    assert best is not None
    assert 0 < best.tpot_ms < 1e3
