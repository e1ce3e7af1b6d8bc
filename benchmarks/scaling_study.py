"""Predict published comparisons of layouts and of all-reduces over nodes, and print them as Markdown tables.

    python benchmarks/scaling_study.py [--fill docs/design/strong_scaling.md]

No constant is fitted to what is compared: kernels and link are those of the calibration of the H200, networks are those
of ``src/shotcast/hardware/clusters``, and NCCL's constants on the link come from its measured rings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import forecast
import published_nccl

from shotcast.collectives.registry import registered
from shotcast.cost import nccl
from shotcast.cost.collective import LinkCost, NetworkCost
from shotcast.hardware import cluster
from shotcast.hardware.cluster import Cluster
from shotcast.models.presets import preset
from shotcast.planner.calibration import Calibration, load
from shotcast.planner.collectives import CollectiveCosts, CollectiveTime
from shotcast.planner.plan import MOST_SEQUENCES, Job, Point, memory_of, plan
from shotcast.planner.step import Layout, StepModel, StepWork
from shotcast.simulator.collectives import CollectiveCall, Fabric, exponential_jitter
from shotcast.simulator.events import exact_end_times
from shotcast.units import format_size
from shotcast.wire import NodeShape

RESULTS = Path(__file__).parent / "data" / "h200"
PART = "NVIDIA H200"
FOUR_LAYOUTS = (Layout(8, 1), Layout(4, 2), Layout(2, 4), Layout(1, 8))
PUBLISHED_LAYOUTS = {Layout(8, 1): ("56", "506"), Layout(1, 8): ("10", "764")}
"""405B by TensorRT-LLM, tokens/s of one sequence and of many; docs/design/strong_scaling.md links all publications."""
PUBLISHED_TOKENS = (
    ("llama-3.1-405b", 8, 128, 128, 3814),
    ("llama-3.1-405b", 8, 1000, 1000, 3330),
    ("llama-3.1-405b", 8, 2048, 128, 456),
    ("llama-3.1-405b", 8, 2048, 2048, 2948),
    ("llama-3.1-70b", 1, 1000, 1000, 2909),
    ("llama-3.1-70b", 1, 2048, 2048, 2003),
)
"""Llama FP8 on H200 with TensorRT-LLM, tensor parallel: tokens in and out, tokens/s.

The published 70B is Llama 3.3, whose dimensions are those of 3.1.
"""
PUBLISHED_STAGES = {1: 393, 2: 813, 4: 1511, 8: 2495}
"""70B on 1 to 8 stages of RTX 6000 Pro, FP4, 2048 tokens in and 128 out: tokens/s."""
EXTERNAL = {
    "TensorRT-LLM": (2.8, 3.3, 3.9),
    "SGLang": (2.6, 3.1, 4.2),
    "vLLM": (4.6, 4.9, 5.7),
    "NCCL 2.29": (7.3, 11.3, 18.4),
}
"""AIConfigurator's data: microseconds of an all-reduce of 32 K elements of 16 bits on 2, 4 and 8 H200."""
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CLUSTERS = ("h200-x4-ndr", "a100-x4-slingshot")
SEQUENCES = 8
WORK = {"prefill-heavy, 2048 in, 128 out": (2048, 128), "decode-heavy, 128 in, 2048 out": (128, 2048)}
SIZES = (128 << 10, 512 << 10, 2 << 20)


@dataclass(frozen=True, slots=True)
class NcclCosts(CollectiveCosts):
    """Sums by NCCL in place of our own, by its own model between nodes and its measured rings within one."""

    own_link: LinkCost
    host: nccl.Host = field(default=nccl.HOPPER, kw_only=True)

    def all_reduce(self, nbytes: int, ranks: int, itemsize: int, algorithm: str = "auto") -> CollectiveTime:
        # what own cells take of the wire, half, is not NCCL's
        shape = self.shape(ranks)
        cells = self.network_over(shape.nodes)
        wires = NetworkCost(cells.step_us, 2 * cells.bw_gbps)
        return CollectiveTime(nccl.all_reduce_us(nbytes, shape, self.own_link, wires, self.host), "vendor")


def nccl_link() -> LinkCost:
    """Return NCCL's constants on the link, fitted to its measured rings on 2 and 4 GPUs."""
    points = []
    for ranks in (2, 4):
        rows = json.loads((RESULTS / f"all_reduce_bf16_x{ranks}.json").read_text())["rows"]
        points += [(ranks, row["nbytes"], row["time_us"]) for row in rows if row["algorithm"] == "nccl_ring"]
    return nccl.fit_rings(points)


def layouts_table(calibration: Calibration) -> str:
    """Return 405B on 8 H200, by layout, beside the published figures."""
    job = Job(preset("llama-3.1-405b"), "405b", "fp8", cluster.load("dgx-h200"), 8, 2048, 128)
    points = [point for point in plan(job, calibration).points if point.engines == 1]
    lines = ["| layout | tokens/s, one sequence | published | tokens/s, most | with sequences | published |"]
    lines.append("|---|---|---|---|---|---|")
    alone: dict[Layout, float] = {}
    most: dict[Layout, Point] = {}
    for layout in FOUR_LAYOUTS:
        of_layout = [point for point in points if point.layout == layout]
        alone[layout] = 1e3 * job.output / of_layout[0].latency_ms(job.output)
        most[layout] = max(of_layout, key=lambda point: point.tokens_per_s)
        published = PUBLISHED_LAYOUTS.get(layout, ("", ""))
        name = f"TP{layout.tensor_parallel}" * (layout.tensor_parallel > 1)
        name += " x " * (min(layout[:2]) > 1) + f"PP{layout.pipeline_parallel}" * (layout.pipeline_parallel > 1)
        cells = [name, f"{alone[layout]:.1f}", published[0], f"{most[layout].tokens_per_s:.0f}"]
        lines.append(f"| {' | '.join([*cells, _capped(most[layout]), published[1]])} |")
    first, last = FOUR_LAYOUTS[0], FOUR_LAYOUTS[-1]
    ratios = alone[first] / alone[last], most[last].tokens_per_s / most[first].tokens_per_s
    lines += ["", f"TP8 is {ratios[0]:.1f} times as fast as PP8 for one sequence (published: 5.6), and PP8 has"]
    lines += [f"{ratios[1]:.2f} times the throughput of TP8 (published: 1.5)."]
    return "\n".join(lines) + "\n"


def tokens_table(calibration: Calibration) -> str:
    """Return published throughputs of tensor parallel beside predicted ones."""
    lines = ["| model | GPUs | in, out | published | predicted | | with sequences |", "|---|---|---|---|---|---|---|"]
    for model, gpus, prompt, output, published in PUBLISHED_TOKENS:
        job = Job(preset(model), model, "fp8", cluster.load("dgx-h200"), gpus, prompt, output)
        points = [point for point in plan(job, calibration).points if point.layout == Layout(gpus, 1)]
        best = max(points, key=lambda point: point.tokens_per_s)
        cells = [model, str(gpus), f"{prompt}, {output}", str(published), f"{best.tokens_per_s:.0f}"]
        cells += [f"{best.tokens_per_s / published - 1:+.0%}", _capped(best)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _capped(point: Point) -> str:
    """Return the sequences of a point, marked where more might fit than plans consider."""
    return f"{point.sequences}{' (cap)' * (point.sequences == MOST_SEQUENCES)}"


def stages_table(calibration: Calibration) -> str:
    """Return throughput over that of one stage: published, ideal, and predicted with as many sequences a stage."""
    lines = ["| stages | published | ideal | predicted, 32 sequences a stage | predicted, as many as fit |"]
    lines.append("|---|---|---|---|---|")
    firsts: list[float] = []
    for stages, published in PUBLISHED_STAGES.items():
        job = Job(preset("llama-3.1-70b"), "70b", "fp8", cluster.load("dgx-h200"), stages, 2048, 128)
        points = [point for point in plan(job, calibration).points if point.layout == Layout(1, stages)]
        equal = next(point for point in points if point.sequences == 32 * stages)
        most = max(points, key=lambda point: point.tokens_per_s)
        firsts = firsts or [equal.tokens_per_s, most.tokens_per_s]
        cells = [str(stages), f"{published / PUBLISHED_STAGES[1]:.2f}", f"{stages:.2f}"]
        cells += [f"{equal.tokens_per_s / firsts[0]:.2f}", f"{most.tokens_per_s / firsts[1]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def external_table(calibration: Calibration, link: LinkCost) -> str:
    """Return an all-reduce on 2, 4 and 8 H200: others' kernels as published, ours and NCCL as predicted."""
    ours = CollectiveCosts.on(cluster.load("dgx-h200"), calibration.link)
    nbytes, counts = 64 << 10, (2, 4, 8)
    rows = {f"{name}, published": [f"{time:.1f}" for time in times] for name, times in EXTERNAL.items()}
    rows["NCCL, predicted"] = [f"{nccl.ring_us(nbytes, ranks, link):.1f}" for ranks in counts]
    rows["ours, predicted"] = [f"{ours.all_reduce(nbytes, ranks, 2).time_us:.1f}" for ranks in counts]
    lines = ["| us | 2 | 4 | 8 |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(times)} |" for name, times in rows.items())]) + "\n"


def sums_table(calibration: Calibration, link: LinkCost) -> str:
    """Return how many times as long NCCL's all-reduce takes as ours, by nodes and bytes."""
    sizes = [format_size(nbytes) for nbytes in SIZES]
    lines = [f"| cluster | nodes | {' | '.join(sizes)} | fastest of ours |", f"|---|---|{'---|' * (len(SIZES) + 1)}"]
    for name in CLUSTERS:
        ours, library = costs_of(name, calibration, link)
        for nodes in NODES[1:7]:
            ranks = 4 * nodes
            own = [ours.all_reduce(nbytes, ranks, 2) for nbytes in SIZES]
            ratios = [
                library.all_reduce(nbytes, ranks, 2).time_us / each.time_us
                for nbytes, each in zip(SIZES, own, strict=True)
            ]
            labels = ", ".join(dict.fromkeys(registered()[each.algorithm].label for each in own))
            lines.append(f"| {name} | {nodes} | {' | '.join(f'{ratio:.1f}' for ratio in ratios)} | {labels} |")
    return "\n".join(lines) + "\n"


def costs_of(name: str, calibration: Calibration, link: LinkCost) -> tuple[CollectiveCosts, NcclCosts]:
    """Return our own costs of collectives on a cluster, and NCCL's."""
    spec = cluster.load(name)
    constants = calibration.scaled_to(spec.gpu)
    ours = CollectiveCosts.on(spec, constants.link)
    ratio = spec.gpu.link.paper_bw_gbps / calibration.gpu.link.paper_bw_gbps
    library = replace(link, bw_gbps=link.bw_gbps * ratio)
    host = nccl.Host(spec.gpu.compute_capability, spec.cpu_vendor)
    return ours, NcclCosts(ours.link, ours.network, ours.gpus_per_node, library, wires=ours.wires, host=host)


def scaling_tables(calibration: Calibration, link: LinkCost) -> str:
    """Return seconds of a batch by nodes, layouts and sums."""
    lines = []
    for name in CLUSTERS:
        spec = cluster.load(name)
        ours, library = costs_of(name, calibration, link)
        for model in ("llama-3.1-405b", "llama-3.1-70b"):
            quantization = "fp8" if spec.gpu.fp8_tflops else ""
            for title, (prompt, output) in WORK.items():
                lines.append(
                    f"{model}{' FP8' * bool(quantization)} on {name}, {title}: seconds of {SEQUENCES} requests"
                )
                lines.append("")
                lines.append("| nodes | TP, NCCL | TP, ours | gain | TP4 x PP, ours | PP | best |")
                lines.append("|---|---|---|---|---|---|---|")
                for nodes in NODES:
                    cells = _scaling_row(spec, model, quantization, prompt, output, nodes, ours, library, calibration)
                    if cells:
                        lines.append(f"| {' | '.join([str(nodes), *cells])} |")
                lines.append("")
    return "\n".join(lines)


def _scaling_row(
    spec: Cluster,
    model: str,
    quantization: str,
    prompt: int,
    output: int,
    nodes: int,
    ours: CollectiveCosts,
    library: CollectiveCosts,
    calibration: Calibration,
) -> list[str]:
    gpus, config = 4 * nodes, preset(model)
    job = Job(config, model, quantization, spec, min(gpus, 1024), prompt, output)
    constants = calibration.scaled_to(spec.gpu)

    def seconds(layout: Layout, collectives: CollectiveCosts) -> float | None:
        if layout.pipeline_parallel > config.layers:
            return None
        if memory_of(job, layout).sequences(prompt + output) < SEQUENCES:
            return None
        return batch_s(StepModel(config, layout, constants, collectives, quantization), prompt, output)

    forms: dict[str, float | None] = {
        "TP, NCCL": seconds(Layout(gpus, 1), library),
        "TP": seconds(Layout(gpus, 1), ours),
        "TP4 x PP": seconds(Layout(4, nodes), ours) if nodes > 1 else None,
        "PP": seconds(Layout(1, gpus), ours),
    }
    if all(value is None for value in forms.values()):
        return []
    texts = {name: "" if value is None else f"{value:.2f}" for name, value in forms.items()}
    gain = "" if forms["TP"] is None or forms["TP, NCCL"] is None else f"{forms['TP, NCCL'] / forms['TP']:.2f}"
    own = {name: value for name, value in forms.items() if value is not None and name != "TP, NCCL"}
    best = min(own, key=own.__getitem__)
    return [texts["TP, NCCL"], texts["TP"], gain, texts["TP4 x PP"], texts["PP"], best]


def batch_s(model: StepModel, prompt: int, output: int) -> float:
    """Return the seconds in which a batch is served: its prompts, then its tokens, by the equations of a plan."""
    stages = model.layout.pipeline_parallel
    together = max(1, 2048 // prompt)
    full = StepWork(0, 0.0, ((prompt, 0),) * min(together, SEQUENCES), min(together, SEQUENCES))
    times = [stage.time_us for stage in model.stages(full)]
    steps = -(-SEQUENCES // together)
    prompts_us = sum(times) + sum(model.transfers_us(full)) + (steps - 1) * max(times)
    rows, shares = -(-SEQUENCES // stages), min(SEQUENCES, stages)
    work = StepWork(rows, prompt + output / 2, (), rows)
    decode = [stage.time_us for stage in model.stages(work)]
    # a token passes all stages, and from the last to the first
    round_us = max(shares * max(decode), sum(decode) + sum(model.transfers_us(work)))
    return (prompts_us + (output - 1) * round_us) / 1e6


def thousand_nodes_table(calibration: Calibration) -> str:
    """Return an all-reduce of 1,024 nodes of 4 GPUs, followed rank by rank.

    The ring is not one of our kernels over nodes, and has no cells: data have the whole bandwidth. Flags take half of
    it from the others.
    """
    spec = cluster.load("h200-x4-ndr")
    shape = NodeShape(1024, 4)
    late = [100.0 if rank == 1234 else 0.0 for rank in range(shape.world_size)]
    lines = ["| algorithm | bytes | us | with jitter of 1 us | with one rank 100 us late | leaves of 32 nodes, 2:1 |"]
    lines += ["|---|---|---|---|---|---|"]
    for name in ("ring", "nvrar", "nvrar_halving", "nvrar_pairs"):
        own, label = name != "ring", registered()[name].label
        fabric = Fabric.on(spec, calibration.link, cells=own)
        narrow = replace(fabric, nodes_per_leaf=32, oversubscription=2.0)
        if not own:
            label = f"{label}, no flags"
        for nbytes in (128 << 10, 2 << 20):
            call = CollectiveCall.all_reduce(name, nbytes, shape)
            plain = exact_end_times(call, fabric).max()
            noisy = exact_end_times(call, fabric, jitter=exponential_jitter(1.0, 1)).max()
            delayed = exact_end_times(call, fabric, late).max()
            queued = exact_end_times(call, narrow).max()
            cells = [label, format_size(nbytes), *(f"{each:.0f}" for each in (plain, noisy, delayed, queued))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tables() -> dict[str, str]:
    """Return every table by the name of its marker."""
    calibration, link = load(PART), nccl_link()
    makers: dict[str, Callable[[], str]] = {
        "layouts": lambda: layouts_table(calibration),
        "tokens": lambda: tokens_table(calibration),
        "stages": lambda: stages_table(calibration),
        "external": lambda: external_table(calibration, link),
        "nccl": published_nccl.table,
        "sums": lambda: sums_table(calibration, link),
        "scaling": lambda: scaling_tables(calibration, link),
        "thousand": lambda: thousand_nodes_table(calibration),
    }
    return {name: make() for name, make in makers.items()}


def filled(page: str, made: dict[str, str]) -> str:
    """Return a page with each table between its markers. Raises ConfigError if it lacks one."""
    for name, table in made.items():
        page = forecast.filled(page, table, f"<!-- benchmarks/scaling_study.py {name} -->", f"<!-- end of {name} -->")
    return page


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fill", type=Path, default=None)
    options = parser.parse_args(None if arguments is None else list(arguments))
    made = tables()
    if options.fill is None:
        print("\n".join(f"{name}\n\n{table}" for name, table in made.items()), end="")
    else:
        options.fill.write_text(filled(options.fill.read_text(), made))


if __name__ == "__main__":
    main()
