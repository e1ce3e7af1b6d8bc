"""Strong scaling: eight requests on 1 to 256 nodes of 4 GPUs, by layout and by whose sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markdown_table import folded, table
from nccl_costs import NcclStepModel
from sums_over_nodes import CLUSTERS, costs_on, in_16_bits

from shotcast.hardware import cluster
from shotcast.models.presets import preset
from shotcast.planner.calibration import Calibration
from shotcast.planner.collectives import CollectiveCosts
from shotcast.planner.plan import BATCH_TOKENS, MAX_RANKS, Query, memory_of
from shotcast.planner.step import Layout, StepModel, StepWork

MODELS = ("llama-3.1-405b", "llama-3.1-70b")
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEQUENCES = 8
WORK = {"prefill-heavy": (2048, 128), "decode-heavy": (128, 2048)}
TP_NCCL, TP, TP_NARROW, HYBRID, PP = "TP, NCCL", "TP", "TP, 16-bit sums", "TP4 x PP", "PP"
PUBLISHED_GAIN = 1.72
"""The most that NVRAR gave over NCCL end to end, 405B, decode-heavy, tensor parallel over nodes."""


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A model and kind of work on a number of nodes: seconds of all requests by layout, of those that fit."""

    cluster: str
    model: str
    work: str
    nodes: int
    seconds: dict[str, float]

    @property
    def gain(self) -> float | None:
        """NCCL's time over ours of tensor parallel; None if that does not fit."""
        return self.seconds[TP_NCCL] / self.seconds[TP] if TP in self.seconds else None

    @property
    def best(self) -> str:
        """The fastest layout of ours, each with the sums of the contract."""
        return min((name for name in (TP, HYBRID, PP) if name in self.seconds), key=self.seconds.__getitem__)


def scaling_rows(calibration: Calibration) -> list[ScalingRow]:
    """Return every case and number of nodes in which some layout fits."""
    rows = []
    for name in CLUSTERS:
        ours = costs_on(name, calibration)
        for model in MODELS:
            for work in WORK:
                for nodes in NODES:
                    gpus = ours.gpus_per_node * nodes
                    tensor = Layout(gpus, 1)
                    forms = {
                        TP_NCCL: (tensor, ours, NcclStepModel),
                        TP: (tensor, ours, StepModel),
                        TP_NARROW: (tensor, in_16_bits(ours), StepModel),
                        HYBRID: (Layout(ours.gpus_per_node, nodes), ours, StepModel),
                        PP: (Layout(1, gpus), ours, StepModel),
                    }
                    if nodes == 1:
                        del forms[HYBRID]
                    seconds = {form: _seconds(name, model, work, calibration, *each) for form, each in forms.items()}
                    fitting = {form: each for form, each in seconds.items() if each is not None}
                    if fitting:
                        rows.append(ScalingRow(name, model, work, nodes, fitting))
    return rows


def _seconds(
    name: str,
    model: str,
    work: str,
    calibration: Calibration,
    layout: Layout,
    collectives: CollectiveCosts,
    kind: type[StepModel],
) -> float | None:
    """Return the seconds of all requests; None if they do not fit, or there are more stages than layers."""
    spec, config, (prompt, output) = cluster.load(name), preset(model), WORK[work]
    if layout.pipeline_parallel > config.layers:
        return None
    quantization = "fp8" if spec.gpu.fp8_tflops else ""
    query = Query(config, model, quantization, spec, min(layout.ranks, MAX_RANKS), prompt, output)
    if memory_of(query, layout).sequences(prompt + output) < SEQUENCES:
        return None
    constants = calibration.scaled_to(spec.gpu)
    return batch_s(kind(config, layout, constants, collectives, quantization), prompt, output)


def batch_s(model: StepModel, prompt: int, output: int) -> float:
    """Return the seconds in which a batch is served: its prompts, then its tokens, by the equations of a plan."""
    stages = model.layout.pipeline_parallel
    together = min(max(1, BATCH_TOKENS // prompt), SEQUENCES)
    full = StepWork(0, 0.0, ((prompt, 0),) * together, together)
    times = [stage.time_us for stage in model.stages(full)]
    steps = -(-SEQUENCES // together)
    prompts_us = sum(times) + sum(model.transfers_us(full)) + (steps - 1) * max(times)
    rows, shares = -(-SEQUENCES // stages), min(SEQUENCES, stages)
    work = StepWork(rows, prompt + output / 2, (), rows)
    decode = [stage.time_us for stage in model.stages(work)]
    # a token passes all stages, and from the last to the first
    round_us = max(shares * max(decode), sum(decode) + sum(model.transfers_us(work)))
    return (prompts_us + (output - 1) * round_us) / 1e6


def case(rows: Sequence[ScalingRow], name: str, model: str, work: str) -> list[ScalingRow]:
    """Return the rows of a case."""
    return [row for row in rows if (row.cluster, row.model, row.work) == (name, model, work)]


def scaling_tables(rows: Sequence[ScalingRow]) -> str:
    """Return the comparison with what is published, and seconds by nodes and layouts."""
    text = _comparison(rows)
    for name in CLUSTERS:
        tables = []
        for model in MODELS:
            for work, (prompt, output) in WORK.items():
                fp8 = " FP8" * bool(cluster.load(name).gpu.fp8_tflops)
                tables.append(f"{model}{fp8}, {work}, {prompt} in, {output} out:\n\n")
                tables[-1] += _case_table(case(rows, name, model, work))
        text += "\n" + folded(f"Seconds of {SEQUENCES} requests on {name}", "\n".join(tables))
    return text


def _case_table(rows: Sequence[ScalingRow]) -> str:
    body = []
    for row in rows:
        texts = [f"{row.seconds[form]:.2f}" if form in row.seconds else "" for form in (TP_NCCL, TP, HYBRID, PP)]
        gain = "" if row.gain is None else f"{row.gain:.2f}"
        body.append([str(row.nodes), *texts[:2], gain, *texts[2:], row.best])
    return table(["nodes", "TP, NCCL", "TP, ours", "gain", "TP4 x PP, ours", "PP", "best"], body)


def _comparison(rows: Sequence[ScalingRow]) -> str:
    """Return each published finding, and what is predicted for it."""
    header = ["published", *(f"{model.removeprefix('llama-3.1-')} on {name}" for name in CLUSTERS for model in MODELS)]
    cases = [(name, model) for name in CLUSTERS for model in MODELS]
    body = [
        ["TP and hybrid scale poorly over nodes", *(_speedup(case(rows, *each, "decode-heavy")) for each in cases)],
        ["hybrid wins prefill-heavy", *(_wins(case(rows, *each, "prefill-heavy"), HYBRID) for each in cases)],
        ["TP wins decode-heavy", *(_wins(case(rows, *each, "decode-heavy"), TP) for each in cases)],
    ]
    title = f"NVRAR gains up to {PUBLISHED_GAIN} decode-heavy (405B)"
    for form, label in ((TP, title), (TP_NARROW, "the same, if sums pass in 16 bits")):
        gains = [f"up to {most_gain(rows, *each, form):.2f}" for each in cases]
        body.append([label, *gains])
    gains = []
    for each in cases:
        found = [row.gain for row in case(rows, *each, "prefill-heavy") if row.nodes > 1 and row.gain is not None]
        gains.append(f"{min(found):.2f} to {max(found):.2f}")
    return table(header, [*body, ["gain prefill-heavy", *gains]])


def most_gain(rows: Sequence[ScalingRow], name: str, model: str, form: str) -> float:
    """Return the most that a form of our sums gains over NCCL on several nodes, tensor parallel and decode-heavy."""
    found = [row for row in case(rows, name, model, "decode-heavy") if row.nodes > 1 and form in row.seconds]
    return max(row.seconds[TP_NCCL] / row.seconds[form] for row in found)


def _speedup(rows: Sequence[ScalingRow]) -> str:
    """Return the best time over nodes beside that of the fewest nodes."""
    first = rows[0]
    best = min(rows, key=lambda row: row.seconds[row.best])
    ratio = first.seconds[first.best] / best.seconds[best.best]
    return f"{ratio:.1f} times as fast on {best.nodes // first.nodes} times the GPUs"


def _wins(rows: Sequence[ScalingRow], form: str) -> str:
    """Return on how many nodes a form wins, of the numbers of nodes on which TP and hybrid fit."""
    both = [row for row in rows if TP in row.seconds and HYBRID in row.seconds]
    won = [row.nodes for row in both if row.best == form]
    return f"{len(won)} of {len(both)}" + (f" ({', '.join(map(str, won))} nodes)" if 0 < len(won) < len(both) else "")
