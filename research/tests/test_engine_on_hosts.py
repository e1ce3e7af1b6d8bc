"""research/engine_on_hosts.py: the engine on hosts with cores of their own, by the cost model."""

from __future__ import annotations

import re
from pathlib import Path

import engine_on_hosts as predictions
import engine_results
import pytest

from shotcast.bench import engine_report
from shotcast.cost.collective import NetworkCost
from shotcast.models.presets import preset

RESULT = Path(__file__).parents[2] / "benchmarks" / "data" / "cpu" / "engine_smollm2_f32.json"
MODEL = preset("llama-3.2-1b")
FAST = NetworkCost(0.0, 1e9)


@pytest.mark.parametrize("hosts", [1, 2, 5, 8])
def test_a_network_that_costs_nothing_leaves_computation(hosts: int) -> None:
    total, communication = predictions.tensor_ms(MODEL, 80.0, hosts, 1, 1, FAST, True)
    assert total == pytest.approx(80.0 / hosts, abs=1e-2)
    assert communication == pytest.approx(0.0, abs=1e-2)
    assert predictions.pipeline_ms(MODEL, 80.0, hosts, 1, FAST)[0] == pytest.approx(80.0, abs=1e-2)


def test_a_sum_of_a_few_bytes_takes_a_latency_and_gloos_four_for_each_other_host() -> None:
    network = NetworkCost(1000.0, 3.0)
    for hosts in (2, 4, 8):
        assert predictions.all_reduce_ms(hosts, 2304, network, False) == pytest.approx(1.0, rel=0.05)
        assert predictions.all_reduce_ms(hosts, 2304, network, True) == pytest.approx(4.0 * (hosts - 1), rel=0.01)
    layers = 2 * MODEL.layers + 1
    assert predictions.tensor_ms(MODEL, 80.0, 4, 1, 1, network, False)[1] == pytest.approx(layers + 2, rel=0.05)
    assert predictions.pipeline_ms(MODEL, 80.0, 4, 1, network)[1] == pytest.approx(4.0, rel=0.05)


def test_the_table_begins_with_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = engine_results.read(RESULT)
    monkeypatch.setattr(predictions, "open_checkpoint", lambda name: type("Opened", (), {"config": MODEL}))
    lines = predictions.table(rows).splitlines()
    alone = next(row for row in rows if row.layout == "1x1" and row.algorithm != engine_report.TRANSFORMERS)
    assert len(lines) == 2 + 6 * len(predictions.LATENCIES_US)
    for line in lines[2:]:
        first = re.split(r" \| ", line)[3]
        assert first == f"{alone.itl_ms if '| decode |' in line else alone.ttft_ms:.1f} (0%)"
