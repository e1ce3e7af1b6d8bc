"""NCCL's own model of all-reduces: against what NCCL printed of it, published times, and the equations by hand."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from statistics import fmean

import nccl_model
import published_nccl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nccl_costs import NcclCosts, NcclStepModel
from nccl_rings import fit_rings

from shotcast.cost.collective import LinkCost, NetworkCost
from shotcast.errors import ConfigError
from shotcast.hardware import cluster
from shotcast.models.presets import preset
from shotcast.planner.calibration import Calibration, load
from shotcast.planner.step import Layout, StepModel, StepWork
from shotcast.wire import NodeShape

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "data" / "h200"
LINK, NETWORK = LinkCost(4.0, 0.7, 280.0), NetworkCost(5.0, 50.0)


@given(st.integers(0, 1 << 28), st.integers(2, 8))
def test_a_ring_hop_by_hop(nbytes: int, ranks: int) -> None:
    hops = sum(LINK.step_us + nbytes / ranks / LINK.bw_gbps / 1e3 for _ in range(2 * (ranks - 1)))
    assert nccl_model.ring_us(nbytes, ranks, LINK) == pytest.approx(LINK.fixed_us + hops)
    assert nccl_model.all_reduce_us(nbytes, NodeShape(1, ranks), LINK, NETWORK) == nccl_model.ring_us(
        nbytes, ranks, LINK
    )


def test_it_is_what_nccl_printed() -> None:
    """A run of NCCL printed its choices with its predictions: these are the same to what was printed of them."""
    printed = json.loads(published_nccl.DATA.read_text())["printed"]
    shape = NodeShape(printed["nodes"], printed["gpus_per_node"])
    host = nccl_model.Host((9, 0), "intel", plain_trees=True)
    for kind, times in printed["times_us"].items():
        # up to 2.22 two more hops of a ring were of the network: 14 us for 3.4 us, times the plateau
        older_us = 1.4 * 2 * (14.0 - 3.4) if kind.startswith("ring") else 0.0
        for nbytes, time_us in times.items():
            found = nccl_model.between_nodes(int(nbytes), shape, NetworkCost(5.0, printed["gbps_of_a_gpu"]), host)
            assert f"{found.algorithm} {found.protocol}" == kind
            assert found.time_us + older_us == pytest.approx(time_us, rel=2e-7)


def test_published_times_are_longer_than_the_model_or_near() -> None:
    """NCCL's model says what NCCL may choose by, and is optimistic in the field, the more the smaller the message."""
    errors = [row.model.time_us / row.time_us - 1 for row in published_nccl.published()]
    assert len(errors) == 17
    assert -0.6 < min(errors) < max(errors) < 0.2
    small = [row.model.time_us / row.time_us - 1 for row in published_nccl.published() if row.system["nodes"] == 32]
    assert max(map(abs, small)) < 0.05


def times(nbytes: int, shape: NodeShape, network: NetworkCost = NETWORK, **host: object) -> dict[str, float]:
    found = nccl_model.choices(nbytes, shape, network, nccl_model.Host(**host))  # type: ignore[arg-type]
    return {f"{each.algorithm} {each.protocol}": each.time_us for each in found}


def test_latencies_by_hand() -> None:
    found = times(0, NodeShape(16, 4))
    assert found["tree LL"] == pytest.approx(6.8 + 2 * (3 * 0.6 + 4 * 5.0))
    assert found["tree LL128"] == pytest.approx(14.0 + 2 * (3 * 1.25 + 4 * 8.5))
    # 126 hops, of which 30 are between nodes; the proxy takes longer than NVLink
    assert found["ring LL"] == pytest.approx(6.6 + 96 * 1.0 + 30 * 2.7)
    assert times(0, NodeShape(16, 4), cpu_vendor="amd")["ring LL"] == pytest.approx(6.6 + 96 * 2.0 + 30 * 2.7)
    # with one rank a node nothing hides the network
    assert times(0, NodeShape(2, 1))["ring LL"] == pytest.approx(6.6 + 2 * 5.0)
    # a network that is slower than InfiniBand, which Simple feels twice
    slow = times(0, NodeShape(16, 4), NetworkCost(8.0, 25.0))
    assert slow["tree LL"] - found["tree LL"] == pytest.approx(2 * 4 * 3.0)
    assert slow["tree Simple"] - found["tree Simple"] == pytest.approx(2 * 4 * 6.0)


def test_bandwidths_by_hand() -> None:
    shape, large = NodeShape(16, 4), 1 << 30
    found, more = times(large, shape), times(2 * large, shape)
    slope = {name: (more[name] - found[name]) / large * 1e3 for name in found}
    # 4 adapters of 48 GB/s, the fastest that NCCL looks for below 50
    assert 1 / slope["ring Simple"] == pytest.approx(192 * 64 / 126)
    assert 1 / slope["ring LL128"] == pytest.approx(0.92 * 192 * 64 / 126)
    assert 1 / slope["ring LL"] == pytest.approx(20.4 * 64 / 126)
    assert 1 / slope["tree LL128"] == pytest.approx(0.92 * 192 * 120 / 128 / 2)
    # Ampere: 24 GB/s an adapter, in one channel, which moves no more than 17.8
    ampere = {"compute_capability": (8, 0), "cpu_vendor": "amd"}
    wires = NetworkCost(5.0, 25.0)
    found, more = times(large, shape, wires, **ampere), times(2 * large, shape, wires, **ampere)
    assert large / (more["tree Simple"] - found["tree Simple"]) / 1e3 == pytest.approx(4 * 17.8 / 2)


@given(st.integers(0, 1 << 32), st.integers(2, 300), st.integers(1, 8), st.floats(0.01, 200), st.floats(0, 20))
def test_any_network_has_a_time(nbytes: int, nodes: int, local: int, gbps: float, step_us: float) -> None:
    shape, network = NodeShape(nodes, local), NetworkCost(step_us, gbps)
    found = nccl_model.between_nodes(nbytes, shape, network)
    assert found == min(nccl_model.choices(nbytes, shape, network))
    assert found.time_us > 6.6
    slower = network._replace(step_us=step_us + 5)
    assert nccl_model.between_nodes(nbytes, shape, slower).time_us >= found.time_us


def test_one_node_is_not_several() -> None:
    with pytest.raises(ConfigError, match="not of 1x8 ranks"):
        nccl_model.choices(1024, NodeShape(1, 8), NetworkCost(5.0, 50.0))


def test_constants_of_rings_are_found() -> None:
    points = [
        (ranks, nbytes, nccl_model.ring_us(nbytes, ranks, LINK)) for ranks in (2, 4) for nbytes in (1 << 10, 1 << 28)
    ]
    found = fit_rings(points)
    assert (found.fixed_us, found.step_us, found.bw_gbps) == pytest.approx((4.0, 0.7, 280.0))
    with pytest.raises(ConfigError, match="1 rings do not determine NCCL's constants"):
        fit_rings(points[:1])


@cache
def costs(name: str = "h200x8") -> tuple[Calibration, NcclCosts]:
    calibration = load("NVIDIA H200")
    return calibration, NcclCosts.on(cluster.load(name), calibration.link)


def test_the_library_is_nccl_by_its_measured_rings() -> None:
    """Constants are those of the kept rings of 2 and 4 GPUs, scaled to other links, with their own residual."""
    points = [
        (row["world_size"], row["nbytes"], row["time_us"])
        for ranks in (2, 4)
        for row in json.loads((RESULTS / f"all_reduce_bf16_x{ranks}.json").read_text())["rows"]
        if row["algorithm"] == "nccl_ring"
    ]
    fitted = fit_rings(points)
    for name in ("fixed_us", "step_us", "bw_gbps"):
        assert getattr(nccl_model.NVLINK_RINGS, name) == pytest.approx(getattr(fitted, name), rel=1e-3)
    errors = [nccl_model.ring_us(nbytes, ranks, fitted) / time_us - 1 for ranks, nbytes, time_us in points]
    assert math.sqrt(fmean(error**2 for error in errors)) == pytest.approx(nccl_model.RING_RESIDUAL, rel=0.05)
    published = [row.model.time_us / row.time_us - 1 for row in published_nccl.published()]
    assert math.sqrt(fmean(error**2 for error in published)) == pytest.approx(nccl_model.NETWORK_RESIDUAL, rel=0.05)
    (_, h200), (_, a100) = costs(), costs("a100x8")
    found = h200.nccl_sum(1 << 20, 4)
    assert found[:2] == (nccl_model.ring_us(1 << 20, 4, nccl_model.NVLINK_RINGS), nccl_model.RING_RESIDUAL)
    assert a100.rings.bw_gbps == pytest.approx(h200.rings.bw_gbps * 300 / 450)
    assert (h200.host, a100.host) == (nccl_model.HOPPER, nccl_model.Host((8, 0), "amd"))
    far = h200.nccl_sum(1 << 20, 16)
    wires = NetworkCost(5.0, 50.0)
    assert far.time_us == pytest.approx(nccl_model.between_nodes(1 << 20, NodeShape(2, 8), wires).time_us)
    assert far.residual == nccl_model.NETWORK_RESIDUAL


def test_sums_of_the_library_are_followed_by_a_norm() -> None:
    work, model = StepWork(16, 512, (), 16), preset("llama-3.1-70b")
    own, library = (kind(model, Layout(4, 1), *costs()).stages(work)[0].parts for kind in (StepModel, NcclStepModel))
    assert library["all_reduce"] > 2 * own["all_reduce"]
    alone, same = (kind(model, Layout(1, 1), *costs()).stages(work)[0].parts for kind in (StepModel, NcclStepModel))
    assert library["norm"] == alone["norm"] != own["norm"]
    assert same == alone
