"""Calibrations: what a file must have, and the constants of other machines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shotcast.cost.collective import NVLINK4
from shotcast.cost.inference import CPU_KINDS, decode_attention, product
from shotcast.errors import ConfigError
from shotcast.hardware import catalog
from shotcast.planner.calibration import load, parse

PART = "NVIDIA H200"


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no calibration of NVIDIA B300; there is one of NVIDIA H100 80GB HBM3, NVIDIA H200\. Make one by",
    ):
        load("NVIDIA B300")
    with pytest.raises(ConfigError, match=r"cannot read the calibration .*no\.json"):
        load(PART, tmp_path / "no.json")


def test_the_link_is_that_of_the_cost_model() -> None:
    """``NVLINK4``, by which communicators choose, was fitted to the same tables."""
    link = load(PART).link
    for name in ("fixed_us", "step_us", "bw_gbps", "local_gbps"):
        assert getattr(link, name) == pytest.approx(getattr(NVLINK4, name), rel=0.02)


def test_another_gpu_keeps_the_efficiency() -> None:
    own = load(PART)
    assert own.scaled_to(own.gpu) is own
    a100 = next(spec for spec in catalog.CATALOG if spec.name.startswith("A100"))
    scaled = own.scaled_to(a100)
    large = product(2048, 8192, 8192, 2)
    kind = "product_many_rows"
    fixed_us = own.kinds[kind].cost.fixed_us
    ratio = (scaled.time_us(kind, large) - fixed_us) / (own.time_us(kind, large) - fixed_us)
    assert ratio == pytest.approx(989.5 / 312, rel=0.02)
    read = decode_attention(128, 2000, 8, 128, 2)
    assert scaled.time_us("decode_attention", read) > 2 * own.time_us("decode_attention", read)
    assert scaled.link.bw_gbps == pytest.approx(own.link.bw_gbps * 300 / 450)
    assert not any(kind.endswith("fp8") for kind in (*scaled.kinds, *scaled.fused_norms))


def test_a_cpu_has_constants_by_ranks() -> None:
    content = json.loads(load(PART).as_json())
    kinds = {f"{kind}@1": content["kinds"]["rows_pass"] for kind in CPU_KINDS}
    host = {name: content["host"][name] for name in ("fixed_us", "per_sequence_us", "per_row_us", "hidden", "source")}
    few = {"kinds": kinds, "host": host | {"fixed_us": 50.0, "per_sequence_us": 2.0}}
    many = few | {"host": few["host"] | {"hidden": False, "source": "measured", "per_row_us": 0.5}}
    cpu: dict[str, Any] = {"part": "a CPU", "device": "cpu", "dtype": "float32", "kinds": {}, "host": host}
    cpu["shares"] = {"1": few, "2": many}
    found = parse(json.dumps(content | cpu), "x")
    assert found.kinds == found.shares[2].kinds
    del content["fused_norms"]
    assert json.loads(found.as_json()) == content | cpu
    assert (found.itemsize, found.of_ranks(2).host.time_us(3, 10)) == (4, 50 + 3 * 2 + 10 * 0.5)
    assert not found.of_ranks(2).host.hidden
    with pytest.raises(
        ConfigError, match="a CPU is of 1 or 2 ranks, and 4 are asked for; measure them by shotcast cal"
    ):
        found.of_ranks(4)
    with pytest.raises(ConfigError, match="of a CPU, a CPU, and says nothing of H200 SXM; give the cluster that"):
        found.scaled_to(catalog.CATALOG[2])
    own = load(PART)
    assert own.of_ranks(4) is own


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kinds": {"a": 1}}', '{"kinds": {}, "link": {}}'])
def test_what_is_no_calibration(text: str) -> None:
    with pytest.raises(ConfigError, match="x is no calibration, as shotcast calibrate writes it"):
        parse(text, "x")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("link.bw_gbps", -1, "x: link bw_gbps must be a number above 0, not -1"),
        ("link.local_gbps", 0, "x: link local_gbps must be a number above 0, not 0"),
        ("link.step_us", -0.1, "x: link step_us must be a number, 0 or above, not -0.1"),
        ("link.residual", math.nan, "x: link residual must be a number, 0 or above, not nan"),
        ("rows_pass.first_rate", 0, "x: rows_pass first_rate must be a number above 0, not 0"),
        ("rows_pass.second_rate", math.inf, "x: rows_pass second_rate must be a number above 0, not inf"),
        ("rows_pass.fixed_us", -3, "x: rows_pass fixed_us must be a number, 0 or above, not -3"),
        ("rows_pass.residual", -1, "x: rows_pass residual must be a number, 0 or above, not -1"),
        ("rows_pass", None, "x is no calibration: it lacks rows_pass"),
        ("fused_norms.fused_norm.rate", 0, "x: fused_norm rate must be a number above 0, not 0"),
        ("fused_norms.fused_norm.beyond_us", -1, "x: fused_norm beyond_us must be a number, 0 or above, not -1"),
        ("fused_norms.fused_norm_fp8.residual", math.nan, "x: fused_norm_fp8 residual must be a number, 0 or above"),
        ("fused_norms.fused_norm_fp8", None, "x is no calibration: it lacks fused_norm_fp8"),
        ("fused_norms.fused_norm.fixed_us", None, "x is no calibration, as shotcast calibrate writes it: KeyError"),
        ("host.fixed_us", -1, "x: host fixed_us must be a number, 0 or above, not -1"),
        ("host.per_row_us", math.inf, "x: host per_row_us must be a number, 0 or above, not inf"),
        ("host.per_layer_us", -1, "x: host per_layer_us must be a number, 0 or above, not -1"),
        ("host.client_us", math.nan, "x: host client_us must be a number, 0 or above, not nan"),
        ("host.hidden", "yes", "x is no calibration, as shotcast calibrate writes it: .*true or false, not 'yes'"),
        ("device", "tpu", "x: device must be one of cuda, cpu, not 'tpu'"),
        ("device", "cpu", "x: shares are the constants of a CPU, by ranks; it is of device cpu"),
        ("dtype", "int8", "x: dtype must be one of bfloat16, float16, float32, not 'int8'"),
        ("few_rows", 0, "x: few_rows must be a number of rows, 1 or above, not 0"),
        ("shares.2.host.fixed_us", -2, "x: 2 ranks: host fixed_us must be a number, 0 or above, not -2"),
        ("shares.2.kinds.norm@1", None, "x is no calibration: it lacks norm"),
    ],
)
def test_constants_that_make_no_sense(place: str, value: float | str | None, message: str) -> None:
    content = json.loads(load(PART).as_json())
    *path, name = place.split(".")
    if place.startswith("shares"):  # a CPU's
        kinds = {f"{kind}@1": content["kinds"]["rows_pass"] for kind in CPU_KINDS}
        content |= {"device": "cpu", "shares": {"2": {"kinds": kinds, "host": dict(content["host"])}}}
    within = content if (path or [name])[0] in content else content["kinds"]
    for part in path:
        within = within[part]
    if value is None:
        del within[name]
    else:
        within[name] = value
    with pytest.raises(ConfigError, match=message):
        parse(json.dumps(content), "x")
