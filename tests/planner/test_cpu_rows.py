"""Constants by number of rows: fits, what lies between and beyond, and the step of a CPU rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_calibration.least_squares import KernelPoint
from hypothesis import given
from hypothesis import strategies as st

from shotcast.cost.collective import NO_NETWORK
from shotcast.cost.inference import CPU_KINDS, KernelWork
from shotcast.errors import ConfigError
from shotcast.kernels.cpu import gemv
from shotcast.models.presets import preset
from shotcast.planner import calibration as calibrations
from shotcast.planner.calibration import Calibration
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.cpu_rows import FEW, LARGE_BYTES, CpuStepModel, RowsCosts, RowsPoint, fit_rows, step_model
from shotcast.planner.step import Layout, StepWork

FILE = Path(__file__).parents[2] / "benchmarks" / "data" / "cpu" / "calibration_x1.json"


def line(kind: str, rows: int, fixed_us: float, us_per_gb: float) -> list[RowsPoint]:
    return [RowsPoint(kind, rows, KernelPoint(KernelWork(gb), fixed_us + us_per_gb * gb)) for gb in (1e-3, 2e-3, 7e-3)]


def kept() -> Calibration:
    return calibrations.load("", FILE)


def model() -> CpuStepModel:
    constants = kept()
    collectives = CollectiveCosts(constants.link, NO_NETWORK, 1)
    found = step_model(preset("smollm2-135m"), Layout(1, 1), constants, collectives)
    assert isinstance(found, CpuStepModel)
    return found


@given(st.integers(1, 20), st.floats(0.5, 50), st.floats(10, 1e5))
def test_a_line_is_found(rows: int, fixed_us: float, us_per_gb: float) -> None:
    (known,) = fit_rows(line("product", rows, fixed_us, us_per_gb)).values()
    assert known.cost.fixed_us == pytest.approx(fixed_us, rel=1e-6)
    assert 1e6 / known.cost.first_rate == pytest.approx(us_per_gb, rel=1e-6)
    assert known.residual < 1e-6


def test_constants_are_not_below_zero() -> None:
    falling = [RowsPoint("norm", 1, KernelPoint(KernelWork(gb), us)) for gb, us in ((1e-3, 20.0), (2e-3, 10.0))]
    (known,) = fit_rows(falling).values()
    assert (known.cost.fixed_us, known.worst) == (15.0, pytest.approx(0.5, rel=0.05))
    steep = [RowsPoint("norm", 1, KernelPoint(KernelWork(gb), us)) for gb, us in ((1e-3, 10.0), (2e-3, 40.0))]
    (known,) = fit_rows(steep).values()
    assert known.cost.fixed_us == 0.0
    with pytest.raises(ConfigError, match="a norm of 3 rows takes more than 0 us"):
        fit_rows([RowsPoint("norm", 3, KernelPoint(KernelWork(1.0), 0.0))])


def test_between_and_beyond_what_was_measured() -> None:
    points = [*line("product", 2, 10, 1000), *line("product", 4, 30, 1000), *line("norm", 4, 8, 1e3)]
    costs = RowsCosts(fit_rows(points))
    work = KernelWork(2e-3)
    assert costs.time_us("product", 2, work)[0] == pytest.approx(12)
    assert costs.time_us("product", 3, work)[0] == pytest.approx(22)
    assert costs.time_us("product", 1, work)[0] == pytest.approx(12)
    # eight rows take twice as long as four; the bytes of a pass over rows have the rows in them
    assert costs.time_us("product", 8, work)[0] == pytest.approx(64)
    assert costs.time_us("norm", 8, work)[0] == pytest.approx(10)


def test_neighbouring_numbers_share_a_window() -> None:
    assert set(fit_rows([*line("norm", 130, 5, 10), *line("norm", 134, 5, 10)])) == {"norm@132"}
    assert len(fit_rows(point for rows in FEW for point in line("norm", rows, 5, 10))) == len(FEW)


def test_threads_read_weights_from_where_the_kernel_says() -> None:
    assert LARGE_BYTES == gemv._THREADS_FROM_BYTES


def test_a_step_is_the_sum_of_its_kernels() -> None:
    small, large = (model().stages(StepWork(rows, 64, (), rows))[0] for rows in (1, 16))
    assert {"qkv", "output", "gate_up", "down", "attention", "activation", "norm", "head"} < set(small.parts)
    assert small.time_us < large.time_us < 16 * small.time_us
    assert 0 < small.error_us < 0.2 * small.time_us


def test_prompts_are_attended_to_one_after_the_other() -> None:
    two, one = (model().stages(StepWork(0, 0, ((48, 0),) * count, count))[0].parts for count in (2, 1))
    assert two["attention"] == pytest.approx(2 * one["attention"])
    assert two["gate_up"] < 2 * one["gate_up"]
    beside = model().stages(StepWork(4, 64, ((48, 0),), 5))[0].parts
    alone = model().stages(StepWork(4, 64, (), 4))[0].parts
    assert beside["attention"] == pytest.approx(one["attention"] + alone["attention"])


def test_other_numbers_of_ranks_were_not_measured() -> None:
    with pytest.raises(ConfigError, match=r"of 1 rank, and 3 are asked for.*shotcast calibrate"):
        kept().of_ranks(3)


def test_the_file_is_read_as_it_is_written() -> None:
    text = FILE.read_text()
    assert calibrations.parse(text, "kept").as_json() + "\n" == text
    assert not kept().host.hidden


@pytest.mark.parametrize("kind", CPU_KINDS)
def test_a_kind_that_is_missing(kind: str) -> None:
    value = json.loads(FILE.read_text())
    for share in value["shares"].values():
        share["kinds"] = {name: known for name, known in share["kinds"].items() if name.partition("@")[0] != kind}
    with pytest.raises(ConfigError, match=f"it lacks {kind}"):
        calibrations.parse(json.dumps(value), "changed")


def test_scaled_to_another_part() -> None:
    other = replace(calibrations.load("NVIDIA H200").gpu, name="another CPU")
    with pytest.raises(ConfigError, match="says nothing of another CPU"):
        kept().scaled_to(other)
