"""Plans in words, as JSON, and as a command that starts the planned engine."""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

from shotcast.models.source import RANDOM
from shotcast.planner.plan import BATCH_TOKENS, LATENCY, Plan, Point, Query
from shotcast.units import about, about_size, counted

KINDS = {
    "matmuls": ("qkv", "output", "gate_up", "down", "head"),
    "attention": ("attention", "rotation"),
    "sums between ranks": ("all_reduce",),
    "transfers between stages": ("transfer",),
    "the rest": ("norm", "activation", "embedding", "sampling"),
}
"""The parts of a step by their names in sentences."""
LOADS = (1, 16, 64, 256)
"""Sequences per engine for which an answer describes the user experience."""
READING_MS = 200.0
"""Milliseconds per token above which text arrives more slowly than people read."""


def reason(plan: Plan) -> str:
    """Explain in a few sentences why the best point is the best, or why there is none."""
    best, query = plan.best, plan.query
    if best is None:
        return _no_best(plan)
    of = " an engine" * (best.engines > 1)
    sentences = [f"{_layout(best)} with {counted(best.sequences, 'sequence')}{of}: {_speed(best)}.", _loads(plan, best)]
    if best.tpot_ms > READING_MS:
        sentences.append("Text comes slower than people read it; a chat needs a bound, such as --target tpot=50.")
    total = sum(best.parts.values())
    shares = {kind: sum(best.parts.get(name, 0.0) for name in names) / total for kind, names in KINDS.items()}
    named = {"sums between ranks": f"sums between ranks ({best.algorithm})"}
    listed = ", ".join(f"{named.get(kind, kind)} {share:.0%}" for kind, share in shares.items() if share >= 0.005)
    sentences.append(f"A step that decodes is {listed}.")
    slowest, fastest = best.stage_us
    if best.layout.pipeline_parallel > 1:
        sentences.append(f"Its slowest stage takes {slowest / fastest - 1:.0%} longer than its fastest.")
    others = [
        point for point in plan.best_of_each_layout() if (point.layout, point.engines) != (best.layout, best.engines)
    ]
    if others:
        sentences.append(_compared(best, others[0], query))
    return " ".join(filter(None, sentences))


def _speed(point: Point) -> str:
    return f"{about(point.tpot_ms)} ms a token, {about(point.tokens_per_s)} tokens/s"


def _loads(plan: Plan, best: Point) -> str:
    """Describe the user experience of the best layout with other numbers of sequences; "" if there are none."""
    same = [point for point in plan.points if (point.layout, point.engines) == (best.layout, best.engines)]
    loads = [point for point in same if point.sequences in LOADS and point.sequences != best.sequences]
    listed = "; ".join(f"{counted(point.sequences, 'sequence')}: {_speed(point)}" for point in loads)
    return f"With other loads, {listed}." if listed else ""


def _compared(best: Point, other: Point, query: Query) -> str:
    if query.target.kind == LATENCY:
        ratio = other.latency_ms(query.output) / best.latency_ms(query.output)
        gain = f"a request takes {ratio:.2f} times as long"
    else:
        ratio = best.tokens_per_s / other.tokens_per_s
        gain = f"{1 / ratio:.2f} times the tokens/s, with {counted(other.sequences, 'sequence')}"
    certain = abs(math.log(ratio)) > best.tpot_error + other.tpot_error
    return f"Next is {_layout(other)}: {gain}{'' if certain else ', which the error bars do not tell apart'}."


def _no_best(plan: Plan) -> str:
    if not plan.points:
        short = [each for each in plan.refused.items() if "has no room" in each[1]]
        # the last one divides the model most
        name, why = (short or list(plan.refused.items()))[-1]
        return f"Nothing fits, whatever the layout; {name}: {why}."
    target = plan.query.target
    nearest = min(plan.points, key=lambda one: max(one.ttft_ms / target.ttft_ms, one.tpot_ms / target.tpot_ms))
    return (
        f"No layout has {plan.query.target}. The nearest is {_layout(nearest)} with "
        f"{counted(nearest.sequences, 'sequence')}: first token {about(nearest.ttft_ms)} ms, each later token "
        f"{about(nearest.tpot_ms)} ms."
    )


def refusals(plan: Plan, names: int) -> list[str]:
    """Return a line per kind of reason that rules out layouts: at most ``names`` names, and the first one's reason.

    Reasons that differ only in their numbers are of the same kind.
    """
    kinds: dict[str, list[str]] = {}
    for name, why in plan.refused.items():
        kinds.setdefault(re.sub(r"[\d.]+( [KMG]?i?B)?", "", why), []).append(name)
    lines = []
    for members in kinds.values():
        more = f" and {len(members) - names} more" if len(members) > names else ""
        first = f". {members[0]}" * (len(members) > 1)
        lines.append(f"Refused: {', '.join(members[:names])}{more}{first}: {plan.refused[members[0]]}.")
    return lines


def _layout(point: Point) -> str:
    engines = f", {point.engines} such engines" if point.engines > 1 else ""
    return f"{point.layout.label}{engines}"


def unsupported_reason(plan: Plan) -> str:
    """Return why the engine cannot run the planned layout; "" if it can."""
    cluster, best = plan.query.cluster, plan.best
    if best is not None and cluster.gpus_per_host is not None and best.layout.ranks > cluster.gpus_per_host:
        return (
            f"An engine of {best.layout.ranks} ranks has several hosts of {cluster.gpus_per_host} GPUs, which the plan "
            "joins by the link of their GPUs. This engine takes the network between hosts, so no command starts it."
        )
    return ""


def folder(name: str) -> str:
    """Return the model as an argument of commands that need its weights; a preset becomes a folder of the same name."""
    return f"./{name.removeprefix(RANDOM).partition(':')[0]}" if name.startswith(RANDOM) else name


def command(plan: Plan, longest: int = 0) -> str | None:
    """Return the command that starts one engine at the best point, with torchrun on each node if there are several.

    None if there is no best point, or the engine does not run it.

    Args:
        longest: tokens of the longest request that the engine must accept, if longer than the query's.
    """
    best, query = plan.best, plan.query
    if best is None or unsupported_reason(plan):
        return None
    # a step must have room for a token of each sequence
    tokens = max(BATCH_TOKENS, best.sequences)
    serve = ["serve", folder(query.name), "--device", plan.device]
    serve += ["--tensor-parallel", str(best.layout.tensor_parallel)]
    serve += ["--pipeline-parallel", str(best.layout.pipeline_parallel)]
    serve += ["--quantization", query.quantization] if query.quantization else []
    serve += ["--algorithm", query.limits.algorithm] if query.limits.algorithm != "auto" else []
    serve += ["--max-model-len", str(max(longest, query.prompt + query.output))]
    serve += ["--max-num-seqs", str(best.sequences)] if best.sequences > 1 else []  # a server has more than one user
    serve += ["--max-num-batched-tokens", str(tokens)] if tokens > BATCH_TOKENS else []
    per_node = query.cluster.gpus_per_node
    if best.layout.ranks <= per_node:
        return shlex.join(["shotcast", *serve])
    launch = ["torchrun", "--nnodes", str(best.layout.ranks // per_node), "--node-rank", "NODE", "--nproc-per-node"]
    launch += [str(per_node), "--master-addr", "NODE0", "--master-port", "29500", "-m", "shotcast"]
    return shlex.join([*launch, *serve])


def as_json(plan: Plan, longest: int = 0) -> dict[str, Any]:
    """Convert a plan to JSON: each point with InferenceX's keys (seconds, tokens per second, counts) plus ours.

    The arguments are the same as for :func:`command`.
    """
    return {
        "target": str(plan.query.target),
        "gpu": plan.query.cluster.gpu.name,
        "cluster": plan.query.cluster.name,
        "calibrated": plan.calibrated,
        "reason": reason(plan),
        "command": command(plan, longest),
        "best": _row(plan, plan.best) if plan.best else None,
        "pareto": [_row(plan, point) for point in plan.pareto()],
        "points": [_row(plan, point) for point in plan.points],
        "refused": plan.refused,
    }


def _row(plan: Plan, point: Point) -> dict[str, Any]:
    query = plan.query
    return {
        "model": query.name,
        "precision": plan.precision,
        "tp": point.layout.tensor_parallel,
        "pp": point.layout.pipeline_parallel,
        "ep": 1,  # the engine runs no model with experts
        "dp_attention": False,
        "dp": point.engines,
        "conc": point.sequences * point.engines,
        "isl": query.prompt,
        "osl": query.output,
        "tput_per_gpu": point.tokens_per_s_per_gpu * (query.prompt + query.output) / query.output,
        "output_tput_per_gpu": point.tokens_per_s_per_gpu,
        "median_ttft": point.ttft_ms / 1e3,
        "median_tpot": point.tpot_ms / 1e3,
        "median_intvty": point.tokens_per_s_per_user,
        "ttft_error": point.ttft_error,
        "tpot_error": point.tpot_error,
        "all_reduce": point.algorithm,
        "step_us": point.parts,
        "memory": {
            "weights": point.memory.weights,
            "steps": point.memory.steps(point.sequences),
            "cache": point.memory.cache(point.sequences),
            "usable": point.memory.usable,
        },
    }


def memory_text(point: Point) -> str:
    memory = point.memory
    return f"{about_size(memory.weights)} weights, {about_size(memory.cache(point.sequences))} cache"
