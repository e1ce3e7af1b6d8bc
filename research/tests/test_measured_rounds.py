"""Measured calls of two to eight ranks beside the same calls followed rank by rank, and the table that a page has."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import forecast
import measured_rounds
import pytest
from measured_rounds import Followed
from rounds import messages
from rounds.ranks import Fabric

from shotcast.cost.collective import LinkCost
from shotcast.planner.calibration import load

PAGE = Path(__file__).parents[1] / "reports" / "planner_accuracy.md"


def mean_error(found: list[Followed]) -> float:
    return fmean(abs(each.error) for each in found)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rings_of_gpus_are_within_the_residual_of_the_calibration(ranks: int) -> None:
    found = measured_rounds.rings(ranks)
    assert len(found) == 19
    assert mean_error(found) < 1.05 * load("NVIDIA H200").link_residual


def test_calls_of_four_and_eight_hosts_by_constants_of_two() -> None:
    own, gloo = measured_rounds.fitted(gloo=False), measured_rounds.fitted(gloo=True)
    # 5 ms and 2 Gbit/s are what was asked of the network; Gloo's steps go there and back
    assert own.network.step_us == pytest.approx(5000, rel=0.03)
    assert gloo.network.step_us == pytest.approx(10000, rel=0.04)
    assert (own.network.bw_gbps, gloo.network.bw_gbps) == pytest.approx((0.25, 0.25), rel=0.2)
    assert mean_error(measured_rounds.between_hosts(4, gloo=False)) < own.residual
    assert mean_error(measured_rounds.between_hosts(4, gloo=True)) < gloo.residual
    eight = {
        each: [one for one in measured_rounds.between_hosts(8, each) if one.nbytes <= measured_rounds.BUSY]
        for each in (False, True)
    }
    assert mean_error(eight[False]) < own.residual
    assert mean_error(eight[True]) < 1.25 * gloo.residual


@pytest.mark.parametrize("number", [2, 4, 8])
def test_the_queue_of_events_gives_the_same(number: int) -> None:
    for gloo in (False, True):
        fabric = Fabric(LinkCost(0.0, 0.0, 1e12), measured_rounds.fitted(gloo).network)
        for each in measured_rounds.between_hosts(number, gloo):
            call = measured_rounds.call_of(each.algorithm, each.nbytes, number)
            assert max(messages.end_times(call, fabric)) == pytest.approx(each.followed_us, rel=1e-9)


def test_the_page_has_this_table() -> None:
    page, made = PAGE.read_text(), measured_rounds.table()
    assert forecast.filled(page, made, measured_rounds.MARK, measured_rounds.END) == page
