"""Calibrations: the packaged one is what the results give, and predicts measurements that it was not fitted to."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
from gpu_calibration.fit import KERNELS_FILE, _fused_norms, _Results, calibrate, kernel_point
from gpu_calibration.least_squares import Measured, fit, fit_fused_norm

from shotcast.collectives.registry import registered
from shotcast.cost.collective import LinkCost, time_us
from shotcast.cost.inference import KINDS, rows_pass
from shotcast.errors import ConfigError
from shotcast.hardware import catalog
from shotcast.planner.calibration import FUSED_NORM, FUSED_NORMS, LINK, Calibration, calibrated_parts, load
from shotcast.wire import DTYPES, NodeShape, Op

RESULTS = Path(__file__).parents[2] / "benchmarks" / "data" / "h200"
PART = "NVIDIA H200"
OWN = ("ring", "one_shot", "two_shot")


def measured(name: str) -> list[Measured]:
    rows = json.loads((RESULTS / name).read_text())["rows"]
    return [
        Measured(
            registered()[row["algorithm"]]
            .forms[Op[row["op"].upper()]]
            .work(row["nbytes"], NodeShape(1, row["world_size"]), DTYPES[row["dtype"]]),
            row["time_us"],
        )
        for row in rows
        if row["algorithm"] in OWN and row["measure"] == "call"
    ]


def error(points: list[Measured], link: LinkCost) -> float:
    return fmean(abs(time_us(work, link) / taken_us - 1) for work, taken_us in points)


def same(packaged: Any, fresh: Any) -> bool:
    """Return whether what a file says is what was fitted, on a machine that may round otherwise than the file's.

    A file has five digits of each constant. Before that, machines differ in the last bits of logarithms, products and
    solved equations, which move a constant by less than 1e-7 of it (``test_rounding_does_not_show_in_the_constants``).
    """
    if isinstance(fresh, dict):
        return packaged.keys() == fresh.keys() and all(same(packaged[name], part) for name, part in fresh.items())
    if isinstance(fresh, tuple):
        return len(packaged) == len(fresh) and all(map(same, packaged, fresh))
    if isinstance(fresh, float) and 0 < fresh < math.inf:
        fifth_digit = 10.0 ** (math.floor(math.log10(fresh)) - 4)
        return bool(abs(packaged - fresh) <= fifth_digit / 2 + 1e-7 * fresh)
    return bool(packaged == fresh)


def test_the_packaged_calibration_is_that_of_the_results() -> None:
    assert calibrated_parts() == ("NVIDIA H100 80GB HBM3", PART)
    packaged, fresh = load(PART), calibrate(RESULTS, PART)
    assert set(packaged.kinds) == {*KINDS}
    assert set(packaged.fused_norms) == {*FUSED_NORMS}
    assert same(asdict(packaged), asdict(fresh))
    for kind, known in fresh.kinds.items():
        # quantisation is one kind for rows of all widths
        assert known.residual < {"rows_pass_fp8": 0.4}.get(kind, 0.21), kind
        assert known.residual < 0.05 or not kind.startswith("sustained"), kind
    assert (packaged.host.hidden, packaged.host.source) == (True, "steps of a small model")
    assert fresh.residual(LINK) < 0.1


def test_the_packaged_calibration_of_the_h100_is_that_of_its_results() -> None:
    packaged, fresh = load("NVIDIA H100 80GB HBM3"), calibrate(RESULTS.parent / "h100")
    assert same(asdict(packaged), asdict(fresh))
    held = f"bandwidth of the link of the packaged calibration of {PART}"
    assert packaged.sources == ("fused_bf16_x2.json", "all_reduce_bf16_x2.json", KERNELS_FILE, held)
    kernels = {name: value for name, value in packaged.kernels.items() if name.startswith("kernels.")}
    assert kernels.items() <= load(PART).kernels.items()
    assert packaged.residual(LINK) < 0.1


@pytest.mark.parametrize(
    ("name", "row"),
    [
        (KERNELS_FILE, {"kernel": "product", "rows": 2048}),
        (KERNELS_FILE, {"kernel": "host", "graphs": True}),
        ("all_reduce_bf16_x2.json", {"algorithm": "ring"}),
        ("fused_bf16_x4.json", {"algorithm": "two_shot", "nbytes": 8 << 20}),
    ],
)
def test_the_calibration_of_other_results_is_another(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    """One time that is 1% longer, of the 1200 of all files, shows."""
    folder = results_of(tmp_path)
    content = json.loads((folder / name).read_text())
    changed = next(each for each in content["rows"] if row.items() <= each.items())
    changed["time_us" if "time_us" in changed else "us"] *= 1.01
    (folder / name).write_text(json.dumps(content))
    assert not same(asdict(load(PART)), asdict(calibrate(folder)))


@pytest.mark.parametrize("folder", ["h200", "h100"])
def test_rounding_does_not_show_in_the_constants(folder: str, tmp_path: Path) -> None:
    """Times that differ by 1e-15, so that all is rounded as another machine may, move no constant by 1e-7."""
    random = Random(1)
    for file in (RESULTS.parent / folder).glob("*_x[124].json"):
        content = json.loads(file.read_text())
        for row in content.get("rows", []):
            for name in row.keys() & {"us", "time_us"}:
                row[name] *= 1 + random.uniform(-1e-15, 1e-15)
        (tmp_path / file.name).write_text(json.dumps(content))
    exact, rounded = constants(calibrate(RESULTS.parent / folder)), constants(calibrate(tmp_path))
    assert exact.keys() == rounded.keys()
    assert rounded == pytest.approx(exact, rel=1e-7)


def constants(calibration: Calibration) -> dict[str, float]:
    """Return all that was fitted, by its place."""
    fits = {kind: asdict(known.cost) for kind, known in {**calibration.kinds, **calibration.fused_norms}.items()}
    fits |= {"link": asdict(calibration.link), "host": asdict(calibration.host)}
    return {
        f"{place} {name}": value for place, fit in fits.items() for name, value in fit.items() if type(value) is float
    }


def test_sums_of_other_gpus_and_ranks() -> None:
    """The H200's link predicts sums of 2 H100, and the H100's, of which two ranks were measured, those of 4 H200."""
    spec = catalog.find("NVIDIA H100 80GB HBM3")
    assert spec is not None
    # (slower kernels made the H100's sums, and those of 4 H200)
    assert error(measured("../h100/all_reduce_bf16_x2.json"), load(PART).scaled_to(spec).link) < 0.1
    h100 = load("NVIDIA H100 80GB HBM3").link
    assert h100.bw_gbps == load(PART).link.bw_gbps
    assert error(measured("all_reduce_bf16_x4.json"), h100) < 0.09


@pytest.mark.parametrize(("kind", "mean", "worst"), [(FUSED_NORM, 0.07, 0.18), (FUSED_NORMS[1], 0.13, 0.43)])
def test_a_fused_norm_does_not_depend_on_the_ranks(kind: str, mean: float, worst: float, tmp_path: Path) -> None:
    """Constants of 4 H200 predict 2 H100, and the other way round; and both fits find about the same."""
    points = {}
    for folder, name in (("h200", "fused_bf16_x4.json"), ("h100", "fused_bf16_x2.json")):  # of the same kernels
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes((RESULTS.parent / folder / name).read_bytes())
        messages = _fused_norms(_Results(tmp_path / folder))
        points[folder] = [message for name, message in messages if name == kind]
        assert len(points[folder]) == 10
    fits = {folder: fit_fused_norm(messages) for folder, messages in points.items()}
    for folder, other in (("h200", "h100"), ("h100", "h200")):
        errors = [abs(fits[other].cost.time_us(*each[:2]) / each.time_us - 1) for each in points[folder]]
        assert fmean(errors) < mean
        assert max(errors) < worst
    assert fits["h200"].cost.rate == pytest.approx(fits["h100"].cost.rate, rel=0.06)


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce_f32_x2.json",
        "all_reduce_f32_x4.json",
        "all_reduce_f16_x2.json",
        "all_reduce_f16_x4.json",
        "reduce_scatter_bf16_x4.json",
    ],
)
def test_collectives_that_were_not_fitted(name: str) -> None:
    """Other dtypes and another operation: within 10% on average."""
    assert error(measured(name), load(PART).link) < 0.1


def test_ranks_that_were_not_fitted() -> None:
    """Constants of two ranks predict four, and the other way round."""
    two, four = (measured(f"all_reduce_bf16_x{ranks}.json") for ranks in (2, 4))
    assert error(four, fit(two)) < 0.11
    assert error(two, fit(four)) < 0.11


def test_every_measurement_is_used() -> None:
    """All but steps of prompts and sequences that decode together, and quantised rows that no registers hold."""
    rows = json.loads((RESULTS / KERNELS_FILE).read_text())["rows"]
    left_out = [
        row
        for row in rows
        if row["kernel"] == "mixed_attention"
        or (row.get("width") == 53248 and row["name"] in ("quantization", "activation_fp8"))
    ]
    host = [row for row in rows if row["kernel"] in ("host", "first_token")]
    points = sum(known.points for known in load(PART).kinds.values())
    assert points == len(rows) - len(left_out) - len(host)
    assert all(kernel_point(row) is None for row in left_out)
    assert {row["kernel"] for row in left_out} == {"mixed_attention", "rows_pass"}


def test_the_widest_rows_take_longer_than_others_say() -> None:
    """They are left out, since no constant of this kind would hold for both."""
    rows = json.loads((RESULTS / KERNELS_FILE).read_text())["rows"]
    wide = [row for row in rows if row.get("width") == 53248 and row["name"] == "quantization" and row["rows"] >= 256]
    cost = load(PART).kinds["rows_pass_fp8"].cost
    assert wide
    assert all(row["us"] > 4 * cost.time_us(rows_pass(row["nbytes"])) for row in wide)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kernels_x1\.json has no results"):
        calibrate(tmp_path, PART)
    with pytest.raises(ConfigError, match="Toaster is not in the catalog"):
        calibrate(RESULTS, "Toaster")


def results_of(folder: Path) -> Path:
    """Return a copy of the results that a calibration is made of."""
    for name in load(PART).sources:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((RESULTS / name).read_bytes())
    return folder


def test_the_part_is_that_of_every_file(tmp_path: Path) -> None:
    folder = results_of(tmp_path)
    assert calibrate(folder).part == PART
    with pytest.raises(
        ConfigError, match=r"fused_bf16_x2\.json was measured on NVIDIA H200, and --part says NVIDIA B200"
    ):
        calibrate(folder, "NVIDIA B200")
    file = folder / "all_reduce_bf16_x4.json"
    content = json.loads(file.read_text())
    content["environment"]["gpus"][3]["name"] = "NVIDIA H100 80GB HBM3"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"measured on NVIDIA H100 80GB HBM3, and --part says NVIDIA H200"):
        calibrate(folder, PART)
    content["environment"]["gpus"] = []
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"x4\.json does not say which GPU it was measured on"):
        calibrate(folder)


def fused_rows(nbytes: object, us: float) -> list[dict[str, object]]:
    algorithms = ("plain_one_shot", "plain_two_shot", "one_shot", "two_shot")
    return [{"nbytes": nbytes, "algorithm": algorithm, "time_us": us} for algorithm in algorithms]


def test_results_that_are_none_are_named(tmp_path: Path) -> None:
    folder = results_of(tmp_path)
    for name, change, message in (
        (KERNELS_FILE, {"rows": [{"kernel": "product", "us": 1.0}]}, "has a row that is no result to calibrate by"),
        (KERNELS_FILE, {"rows": [{"kernel": "toaster", "us": 1.0}]}, "has a row .*there is no kernel 'toaster'"),
        (KERNELS_FILE, {"rows": [3]}, "has a row that is no result to calibrate by"),
        (KERNELS_FILE, {"rows": 3}, "has no results to calibrate by"),
        ("fused_bf16_x4.json", {"rows": [{"nbytes": 1}]}, "has a row that is no result to calibrate by"),
        *(
            ("fused_bf16_x4.json", {"rows": fused_rows(nbytes, us)}, "has a row .*a message of .* bytes takes")
            for nbytes, us in ((None, 1.0), ("abc", 1.0), (0, 1.0), (-8, 1.0), (8, math.nan), (8, 0.0))
        ),
        ("all_reduce_bf16_x2.json", {"rows": [{"algorithm": "ring"}]}, "has a row that is no result to calibrate by"),
    ):
        before = (folder / name).read_text()
        (folder / name).write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(ConfigError, match=f"{name} {message}"):
            calibrate(folder)
        (folder / name).write_text("[]")
        with pytest.raises(ConfigError, match=f"{name} has no results to calibrate by"):
            calibrate(folder)
        (folder / name).write_text(before)
    rows = json.loads((folder / KERNELS_FILE).read_text())
    rows["rows"][0]["us"] = -1.0
    (folder / KERNELS_FILE).write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=r"a number of microseconds above 0, not -1\.0"):
        calibrate(folder)
