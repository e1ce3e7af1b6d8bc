"""Predict the engine on CPU hosts with cores of their own, from what one host measured and the cost model.

Simulated hosts share the cores of one machine, so they show what the network costs and not how computation scales. Here
a host computes as fast as the measured one, and the network is that of the cost model. With the time C of one host's
step, h hosts of one rank, t(n) the least predicted time of an all-reduce of n bytes, a the latency and b the bandwidth:

    tensor parallel   C / h + (2 layers + 1) t(rows hidden 4) + (a + rows vocab 4 (h - 1) / h / b) + a
    pipeline          C + (h - 1) (a + rows hidden 4 / b) + a

The second is of one sequence alone, whose step passes the hosts one after the other. Beside the sums of layers, tensor
parallel ranks gather logits, and wait for the plan that rank 0 sends; a pipeline sends the sampled token back.
Gloo's all-reduce is taken for 4 (h - 1) latencies and a ring's bytes, and its all-gather for half of the latencies.

    python research/engine_on_hosts.py --json benchmarks/data/cpu/engine_smollm2_f32.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import engine_results

from shotcast.bench.engine_report import TRANSFORMERS, EngineRow
from shotcast.collectives.algorithm import Topology
from shotcast.collectives.choice.select import predicted_us
from shotcast.collectives.registry import registered
from shotcast.cost.collective import NetworkCost
from shotcast.hardware.nodes import NodeLayout
from shotcast.models.config import ModelConfig
from shotcast.models.source import open_checkpoint
from shotcast.transport.registry import usual
from shotcast.transport.transport import Network
from shotcast.wire import Op

HOSTS = (1, 2, 4, 8)
LATENCIES_US = (20.0, 50.0, 200.0, 1000.0)
GBPS = 3.0
"""GB/s of a host's link: most of 25 Gbit/s."""
ITEM = 4


def all_reduce_ms(hosts: int, nbytes: int, network: NetworkCost, gloo: bool) -> float:
    """Return the predicted time of an all-reduce between hosts of one rank each."""
    if hosts == 1:
        return 0.0
    if gloo:
        ring_bytes = 2 * nbytes * (hosts - 1) / hosts
        return (4 * (hosts - 1) * network.step_us + ring_bytes / (network.bw_gbps * 1e3)) / 1e3
    algorithms = registered()
    layout = NodeLayout(tuple((rank,) for rank in range(hosts)), tuple(map(str, range(hosts))))
    facts = layout, "cpu", "cpu", usual("cpu", hosts), "", False, 1 << 30, algorithms, False, Network("tcp", network)
    topology = Topology(*facts)
    own = [one.name for one in algorithms.serving(Op.ALL_REDUCE) if one.name.startswith("nvrar")]
    return min(predicted_us(topology, Op.ALL_REDUCE, "float32", nbytes, name) for name in own) / 1e3


def tensor_ms(
    model: ModelConfig, compute_ms: float, hosts: int, tokens: int, rows: int, network: NetworkCost, gloo: bool
) -> tuple[float, float]:
    """Return the time of a step of ``tokens`` tokens, of which ``rows`` sample, and the part that is communication."""
    if hosts == 1:
        return compute_ms, 0.0
    sums = (2 * model.layers + 1) * all_reduce_ms(hosts, tokens * model.hidden * ITEM, network, gloo)
    gathered = rows * model.vocab * ITEM * (hosts - 1) / hosts
    steps = 2 * (hosts - 1) if gloo else 1
    gather = (steps * network.step_us + gathered / (network.bw_gbps * 1e3)) / 1e3
    communication = sums + gather + network.step_us / 1e3
    return compute_ms / hosts + communication, communication


def pipeline_ms(
    model: ModelConfig, compute_ms: float, hosts: int, tokens: int, network: NetworkCost
) -> tuple[float, float]:
    """Return the same for a pipeline, in which a step passes through all hosts one after the other."""
    if hosts == 1:
        return compute_ms, 0.0
    message_ms = (network.step_us + tokens * model.hidden * ITEM / (network.bw_gbps * 1e3)) / 1e3
    communication = (hosts - 1) * message_ms + network.step_us / 1e3
    return compute_ms + communication, communication


def table(rows: Sequence[EngineRow]) -> str:
    """Return the predictions as a Markdown table: each a time in ms, and the share of communication."""
    own = [row for row in rows if row.algorithm != TRANSFORMERS]
    alone = next(row for row in own if (row.layout, row.batch, row.hosts) == ("1x1", 1, 1))
    model = open_checkpoint(alone.model).config
    lines = [
        "| one way us | step | layout | "
        + " | ".join(f"{hosts} host{'s' if hosts > 1 else ''}" for hosts in HOSTS)
        + " |"
    ]
    lines.append("|" + "---|" * (3 + len(HOSTS)))
    for latency in LATENCIES_US:
        network = NetworkCost(latency, GBPS)
        for step, compute_ms, tokens in (
            ("decode", alone.itl_ms, 1),
            (f"prefill {alone.prompt}", alone.ttft_ms, alone.prompt),
        ):
            for name in ("tensor", "tensor, Gloo", "pipeline"):
                times = [
                    pipeline_ms(model, compute_ms, hosts, tokens, network)
                    if name == "pipeline"
                    else tensor_ms(model, compute_ms, hosts, tokens, 1, network, name != "tensor")
                    for hosts in HOSTS
                ]
                cells = [f"{total:.1f} ({communication / total:.0%})" for total, communication in times]
                lines.append(f"| {latency:g} | {step} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="a result of shotcast bench engine on one host")
    print(table(engine_results.read(parser.parse_args().json)))


if __name__ == "__main__":
    main()
